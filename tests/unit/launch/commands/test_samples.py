"""What `realsys samples` makes of a record: spans of versions, and text that cannot steer a terminal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from realsys.data.char_model import write_char_tokenizer
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import RecordError
from realsys.launch.commands.samples import (
    CONTEXT,
    Sample,
    Span,
    group_lines,
    printable,
    token_versions,
    version_spans,
    wanted,
)
from tests.unit.train.records.test_record_files import record


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    directory: Path = tmp_path_factory.mktemp("model")
    write_char_tokenizer(directory)
    return TextTokenizer(directory)


@pytest.mark.parametrize(
    ("versions", "spans"),
    [
        ([3, 3, 4, 4, 7], [(3, "12"), (4, "+5"), (7, "=")]),
        ([2, 2, 2, 2, 2], [(2, "12+5=")]),
        ([0, 1, 2, 3, 4], [(0, "1"), (1, "2"), (2, "+"), (3, "5"), (4, "=")]),
    ],
)
def test_an_answer_is_cut_where_its_version_changes(
    tokenizer: TextTokenizer, versions: list[int], spans: list[tuple[int, str]]
) -> None:
    ids = tokenizer.encode_text("12+5=")
    found = list(version_spans(ids, np.array(versions, np.int32), tokenizer))
    assert [(span.version, span.text) for span in found] == spans
    assert [span.tokens for span in found] == [len(text) for _, text in spans]


def test_feedback_between_turns_is_a_span_without_version(tokenizer: TextTokenizer) -> None:
    mask = np.array([False, True, True, False, True])
    versions = token_versions(mask, np.array([3, 3, 4], np.int32))
    assert versions.tolist() == [CONTEXT, 3, 3, CONTEXT, 4]
    found = list(version_spans(tokenizer.encode_text("12+5="), versions, tokenizer))
    assert [(span.version, span.text) for span in found] == [(None, "1"), (3, "2+"), (None, "5"), (4, "=")]


def test_an_empty_answer_has_no_spans(tokenizer: TextTokenizer) -> None:
    assert list(version_spans([], np.zeros(0, np.int32), tokenizer)) == []


def make_sample(**fields: object) -> Sample:
    values: dict[str, object] = {
        "step": 3, "sample_id": "0007/1", "ticket_id": "0007", "attempt": 1, "episode": 0, "row": 0,
        "prompt_index": 12, "seed": 99,
        "granted_version": 2, "worker": "rollout_worker/0", "seconds": 1.5, "prompt": "1+1=", "answer": "2.",
        "spans": [Span(2, 1, "2"), Span(3, 1, ".")],
        "route": [("generation_server/0", 1), ("generation_server/1", 1)], "finish_reason": "stop", "reward": 5.0,
        "rewards": [], "score": None, "correct": True, "metrics": {}, "truncated": False,
        "staleness": 1, "advantage": 0.5,
        "logprob_difference": None,
    }  # fmt: skip
    return Sample(**{**values, **fields})  # type: ignore[arg-type]


def shown(*group: Sample) -> str:
    console = Console(width=200, record=True, force_terminal=False, color_system=None)
    with console.capture() as capture:
        for line in group_lines(group):
            console.print(line, highlight=False, soft_wrap=True)
    return capture.get()


def test_versions_and_servers_can_be_read_without_colour() -> None:
    text = shown(make_sample())
    assert "ticket 0007 attempt 1: prompt 12, seed 99, granted at v2, rollout_worker/0, 1.50 s" in text
    assert "[v2]2[v3]." in text
    assert (
        "reward 5, correct, stop, staleness 1, advantage +0.5000, generation_server/0 (1) -> generation_server/1 (1)"
        in text
    )


def test_what_nobody_computed_is_said_to_be_unknown() -> None:
    text = shown(make_sample(advantage=None, route=[], spans=[], score=-0.25))
    assert "score -0.250" in text and "advantage unknown" in text and "no server known" in text
    assert "prox" not in text


def test_a_row_with_another_history_shows_it() -> None:
    text = shown(make_sample(), make_sample(row=1, prompt="a summary"))
    assert text.count("from") == 1 and "from  a summary" in text


def test_context_metrics_and_rewards_of_turns_are_shown() -> None:
    spans = [Span(2, 1, "2"), Span(None, 1, "?"), Span(3, 1, "3")]
    text = shown(make_sample(spans=spans, metrics={"turns": 2.0}, rewards=[(4, 0.5)], correct=None))
    assert "[v2]2[context]?[v3]3" in text
    assert "reward 5, not judged, stop, turns 2, reward 0.5 at 4, staleness 1" in text


def test_an_answer_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\x07\n[bold]c") == "a\\x1b[2Jb\\r\\x07\n        [bold]c"
    text = shown(make_sample(spans=[Span(2, 1, "\x1b]0;title\x07[red]x[/red]")]))
    assert "\x1b" not in text and "[v2]\\x1b]0;title\\x07[red]x[/red]" in text


def test_ticket_outside_the_step_is_refused() -> None:
    """The message names some tickets that the step trained."""
    assert wanted(record(), "00000007") == record().groups
    with pytest.raises(RecordError, match="step 3 has not trained ticket '8': it has 00000007"):
        wanted(record(), "8")
