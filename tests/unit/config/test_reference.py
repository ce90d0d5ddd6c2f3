"""The table of fields in docs/configuration.md is that of the schema, and says what each field means."""

import re
from pathlib import Path
from typing import Any, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from realsys.config.compose import fields
from realsys.config.reference import PAGES, reference, rewrite
from realsys.config.schema import Config
from realsys.config.schema_data import EvalSetConfig, MixtureSource
from realsys.config.schema_train import RoleConfig

ROOT = Path(__file__).resolve().parents[3]
ROWS = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", reference(), re.MULTILINE))
UNITS = {"_s": "seconds", "_mb": "MiB", "_tokens": "tokens", "seconds": "seconds"}


def described(path):
    """Return the description of a field."""
    info: FieldInfo | None = None
    section: Any = Config
    for part in path.split("."):
        info = section.model_fields[part]
        section = info.annotation
    return info.description or ""


def is_of_an_entry(path):
    return "[]" in path or "NAME" in path.split(".")


@pytest.mark.parametrize("name", PAGES)
def test_page_has_the_fields_of_the_schema(name):
    page = (ROOT / name).read_text("utf-8")
    assert rewrite(page) == page and "| field | values |" in page, "run `make docs`"


def test_reference_has_each_field_once():
    assert {path for path in ROWS if not is_of_an_entry(path)} == set(fields())


@pytest.mark.parametrize(
    ("entry", "section"),
    [("evaluation.sets.NAME.", EvalSetConfig), ("data.mixture[].", MixtureSource), ("roles.NAME.", RoleConfig)],
)
def test_entries_have_rows_with_their_meaning(entry, section):
    """A mapping or list of sections has a row for each field of its entries."""
    rows = {path.removeprefix(entry): row for path, row in ROWS.items() if path.startswith(entry)}
    assert set(rows) == set(fields(section))
    assert [path for path, row in rows.items() if row.endswith("| ")] == []


def test_every_field_has_a_description():
    assert [path for path in fields() if not described(path).strip()] == []


def test_descriptions_name_their_unit():
    """A field whose name ends with a unit has the unit in its description."""
    missing = [
        path
        for path in fields()
        for ending, unit in UNITS.items()
        if path.endswith(ending) and unit not in described(path)
    ]
    assert missing == []


def test_every_section_has_a_description():
    def sections(section):
        inner = [info.annotation for info in section.model_fields.values()]
        inner = [kind for kind in inner if isinstance(kind, type) and get_origin(kind) is None]
        return [section, *(found for kind in inner if issubclass(kind, BaseModel) for found in sections(kind))]

    assert [section.__name__ for section in sections(Config) if not (section.__doc__ or "").strip()] == []
