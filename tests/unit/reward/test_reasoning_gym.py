"""The verifier of generated tasks: the data set's own function judges, from the JSON of the task."""

import json

import pytest

from realsys.data.sources import source_rows
from realsys.reward.verifiers.contract import Item, verdict_of
from realsys.reward.verifiers.reasoning_gym import final_answer, reasoning_gym


def items(name, completion, **arguments):
    """Rows as they come back from the trial's own file."""
    for row in source_rows(f"reasoning_gym:{name}", "train", {"size": 3, **arguments}):
        values = json.loads(json.dumps(row.values))
        extra = {"reasoning_gym": values["reasoning_gym"]}
        yield Item(values["prompt"], completion.format(values["answer"]), values["answer"], extra)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer>7</answer>", "7"),
        ("<answer>6</answer> no <answer> 7 </answer> so", "7"),
        ("<answer>7", "7"),
        ("I add.\n\n 7 \n", "7"),
        ("7", "7"),
        ("", ""),
    ],
)
def test_last_answer_counts(completion, answer):
    assert final_answer(completion) == answer


@pytest.mark.needs(package="reasoning_gym")
@pytest.mark.parametrize("name", ["chain_sum", "rearc", "countdown", "knights_knaves", "word_sorting"])
def test_reference_is_right_and_others_are_not(name):
    for item in items(name, "Let me think.\n<answer>{}</answer>"):
        verdict = verdict_of(reasoning_gym(item))
        assert verdict.correct and verdict.reward == 1.0
    for item in items(name, "<answer>no idea</answer>"):
        verdict = verdict_of(reasoning_gym(item))
        assert not verdict.correct and 0.0 <= verdict.reward < 1.0


def test_row_of_another_source_has_no_verdict():
    with pytest.raises(ValueError, match="no key 'reasoning_gym'"):
        reasoning_gym(Item("a", "b", "c", {}))
