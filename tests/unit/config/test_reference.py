"""The table of fields in docs/configuration.md is that of the schema, and says what each field means."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from realsys.config.compose import fields
from realsys.config.reference import reference, rewrite
from realsys.config.schema import Config

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "configuration.md").read_text("utf-8")
ROWS = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", reference(), re.MULTILINE))
UNITS = {"_s": "seconds", "_mb": "MiB", "_tokens": "tokens", "seconds": "seconds"}


def described(path: str) -> str:
    """Return the description of a field."""
    info: FieldInfo | None = None
    section: Any = Config
    for part in path.split("."):
        info = section.model_fields[part]
        section = info.annotation
    assert info is not None
    return info.description or ""


def test_page_has_the_fields_of_the_schema() -> None:
    assert rewrite(PAGE) == PAGE, "run `make docs`"
    assert set(ROWS) == set(fields())


def test_every_field_has_a_description() -> None:
    assert [path for path in fields() if not described(path).strip()] == []


def test_descriptions_name_their_unit() -> None:
    """A field whose name ends with a unit has the unit in its description."""
    missing = [
        path
        for path in fields()
        for ending, unit in UNITS.items()
        if path.endswith(ending) and unit not in described(path)
    ]
    assert missing == []


def test_every_section_has_a_description() -> None:
    def sections(section: type[BaseModel]) -> list[type[BaseModel]]:
        inner = [info.annotation for info in section.model_fields.values()]
        inner = [kind for kind in inner if isinstance(kind, type) and get_origin(kind) is None]
        return [section, *(found for kind in inner if issubclass(kind, BaseModel) for found in sections(kind))]

    assert [section.__name__ for section in sections(Config) if not (section.__doc__ or "").strip()] == []


def test_lists_and_mappings_are_told_apart() -> None:
    assert ROWS["generation.sampling.stop"].startswith("list of text |")
    assert ROWS["generation.sampling.stop_token_ids"].startswith("list of int |")
    assert ROWS["train.lora.targets"].startswith("list of `qkv`, `proj`, `gate_up`, `down` |")
    assert ROWS["generation.sglang.args"].startswith("mapping |")
