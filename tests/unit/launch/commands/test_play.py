"""Lines of `realsys play`, and its refusals."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from rich.text import Text

from realsys.generation.client import SamplingSpec
from realsys.generation.completion import Completion
from realsys.launch.cli import main
from realsys.launch.commands.play import Shown, episode_lines
from realsys.rollout.resumable_engine import Deliver, EngineCall
from realsys.types import Episode, Row, Ticket


class _Letters:
    """Tokenizer whose tokens are letters."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class _Answers:
    """Engine with completions that are given."""

    def __init__(self, *texts: str) -> None:
        self._texts = iter(texts)

    async def generate(self, call: EngineCall, deliver: Deliver = lambda number, completion: None) -> list[Completion]:
        tokens = np.array([ord(letter) for letter in next(self._texts)], np.int32)
        return [Completion(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop")]

    def discard(self, ticket: Ticket) -> None: ...


def _shown(*calls: tuple[str, str]) -> list[str]:
    """Return the lines of calls of one episode: (history, completion)."""
    lines: list[Text | str] = []
    engine = Shown(_Answers(*(made for _, made in calls)), _Letters(), lines.append)  # type: ignore[arg-type]
    for number, (history, _) in enumerate(calls):
        call = EngineCall(Ticket("0", 0, 0), f"0.{number}", [ord(c) for c in history], SamplingSpec(), seed=0)
        asyncio.run(engine.generate(call))
    return [str(line) for line in lines]


def test_conversation_shows_only_what_a_call_adds() -> None:
    assert _shown(("ask", "yes"), ("askyesmore", "no")) == [
        "  prompt     ask",
        "  sampled    yes",
        "  context    more",
        "  sampled    no",
    ]


def test_rewritten_history_is_a_branch() -> None:
    assert _shown(("ask", "yes"), ("other", "no"))[2] == "  branch     other"


def test_completion_cannot_control_the_terminal() -> None:
    assert _shown(("ask", "\x1b[2J"))[1] == "  sampled    \\x1b[2J"


def test_episode_tells_trained_tokens_and_parts_of_the_reward() -> None:
    mask = np.array([0, 0, 1, 1, 0, 1], np.bool_)
    behaviour = np.zeros(3, np.float32), np.zeros(3, np.int32)
    row = Row(np.arange(6, dtype=np.int32), mask, *behaviour, "length", rewards=((5, 0.25),))
    assert list(episode_lines(Episode([row], -1.0, False, {"format": 0.5, "gateway/retries": 0.0}, "7"))) == [
        "  row 0      6 tokens, 3 trained: prompt 0-1, trained 2-3, context 4, trained 5; length",
        "  reward     -1, wrong, answer 7, format 0.5, 0.25 at token 5",
    ]


@pytest.mark.parametrize(
    ("words", "field"), [(["experiment=arith"], "model.path"), (["missing", "--tasks", "0"], "--tasks")]
)
def test_bad_input_is_refused(words: list[str], field: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", *words]) == 2
    assert field in capsys.readouterr().err
