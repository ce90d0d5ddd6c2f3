"""Recorded completions of a trial, one step in memory at a time, with what a verifier needs to judge them again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from realsys.config.doors import AGENT
from realsys.config.schema import Config
from realsys.data.prompts import Prompt
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import DataError, RecordError
from realsys.rollout.task import Response, Task
from realsys.train.data_manager import Array
from realsys.train.records import record_files as files
from realsys.train.records.record_files import Arrays
from realsys.types import GroupOrigin, SampleMeta


class Prompts(Protocol):
    """The part of PromptDataset that this module needs."""

    def prompt(self, split: str, index: int) -> Prompt: ...


@dataclass(frozen=True, slots=True)
class Recorded:
    """Last completion of a trained episode, with the reward and correctness that the episode was given."""

    step: int
    sample_id: str
    task: Task
    response: Response
    reward: float
    correct: bool | None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A sample, or all samples of a step, that cannot be judged again."""

    what: str
    reason: str


class RecordReader:
    """Reader of the recorded steps of one trial. It changes nothing."""

    def __init__(self, config: Config, tokenizer: TextTokenizer, prompts: Prompts) -> None:
        self._single_turn = config.rollout.agent == "single_turn"
        self._known_agent = config.rollout.agent in AGENT.builtin
        self._tokenizer = tokenizer
        self._prompts = prompts

    def read(self, step: int, directory: Path) -> Iterator[Recorded | LeftOut]:
        """Yield the samples of a step. Raises RecordError for a damaged record."""
        try:
            record = files.read_record(directory)
            arrays, origins = files.read_arrays(directory, record)
        except RecordError:
            if directory.exists():
                raise
            yield LeftOut(f"step {step}", "the running trial has removed the record (record.keep_steps)")
            return
        by_ticket = {origin.ticket.ticket_id: origin for origin in origins}
        for group in record.groups:
            origin = by_ticket[group[0].ticket_id]
            try:
                prompt = self._prompts.prompt(origin.ticket.split, origin.ticket.prompt_index)
            except DataError as error:
                yield from (LeftOut(meta.sample_id, f"its row cannot be read: {error}") for meta in _last_rows(group))
                continue
            for meta in _last_rows(group):
                yield self._sample(step, meta, origin, arrays, prompt)

    def _sample(
        self, step: int, meta: SampleMeta, origin: GroupOrigin, arrays: Arrays, prompt: Prompt
    ) -> Recorded | LeftOut:
        tokens = arrays[meta.sample_id, "tokens"]
        if self._known_agent and meta.row == 0 and tokens[: len(prompt.ids)].tolist() != prompt.ids:
            return LeftOut(meta.sample_id, "its row has another prompt now: the data was changed")
        begin, end, turn = self._completion(tokens, arrays[meta.sample_id, "loss_mask"], len(prompt.ids))
        if begin == end:
            return LeftOut(meta.sample_id, "it has no completion")
        text = self._tokenizer.completion_text(tokens[begin:end].tolist())
        finish_reason = origin.episodes[meta.episode][meta.row].finish_reason
        response = Response(text, finish_reason, end - begin, turn)
        task = Task(prompt, origin.ticket, meta.episode)
        return Recorded(step, meta.sample_id, task, response, meta.reward, meta.correct)

    def _completion(self, tokens: Array, mask: Array, prompt_len: int) -> tuple[int, int, int]:
        """Return where the last completion of a row begins and ends, and its number.

        With several turns it is the last run of loss tokens. With one turn it is all after the prompt, so tokens that
        were masked as too old belong to it, too.
        """
        if self._single_turn:
            return prompt_len, len(tokens), 0
        edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
        if not len(edges):
            return 0, 0, 0
        return int(edges[-2]), int(edges[-1]), len(edges) // 2 - 1


def _last_rows(group: list[SampleMeta]) -> list[SampleMeta]:
    """Return the last row of each episode: the reward belongs to its completion."""
    last: dict[int, SampleMeta] = {}
    for meta in group:
        if meta.episode not in last or meta.row > last[meta.episode].row:
            last[meta.episode] = meta
    return list(last.values())
