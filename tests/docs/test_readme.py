"""README.md: its code is that of docs/examples, its commands exist, its links lead to files."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "README.md").read_text("utf-8")
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))


def test_code_is_that_of_the_examples() -> None:
    shown = {line.strip() for example in EXAMPLES for line in example.read_text().splitlines()} | {"", "..."}
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    assert [line for block in blocks for line in block.splitlines() if line.strip() not in shown] == []


def test_every_page_is_linked() -> None:
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert sorted(pages - set(re.findall(r"\]\(([^)#]+)\)", PAGE))) == []


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^    make ([a-z-]+)", PAGE, re.MULTILINE))
    assert {"run", "test", "lint"} <= targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_make_bench_runs_all_benchmarks_for_cpus() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8").replace("\\\n", " ")
    listed = re.findall(r"^BENCHES \?= (.*)$", makefile, re.MULTILINE)[0].split()
    every = {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
    special = {name for name in every if name.startswith("gpu_")} | {
        "before_after",
        "math_verifier",
    }  # a second checkout; a file of cases
    assert sorted(listed) == sorted(every - special)
