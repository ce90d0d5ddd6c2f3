"""README.md: its code is that of docs/examples, its commands exist, its links lead to files."""

import re
from pathlib import Path

from realsys.config.compose import compose

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "README.md").read_text("utf-8")
EXAMPLES = sorted((ROOT / "docs" / "examples").rglob("*.py"))


def test_code_is_that_of_the_examples():
    shown = {line.strip() for example in EXAMPLES for line in example.read_text().splitlines()} | {"", "..."}
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    assert [line for block in blocks for line in block.splitlines() if line.strip() not in shown] == []


def test_pages_are_listed_once_in_the_order_of_the_site():
    listed = re.findall(r"\(docs/(\w+\.md)\)", PAGE.partition("## Pages")[2])
    site = (ROOT / "docs" / "site" / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    assert listed == re.findall(r"- (\w+\.md)$", site, re.MULTILINE)


def test_steps_of_the_commands_are_kept() -> None:
    """The commands are given in their order: the trial is resumed up to its last step before others read it."""
    config = compose(["experiment=arith"])
    commands = PAGE.partition("--trial mine")[2]
    total = int(re.findall(r"resume arith/mine train\.total_steps=(\d+)", commands)[0])
    steps = {name: int(step) for name, step in re.findall(r"realsys (\w+) \S+(?: \w+)? --step (\d+)", commands)}
    every, keep = config.checkpoint.every_steps, config.checkpoint.keep
    checkpoints = [step for step in range(1, total + 1) if step % every == 0 or step == total][-keep:]
    assert steps.keys() == {"samples", "replay", "export"} and steps["export"] in checkpoints
    assert total - config.record.keep_steps < steps["samples"] <= total
    assert checkpoints[0] < steps["replay"] <= total


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^    make ([a-z-]+)", PAGE, re.MULTILINE))
    assert {"run", "test", "lint"} <= targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_make_bench_runs_all_benchmarks_for_cpus():
    makefile = (ROOT / "Makefile").read_text("utf-8").replace("\\\n", " ")
    listed = re.findall(r"^BENCHES \?= (.*)$", makefile, re.MULTILINE)[0].split()
    every = {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
    special = {name for name in every if name.startswith("gpu_")} | {
        "before_after",
        "peer_trl",
        "weight_loads",
        "math_verifier",
    }  # a second checkout; TRL; SGLang; a file of cases
    assert sorted(listed) == sorted(every - special)
