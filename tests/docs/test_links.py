"""Links between the pages lead to files and headings that exist."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


SOURCES = [
    path
    for folder in ("realsys", "launch", "workers", "configs", "slurm", "tests", "benchmarks")
    for pattern in ("*.py", "*.yaml", "*.sh")
    for path in sorted((ROOT / folder).rglob(pattern))
]


@cache
def anchors(page):
    """Return the anchors of a page's headings: lower case, without punctuation, spaces as hyphens."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain)


def broken(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link or (target.is_file() and (not anchor or anchor in anchors(target))):
            continue
        yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings(page):
    assert list(broken(page)) == []


def test_pages_that_the_code_names_are_there():
    named = {
        (path.name, page, anchor)
        for path in SOURCES
        for page, anchor in re.findall(r"\bdocs/(\w+\.md)(?:#([\w-]+))?", path.read_text("utf-8"))
    }
    pages = {page.name: anchors(page) | {""} for page in PAGES}
    assert [name for name in sorted(named) if name[2] not in pages.get(name[1], ())] == []
    assert len(named) > 30
