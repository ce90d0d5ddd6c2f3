"""Completions of evaluations, as a RolloutWorker stores them."""

import asyncio

import numpy as np

from realsys.data.prompts import Prompt
from realsys.observe.evaluation_records import collect
from realsys.rollout.stores import EvaluationStore
from realsys.types import Episode, Row, Ticket


class Letters:
    """A tokenizer with a letter per token."""

    def decode(self, ids):
        return "".join(chr(97 + token) for token in ids)


def row(tokens, mask, version=4):
    count = sum(mask)
    versions = np.full(count, version, np.int32)
    return Row(np.array(tokens, np.int32), np.array(mask), np.zeros(count, np.float32), versions, "length")


def test_stored_completion_begins_after_the_prompt(tmp_path):
    ticket = Ticket("eval-e-000005", 2, 1, "eval", "eval", seed=9, version=4, eval_id="e", set="aime", sample=1)
    turns = row([0, 1, 2, 3, 4, 5], [False, False, True, False, True, True])
    episode = Episode([turns], 5.0, True, {"turns": 2.0}, "f")
    store = EvaluationStore(tmp_path, Letters(), "7")
    asyncio.run(store.store(ticket, Prompt("ab", "f", [0, 1]), episode, "rollout_worker/0"))
    [sample] = collect(tmp_path / "e", [(1, 1, 2)])
    assert (sample.prompt, sample.completion, sample.reference, sample.answer) == ("ab", "cdef", "f", "f")
    assert (sample.set, sample.version_min, sample.version_max, sample.tokens) == ("aime", 4, 4, 3)
    assert (sample.finish_reason, sample.correct, sample.metrics, sample.seed) == ("length", True, {"turns": 2.0}, 9)
    assert [path.name for path in (tmp_path / "e" / "parts").iterdir()] == ["rollout_worker-0-7.jsonl"]


def test_empty_completion_is_of_its_tickets_version(tmp_path):
    ticket = Ticket("eval-e-000000", 0, 0, "eval", "eval", version=4, eval_id="e")
    store = EvaluationStore(tmp_path, Letters(), "7")
    sample = store.sample_of(ticket, Prompt("ab", "f", [0, 1]), Episode([row([0, 1], [False, False])], 0.0, False), "w")
    assert (sample.completion, sample.version_min, sample.tokens) == ("", 4, 0)
