"""Table of all fields in docs/configuration.md, made from the schema. `make docs` writes it; a test compares it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from realsys.config.schema import Config

BEGIN, END = "<!-- fields: written by `make docs` -->", "<!-- end of fields -->"


def reference() -> str:
    """Return Markdown with one table per section of the schema."""
    return "\n".join(_section(Config, "", "Trial")).strip() + "\n"


def rewrite(page: str) -> str:
    """Return ``page`` with a new table between the marks ``BEGIN`` and ``END``."""
    head, _, rest = page.partition(BEGIN)
    _, _, foot = rest.partition(END)
    return f"{head}{BEGIN}\n\n{reference()}\n{END}{foot}"


def _section(section: type[BaseModel], prefix: str, title: str) -> Iterator[str]:
    nested: list[tuple[str, type[BaseModel]]] = []
    rows: list[str] = []
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            nested.append((name, info.annotation))
            continue
        default = "" if info.default == "" else f"`{_value(info.default)}`"
        text = (info.description or "").replace("|", "\\|")
        rows.append(f"| `{prefix}{name}` | {_kind(info)} | {default} | {text} |")
    yield f"### {title}\n"
    doc = section.__doc__
    if doc and section is not Config:
        yield doc.strip().splitlines()[0].replace("``", "`") + "\n"
    if rows:
        yield "| field | values | default | meaning |\n|---|---|---|---|"
        yield from rows
        yield ""
    for name, inner in nested:
        yield from _section(inner, f"{prefix}{name}.", f"`{prefix}{name}`")


def _kind(info: FieldInfo) -> str:
    """Describe the values of a field: `int > 0`, `embedded, sglang`, `list of text`, ..."""
    return " ".join([_type_name(info.annotation), *_bounds(info)])


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if get_origin(annotation) is list:
        return f"list of {_type_name(arguments[0])}"
    if get_origin(annotation) is dict:
        return "mapping"
    return {str: "text", bool: "true, false"}.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _bounds(info: FieldInfo) -> list[str]:
    signs = {
        annotated_types.Gt: ">",
        annotated_types.Ge: "≥",
        annotated_types.Lt: "<",
        annotated_types.Le: "≤",
    }
    bounds = []
    for rule in info.metadata:
        sign = signs.get(type(rule))
        if sign is not None:
            (bound,) = (getattr(rule, slot) for slot in rule.__slots__)
            bounds.append(f"{sign} {bound}")
    return bounds


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    path = Path("docs/configuration.md")
    path.write_text(rewrite(path.read_text("utf-8")), encoding="utf-8")
