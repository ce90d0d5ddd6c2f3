"""Tables of fields in the pages, made from the schema. `make docs` writes them; a test compares them.

docs/configuration.md has all settings, docs/data.md the arguments of the arith task and of its model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from realsys.config.fields import is_arguments
from realsys.config.schema import Config

PAGES = ("docs/configuration.md", "docs/data.md")
_TABLES = re.compile(r"(<!-- fields(?: of (\S+))?: written by `make docs` -->\n).*?(<!-- end of fields -->)", re.DOTALL)


def rewrite(page: str) -> str:
    """Return ``page`` with new tables between the marks: of all settings, or of the arguments of one part."""
    return _TABLES.sub(lambda mark: f"{mark[1]}\n{reference(mark[2] or '')}\n{mark[3]}", page)


def reference(of: str = "") -> str:
    """Return Markdown with one table per section of the schema, and per entry of its mappings and lists of sections.

    ``of``: a field with the arguments of a part, to have tables of these instead.
    """
    section: Any = Config
    for name in filter(None, of.split(".")):
        section = section.model_fields[name].annotation
    return "\n".join(_section(section, f"{of}." if of else "", "" if of else "Trial")).strip() + "\n"


def _section(section: type[BaseModel], prefix: str, title: str, default: object = None) -> Iterator[str]:
    """Yield the table of a section and those inside of it. ``default``: the section's default, if it is a field's."""
    nested: list[tuple[str, type[BaseModel], object]] = []
    rows: list[str] = []
    for name, info in section.model_fields.items():
        value = getattr(default, name, info.default)
        if (inner := _inner(info.annotation)) and (inner[0] or not is_arguments(info)):
            suffix, kind = inner
            nested.append((name + suffix, kind, None if suffix else value))
            if not suffix:
                continue
        text = (info.description or "").replace("|", "\\|")
        rows.append(f"| `{prefix}{name}` | {_kind(info)} | {_shown(value)} | {text} |")
    if title:
        yield f"### {title}\n"
    doc = section.__doc__
    if doc and title and section is not Config:
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
    if get_origin(annotation) is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
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


def _shown(value: object) -> str:
    """Write a default. Of the arguments of a part it has those that differ from the part's own defaults."""
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True) or ""
    if value in ("", PydanticUndefined):
        return ""
    if value is None:
        return "`null`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    for path in map(Path, PAGES):
        path.write_text(rewrite(path.read_text("utf-8")), encoding="utf-8")
