"""Rows as turns of tokens, and as spans of versions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from realsys.data.arith import write_char_tokenizer
from realsys.data.tokenizer import TextTokenizer
from realsys.observe.samples.step_samples import CONTEXT, token_kinds, token_versions, turns, version_spans


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    directory: Path = tmp_path_factory.mktemp("model")
    write_char_tokenizer(directory, chat=True)
    return TextTokenizer(directory)


@pytest.mark.parametrize(
    ("versions", "spans"),
    [
        ([3, 3, 4, 4, 7], [(3, "12"), (4, "+5"), (7, "=")]),
        ([2, 2, 2, 2, 2], [(2, "12+5=")]),
        ([0, 1, 2, 3, 4], [(0, "1"), (1, "2"), (2, "+"), (3, "5"), (4, "=")]),
    ],
)
def test_text_is_cut_where_its_version_changes(
    tokenizer: TextTokenizer, versions: list[int], spans: list[tuple[int, str]]
) -> None:
    ids = tokenizer.encode_text("12+5=")
    found = list(version_spans(ids, np.array(versions, np.int32), tokenizer))
    assert [(span.version, span.text) for span in found] == spans
    assert [span.tokens for span in found] == [len(text) for _, text in spans]


def test_cut_character_goes_to_its_last_token(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode_text("1é2")  # é has two tokens
    found = list(version_spans(ids, np.array([3, 3, 4, 4], np.int32), tokenizer))
    assert [(span.version, span.text) for span in found] == [(3, "1"), (4, "é2")]


def test_spans_decode_every_token_once(tokenizer: TextTokenizer) -> None:
    """A completion of many turns has hundreds of spans: the time must not grow with their number."""
    asked: list[int] = []

    class Counted:
        def token_texts(self, ids: Sequence[int]) -> list[str]:
            asked.append(len(ids))
            return tokenizer.token_texts(ids)

    ids = tokenizer.encode_text("12" * 50)
    spans = list(version_spans(ids, np.arange(100, dtype=np.int32) % 2, Counted()))
    assert len(spans) == 100 and asked == [100]


def test_feedback_between_turns_has_no_version(tokenizer: TextTokenizer) -> None:
    mask = np.array([False, True, True, False, True])
    versions = token_versions(mask, np.array([3, 3, 4], np.int32))
    assert versions.tolist() == [CONTEXT, 3, 3, CONTEXT, 4]
    found = list(version_spans(tokenizer.encode_text("12+5="), versions, tokenizer))
    assert [(span.version, span.text) for span in found] == [(None, "1"), (3, "2+"), (None, "5"), (4, "=")]


def test_empty_text_has_no_spans(tokenizer: TextTokenizer) -> None:
    assert list(version_spans([], np.zeros(0, np.int32), tokenizer)) == []


def test_turns_carry_the_numbers_of_their_tokens(tokenizer: TextTokenizer) -> None:
    mask = np.array([False, True, True, False, True])
    made = turns(
        {
            "tokens": np.array(tokenizer.encode_text("1é+5")),
            "loss_mask": mask,
            "versions": np.array([3, 4, 4], np.int32),
            "behav_logprobs": np.array([-0.123456, -2.0, -1.0], np.float32),
            "advantages": np.full(3, 0.5, np.float32),
        },
        0,
        tokenizer,
    )
    assert [(turn.kind, turn.text) for turn in made] == [
        ("prompt", "1"),
        ("sampled", "é"),
        ("context", "+"),
        ("sampled", "5"),
    ]
    assert made[1].pieces == ["", "é"]  # two bytes, one character
    assert (made[1].versions, made[1].logprobs, made[1].advantages) == ([3, 4], [-0.1235, -2.0], [0.5])
    assert made[0].versions == [] and made[3].versions == [4]


def test_masked_tokens_begin_a_single_completion() -> None:
    mask = np.array([False, False, False, True, True])
    assert token_kinds(mask, 0) == ["prompt"] * 3 + ["sampled"] * 2
    assert token_kinds(mask, 2) == ["prompt", "masked", "masked", "sampled", "sampled"]
    several = np.array([False, True, False, True])
    assert token_kinds(several, 1) == ["prompt", "sampled", "context", "sampled"]


def test_piece_texts_join_to_the_whole(tokenizer: TextTokenizer) -> None:
    for text in ("", "a b\n\tc", "naïve 日本 🙂", "\x00\x1b[2J"):
        ids = tokenizer.encode_text(text)
        assert "".join(tokenizer.token_texts(ids)) == text
    cut = tokenizer.encode_text("日")[:2]
    assert "".join(tokenizer.token_texts(cut)) == tokenizer.decode(cut)
