"""The step log's record of an evaluation, and its line on the terminal."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.config.evaluation_sets import evaluation_sets
from realsys.observe.evaluation_records import (
    EvalSample,
    EvaluationOutcome,
    Tally,
    Vote,
    headline,
    majority,
    majority_of,
    record,
    without_incomplete,
)
from tests.support.processes.config_trees import changed

GOOD = EvaluationOutcome([Tally(4, 4)] * 80 + [Tally(4, 0)] * 16, "", 0, 384, 3.2, 21.0, 7, 7, {"turns": 1.0})


def made():
    return evaluation_sets(changed("evaluation.samples=4", "evaluation.k=[4]"))["eval"]


def test_complete_evaluation_has_numbers_and_interval():
    found = record("step-7", 7, made(), GOOD, 3.0)
    assert (found["complete"], found["accuracy"], found["version"]) == (True, pytest.approx(5 / 6), 7)
    assert found["interval"][0] < 5 / 6 < found["interval"][1] and [*found["pass_at"]] == ["1", "4"]
    assert headline(found) == "accuracy 83.3% ± 7.4 (96 problems x 4), pass@4 83.3%"


def test_incomplete_evaluation_has_no_number():
    found = record("step-7", 7, made(), msgspec.structs.replace(GOOD, incomplete="3 of 384 failed", failed=3), 3.0)
    assert not found["complete"] and found["failed"] == 3
    assert [found[key] for key in ("accuracy", "interval", "stderr", "reward_mean")] == [None] * 4
    assert found["pass_at"] == found["metrics"] == {}
    assert headline(found) == "incomplete: 3 of 384 failed"


def test_tolerated_failures_are_shown_beside_the_number():
    found = record("after", 7, made(), msgspec.structs.replace(GOOD, failed=3), 3.0)
    assert "(96 problems x 4, 3 of 384 failed)" in headline(found)


def test_numbers_lost_by_failures_are_named():
    """One problem has no verdict, another has three of four."""
    tallies = [Tally(4, 4)] * 80 + [Tally(4, 0)] * 14 + [Tally(3, 0), Tally(0, 0)]
    found = record("after", 7, made(), msgspec.structs.replace(GOOD, tallies=tallies, failed=5), 3.0)
    assert (found["problems"], found["unjudged"], found["left_out_k"]) == (96, 1, [4])
    lost = ["1 of 96 problems left out: all their completions failed", "no pass@4: a problem has fewer verdicts"]
    assert headline(found).endswith(", ".join(lost))


def test_failures_in_older_records_hide_their_numbers():
    older = {"kind": "eval", "eval_id": "after", "problems": 93, "failed": 3, "accuracy": 0.5, "reward_mean": 1.0}
    assert headline(older) == "incomplete: 3 of 96 failed"
    assert without_incomplete(older)["accuracy"] is None
    assert headline(older | {"failed": 0}) == "accuracy 50.0% (93 problems)"


def test_task_without_right_or_wrong_shows_its_reward():
    found = record("after", 7, made(), msgspec.structs.replace(GOOD, tallies=[Tally(0, 0)] * 96), 3.0)
    assert found["accuracy"] is None and found["complete"]
    assert headline(found) == "reward 3.200 (96 problems x 4)"


def samples(*answers):
    """Return samples of one problem, whose right answer is R."""
    return [
        EvalSample("e", "eval", 0, k, 0, 1, 1, "p", f"#{answer}", "R", 0.0, answer == "R", "stop", 1, answer)
        for k, answer in enumerate(answers)
    ]


def test_majority_vote_is_absent_without_final_answers():
    assert majority_of(samples(None, None)) is None, "the verifier knows no final answer"
    assert majority_of(samples("R")) is None, "one completion has no majority"
    unjudged = [msgspec.structs.replace(sample, correct=None) for sample in samples("R", "R")]
    assert majority_of(unjudged) is None
    vote = majority_of(samples("R", "R", "x"))
    assert vote is not None and vote["value"] == 1.0 and vote["low"] < 1.0


# ---- Majority vote over final answers


def votes(text):
    """Return the votes of a text: ``R`` is the right answer, ``-`` none, any other letter a wrong one."""
    return [Vote(None if letter == "-" else letter, letter == "R") for letter in text]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RRa", 1.0),
        ("Raa", 0.0),
        ("Rab", 1 / 3),
        ("RRaa", 0.5),
        ("RRaab", 0.5),
        ("---", 0.0),
        ("R--", 1.0),
        ("ab", 0.0),
    ],
)
def test_most_frequent_answer_wins(text, expected):
    assert majority(votes(text)) == pytest.approx(expected)


def test_equal_answers_of_different_text_vote_together():
    asked = []

    def same(first, second):
        asked.append((first, second))
        return first.casefold() == second.casefold()

    assert majority(votes("RRaAa"), same) == 0.0 and asked == [("A", "a")]


def test_clear_majority_needs_no_comparison():
    def same(first, second):
        raise AssertionError("compared")

    assert majority(votes("RRRab"), same) == 1.0 and majority(votes("abc"), same) == 0.0


@given(st.text("Rab-", min_size=1, max_size=9), st.randoms())
def test_order_of_votes_does_not_matter(text, random):
    shuffled = "".join(random.sample(text, len(text)))
    assert majority(votes(text)) == majority(votes(shuffled))
