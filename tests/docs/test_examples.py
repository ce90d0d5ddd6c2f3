"""Code on docs/extending.md and docs/tutorial.md is the code of docs/examples, and every example has its section."""

import re
from pathlib import Path

import pytest

from realsys.config import doors

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "extending.md").read_text()
TUTORIAL = (DOCS / "tutorial.md").read_text()
EXAMPLES = sorted((DOCS / "examples").glob("*.py"))
OF_TUTORIAL = sorted(path for path in (DOCS / "examples" / "tutorial").rglob("*.*") if path.suffix in (".py", ".yaml"))


@pytest.mark.parametrize(("page", "files", "least"), [(PAGE, EXAMPLES, 6), (TUTORIAL, OF_TUTORIAL, 3)])
def test_code_of_the_page_stands_in_an_example(page, files, least):
    shown = {line.strip() for example in files for line in example.read_text().splitlines()} | {"", "..."}
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= least
    assert [line for block in blocks for line in block.splitlines() if line.strip() not in shown] == []


@pytest.mark.parametrize("path", OF_TUTORIAL, ids=lambda path: path.stem)
def test_file_of_the_tutorial_is_linked(path):
    assert f"({path.relative_to(DOCS)})" in TUTORIAL


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_linked(example):
    assert 15 <= len(example.read_text().splitlines()) <= 40
    assert f"(examples/{example.name})" in PAGE


def test_page_names_every_built_in_part():
    found = {name: door for name, door in vars(doors).items() if isinstance(door, doors.Door)}
    assert len(found) == 16
    for door in found.values():
        assert all(f"`{name}`" in PAGE for name in door.builtin), door.field
