"""Python on the pages: a snippet of an example imports what it uses, and fields that user code can read are listed."""

import ast
import dataclasses
import re
import textwrap
from pathlib import Path

import msgspec
import pytest

from realsys.algorithm.losses import LossInputs, Surrogate
from realsys.data.prompts import Prompt
from realsys.generation.completion import Completion
from realsys.reward.verifiers.contract import Item, Verdict
from realsys.rollout.agents.contract import AgentParts
from realsys.rollout.environments import EnvironmentParts, Judgement, Response, Task
from realsys.types import Episode

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [path.read_text("utf-8") for path in sorted((ROOT / "docs" / "examples").rglob("*.py"))]
#: records that user code gets or returns -> the section of docs/extending.md that lists their fields
READ = {
    "A loss": (LossInputs, Surrogate),
    "A verifier": (Item, Verdict),
    "An environment": (EnvironmentParts, Response, Judgement),
    "An agent": (AgentParts, Task, Prompt, Completion, Episode),
}


def snippets():
    """Yield (page, code) of each block of Python that shows a part of an example."""
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE):
            if example_of(block):
                yield page.name, block


def example_of(block):
    """Return the text of the example with most lines of the block; "" if none has half of them."""
    lines = {line.strip() for line in block.splitlines() if len(line.strip()) > 10}
    found = {example: len(lines & {line.strip() for line in example.splitlines()}) for example in EXAMPLES}
    best = max(found, key=lambda example: found[example])
    return best if 2 * found[best] > len(lines) else ""


def imported(tree):
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {(alias.asname or alias.name).partition(".")[0] for node in statements for alias in node.names}


def not_imported(block):
    """Return the names that the example of a block imports, and the block uses without importing them."""
    tree = ast.parse(textwrap.dedent(block))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return used & imported(ast.parse(example_of(block))) - imported(tree)


SNIPPETS = list(snippets())


@pytest.mark.parametrize(("page", "block"), SNIPPETS, ids=[f"{page}-{n}" for n, (page, _) in enumerate(SNIPPETS)])
def test_snippet_imports_what_it_uses(page, block):
    assert not_imported(block) == set(), page


@pytest.mark.parametrize("heading", READ)
def test_section_lists_every_field_of_its_records(heading):
    page = (ROOT / "docs" / "extending.md").read_text("utf-8")
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    for record in READ[heading]:
        fields = msgspec.structs.fields(record) if issubclass(record, msgspec.Struct) else dataclasses.fields(record)
        rows = section.split(f"| `{record.__name__}` |")
        assert len(rows) == 2, f"no table of {record.__name__}"
        table = rows[1].split("\n\n")[0]
        assert [field.name for field in fields] == re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE), record
