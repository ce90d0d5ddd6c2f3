"""Where the final answer of a completion is, and whether it has the wanted format."""

import pytest

from realsys.reward.final_answers import after_thinking, boxes, final_answer, has_format


@pytest.mark.parametrize(
    ("completion", "rest"),
    [
        ("a", "a"),
        ("<think>a</think>b", "b"),
        ("a</think>b</think>c", "c"),
        ("<think>a", None),
        ("<think>a</think>", ""),
    ],
)
def test_thinking_part_is_cut_off(completion, rest):
    assert after_thinking(completion) == rest


def test_boxes_end_at_their_own_brace():
    found = boxes(r"\boxed{\frac{1}{2}} and \fbox {\{1\}} and \boxed{\boxed{3}} and \boxed{4")
    assert [box.content for box in found] == [r"\frac{1}{2}", r"\{1\}", r"\boxed{3}"]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed{1}, then \boxed{2} cm.", r"2\text{ cm}"),
        (r"\boxed{2} percent of it", r"2\%"),
        ("So x is 1, 2.", "1, 2"),
        ("Two birds sit on 3 trees in the garden.", None),
        (r"\boxed{" + "1" * 3000 + "}", None),
    ],
)
def test_answer_is_found(completion, answer):
    final = final_answer(completion)
    assert final is not None and final.answer == answer


@pytest.mark.parametrize(
    ("completion", "formatted"),
    [
        (r"<think>2+2</think>\boxed{4}", True),
        (r"2+2</think>\boxed{4}", True),  # the prompt has opened the thinking part
        (r"\boxed{4}", False),
        ("<think>2+2</think>4", False),
        (r"<think></think>\boxed{4}", False),
        (r"<think>2+2\boxed{4}", False),
        (r"<think>a</think><think>b</think>\boxed{4}", False),
    ],
)
def test_format_is_thinking_then_box(completion, formatted):
    assert has_format(completion) is formatted
