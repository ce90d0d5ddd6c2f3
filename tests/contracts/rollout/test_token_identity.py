"""Token identity over the chat templates of published models: rows are what the engine was sent and returned.

REALSYS_CONVERSATIONS of the 100,000 generated conversations are played, all by ``make data-test``; fewer are others
each day. Each template is played with and without tools, thinking and system messages, with retries, lost replies,
rewritten histories, cut-off completions and wrong stop tokens.
"""

import os
from collections import Counter
from random import Random

import pytest

from tests.support.conversations.play import Player, follow_template, mismatches
from tests.support.conversations.template_models import TEMPLATES, model_with, published_templates

PUBLISHED = published_templates()
ALL = 100_000
COUNT = int(os.environ.get("REALSYS_CONVERSATIONS", "2880"))
PART = int(os.environ.get("REALSYS_DAY", "0")) % (ALL // COUNT) if "REALSYS_CONVERSATIONS" in os.environ else 0
#: They print the thinking, or an empty one, of the last turn only, so no row equals a whole rendering.
REWRITING = ("deepseek", "nemotron")
#: They print the content of a reply with calls after the results of the tools; in a row it stays where it was sampled.
CONTENT_AFTER_CALLS = ("gemma4", "diffusion_gemma")


def templates(param):
    return pytest.mark.parametrize("name", sorted(param) or ["any"])


@pytest.fixture
def tokenizer(tmp_path, name):
    return model_with(tmp_path, (TEMPLATES | PUBLISHED)[name])


def play(tokenizer, name, numbers):
    """Play the conversations with these numbers; return the number of rows, drift, and what went wrong."""
    drift, problems, rows = Counter(), [], []
    for number in numbers:
        player = Player(tokenizer, Random(f"{name} {number}"))
        played = player.play()
        found = mismatches(played) + played.odd_tails
        if played.odd_calls and not name.startswith(CONTENT_AFTER_CALLS):
            found.append("the tail after content and calls is not the template's")
        problems += [f"conversation {number}: {problem}" for problem in found]
        drift += played.conversation.drift
        if played.linear and played.conversation.drift:
            rows.append(len(played.conversation.rows()))
    return rows, drift, problems


@templates(TEMPLATES)
def test_habits_of_templates_keep_rows_exact(tokenizer, name):
    rows, drift, problems = play(tokenizer, name, range(100))
    assert problems == []
    assert set(rows) == {1}
    assert min(drift[kind] for kind in ("first", "clean", "boundary_inserted", "branch")) > 0


@pytest.mark.needs(package="trl")
@templates(PUBLISHED)
def test_published_templates_keep_rows_exact(tokenizer, name):
    count = -(-COUNT // len(PUBLISHED))
    rows, drift, problems = play(tokenizer, name, range(PART * count, (PART + 1) * count))
    assert problems == []
    assert set(rows) == {1}
    assert drift["clean"] and drift["boundary_inserted"]


@pytest.mark.needs(package="trl")
@templates(PUBLISHED)
def test_rows_equal_whole_renderings(tokenizer, name):
    """If the engine samples what the template prints, the row is the whole conversation as the template prints it."""
    outcomes = {follow_template(tokenizer, kind) for kind in ("text", "call", "calls")}
    assert "different" not in outcomes
    assert ("equal" in outcomes) is not name.startswith(REWRITING)


@pytest.mark.needs(package="trl")
def test_all_published_templates_are_played():
    assert len(PUBLISHED) == 72
