"""Table of all fields in docs/configuration.md, made from the schema. `make docs` writes it; a test compares it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from realsys.config.schema import Config

BEGIN, END = "<!-- fields: written by `make docs` -->", "<!-- end of fields -->"


def reference() -> str:
    """Return Markdown with one table per section of the schema, and per entry of its mappings and lists of sections."""
    return "\n".join(_section(Config, "", "Trial")).strip() + "\n"


def rewrite(page: str) -> str:
    """Return ``page`` with a new table between the marks ``BEGIN`` and ``END``."""
    head, _, rest = page.partition(BEGIN)
    _, _, foot = rest.partition(END)
    return f"{head}{BEGIN}\n\n{reference()}\n{END}{foot}"


def _section(section: type[BaseModel], prefix: str, title: str, default: object = None) -> Iterator[str]:
    """Yield the table of a section and those inside of it. ``default``: the section's default, if it is a field's."""
    nested: list[tuple[str, type[BaseModel], object]] = []
    rows: list[str] = []
    for name, info in section.model_fields.items():
        value = getattr(default, name, info.default)
        if inner := _inner(info.annotation):
            suffix, kind = inner
            nested.append((name + suffix, kind, None if suffix else value))
            if not suffix:
                continue
        shown = "" if value in ("", PydanticUndefined) else f"`{_value(value)}`"
        text = (info.description or "").replace("|", "\\|")
        rows.append(f"| `{prefix}{name}` | {_kind(info)} | {shown} | {text} |")
    yield f"### {title}\n"
    doc = section.__doc__
    if doc and section is not Config:
        yield doc.strip().splitlines()[0].replace("``", "`") + "\n"
    if rows:
        yield "| field | values | default | meaning |\n|---|---|---|---|"
        yield from rows
        yield ""
    for name, kind, value in nested:
        yield from _section(kind, f"{prefix}{name}.", f"`{prefix}{name}`", value)


def _inner(annotation: Any) -> tuple[str, type[BaseModel]] | None:
    """Return the section of a field, or of each entry of a mapping or list, with what its path adds to the name."""
    arguments = get_args(annotation)
    suffix = {dict: ".NAME", list: "[]"}.get(get_origin(annotation), "")  # type: ignore[call-overload]
    kind = arguments[-1] if suffix else annotation
    return (suffix, kind) if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _kind(info: FieldInfo) -> str:
    """Describe the values of a field: `int > 0`, `embedded, sglang`, `list of text`, `text or null`, ..."""
    return " ".join([_type_name(info.annotation), *_bounds(info.metadata)])


def _type_name(annotation: Any) -> str:
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        rules = [rule for info in arguments[1:] for rule in getattr(info, "metadata", ())]
        return " ".join([_type_name(arguments[0]), *_bounds(rules)])
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(map(_type_name, arguments))
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if get_origin(annotation) is list:
        return "list" if _inner(annotation) else f"list of {_type_name(arguments[0])}"
    if get_origin(annotation) is dict:
        return "mapping"
    names = {str: "text", bool: "true, false", NoneType: "null"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _bounds(rules: Iterable[Any]) -> list[str]:
    signs = {
        annotated_types.Gt: ">",
        annotated_types.Ge: "≥",
        annotated_types.Lt: "<",
        annotated_types.Le: "≤",
    }
    bounds = []
    for rule in rules:
        sign = signs.get(type(rule))
        if sign is not None:
            (bound,) = (getattr(rule, slot) for slot in rule.__slots__)
            bounds.append(f"{sign} {bound}")
    return bounds


def _value(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    path = Path("docs/configuration.md")
    path.write_text(rewrite(path.read_text("utf-8")), encoding="utf-8")
