"""Rows of ``data.demos`` to learn from: demonstrations, and pairs of a chosen and a rejected response.

    line ──layout──> prompt, responses ──tokenizer──> LearningRow of each response

Launcher, master and ranks open the file alike. A line has one row, or two if it is a pair. Tokens with loss are those
that the model should write: a response with the end of text, or every turn of the assistant in a chat.

The lines that a supervised run holds out are chosen by a hash of the prompt, as the prompts of ``data.train`` are.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from realsys.config.dataflow import dataflow_of, is_supervised
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.schema_data import HELD_OUT, TRAIN
from realsys.config.trial_sizes import longest_sequence
from realsys.data.lines import Demonstration, LineReader, Lines, LinesBuilder, Message, Preference
from realsys.data.prompts import dataset_files, side_of
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import ConfigError, DataError

_KINDS: dict[str, type[Demonstration | Preference]] = {"demonstrations": Demonstration, "preferences": Preference}
_ROWS_AT_A_TIME = 256


@dataclass(frozen=True, slots=True)
class LearningRow:
    """Tokens of one response with its prompt; ``loss_mask`` is True for those to learn, and False for the first."""

    tokens: list[int]
    loss_mask: list[bool]


class LearningCheck(NamedTuple):
    """Result of reading all lines.

    digest   of the lines to train on, in their order; equal on any machine
    lengths  tokens of each line, both rows of a pair together
    """

    digest: str
    lengths: array[int]


class LearningData:
    """Splits "train" and "eval" of one file. Opening checks every line; ``rows`` tokenises one of them."""

    def __init__(
        self,
        path: Path,
        tokenizer: TextTokenizer,
        *,
        rows: Literal["demonstrations", "preferences"],
        chat_template: bool = True,
        held_out: float = 0.0,
    ) -> None:
        """``held_out``: share of the prompts that the split "eval" gets. Raises DataError."""
        self._tokenizer = tokenizer
        self._chat = chat_template
        reader: LineReader[Demonstration | Preference] = LineReader(_KINDS[rows])
        builders = {TRAIN: LinesBuilder(path, reader), HELD_OUT: LinesBuilder(path, reader)}
        for offset, number, record in reader.scan(path):
            side = side_of(record.parts()[0], held_out) if held_out else TRAIN
            builders[side].add(offset, number)
        self._splits = {split: builder.build() for split, builder in builders.items()}
        if not self.size(TRAIN):
            rest = f"all {self.size(HELD_OUT)} are held out: lower data.eval_fraction" if self.size(HELD_OUT) else ""
            raise DataError(f"{path}: no {rows} found: {rest or 'add lines'}")

    def size(self, split: str) -> int:
        """Return the number of lines of a split."""
        return len(self._splits[split])

    def rows(self, split: str, index: int) -> list[LearningRow]:
        """Return the row of a demonstration, or the chosen and the rejected row of a pair. DataError names the line."""
        lines = self._splits[split]
        return self._encode_line(lines, index, lines[index])

    def check(self, *, longest: int, prompt: int = 0, response: int = 0) -> LearningCheck:
        """Tokenise everything once. Raises DataError for the first line that cannot be learned.

        ``longest``: tokens of a line, both rows of a pair together. ``prompt`` and ``response``: of a single response;
        0: no limit.
        """
        lengths = array("q")
        digest = hashlib.blake2b(digest_size=16)
        for split, lines in self._splits.items():
            for indices, records in lines.chunks(_ROWS_AT_A_TIME):
                try:
                    encoded = self._encode(records)
                except DataError:
                    # The batch does not tell which one failed; one by one, the error names the line.
                    encoded = [self._encode_line(lines, i, each) for i, each in zip(indices, records, strict=True)]
                for index, rows in zip(indices, encoded, strict=True):
                    if problem := next(_problems(rows, longest, prompt, response), None):
                        raise DataError(f"{lines.where(index)}: {problem}")
                    lengths.append(sum(len(row.tokens) for row in rows))
                if split == TRAIN:
                    digest.update(msgspec.json.encode(records))
        return LearningCheck(digest.hexdigest(), lengths)

    def _encode_line(
        self, lines: Lines[Demonstration | Preference], index: int, record: Demonstration | Preference
    ) -> list[LearningRow]:
        try:
            return self._encode([record])[0]
        except DataError as error:
            raise DataError(f"{lines.where(index)}: {error}") from None

    def _encode(self, records: Sequence[Demonstration | Preference]) -> list[list[LearningRow]]:
        """Tokenise many lines; their texts on all cores. The DataError does not name the one that failed."""
        pairs = [(record, *record.parts()) for record in records]
        texts = [(prompt, record.tools, own) for record, prompt, own in pairs if isinstance(own[0], str)]
        prompts = self._tokenizer.encode_prompts(
            [prompt for prompt, _, _ in texts], chat=self._chat, tools=[tools for _, tools, _ in texts]
        )
        responses = iter(self._tokenizer.encode_texts([str(text) for *_, own in texts for text in own]))
        ids = iter(prompts)
        encoded = []
        for record, prompt, own in pairs:
            if isinstance(own[0], str):
                before = next(ids)
                rows = [self._of_text(before, next(responses)) for _ in own]
            else:
                before_turns = [Message("user", prompt)] if isinstance(prompt, str) else prompt
                encode = partial(self._tokenizer.encode_turns, tools=record.tools, first=len(before_turns))
                rows = [LearningRow(*encode([*before_turns, *turns], chat=self._chat)) for turns in own]
            encoded.append(rows)
        return encoded

    def _of_text(self, prompt: list[int], response: list[int]) -> LearningRow:
        tokens = [*prompt, *response, self._tokenizer.eos_token_id]
        return LearningRow(tokens, [False] * len(prompt) + [True] * (len(response) + 1))


def _problems(rows: Sequence[LearningRow], longest: int, prompt: int, response: int) -> Iterator[str]:
    remedy = "increase it or remove the line"
    for row in rows:
        begin = row.loss_mask.index(True)
        if not begin:
            yield "the prompt has no tokens: remove the line"
        if not all(row.loss_mask[begin:]):
            continue  # a chat of several turns
        if begin > prompt > 0:
            yield f"the prompt has {begin} tokens, but data.max_prompt_tokens is {prompt}: {remedy}"
        if len(row.tokens) - begin > response > 0:
            limit = f"generation.sampling.max_new_tokens is {response}"
            yield f"the response has {len(row.tokens) - begin} tokens, but {limit}: {remedy}"
    if (tokens := sum(len(row.tokens) for row in rows)) > longest:
        what = "the two rows have" if len(rows) > 1 else "the row has"
        yield f"{what} {tokens} tokens, but train.microbatch_tokens is {longest}: {remedy}"
    if len(rows) > 1 and rows[0].tokens == rows[1].tokens:
        yield "chosen and rejected have the same tokens: remove the line"


# ---- the file of a trial


def learning_data(config: Config, paths: TrialPaths, tokenizer: TextTokenizer) -> LearningData:
    """Open ``data.demos`` as the dataflow reads it, else as the warm-up does, which holds nothing out.

    Raises ConfigError if no file is configured, DataError.
    """
    path, rows = dataset_files(config, paths).demos, dataflow_of(config).rows
    if path is None:
        reader = "the supervised warm-up: name a file, or set warmup.steps=0"
        if is_supervised(config):
            reader = f"train.ppo.algorithm={config.train.ppo.algorithm}: name a file of {rows} (docs/data.md)"
        raise ConfigError("data.demos", config.data.demos, f"is needed by {reader}")
    template = config.data.chat_template
    if rows == "rollout" or rows == "clients":
        return LearningData(path, tokenizer, rows="demonstrations", chat_template=template)
    return LearningData(path, tokenizer, rows=rows, chat_template=template, held_out=config.data.eval_fraction)


def check_learning_data(config: Config, data: LearningData) -> LearningCheck:
    """Tokenise every line of ``data``. Raises DataError for the first that the run cannot learn from.

    The warm-up imitates what agents do, so its responses have their limits.
    """
    if is_supervised(config):
        return data.check(longest=config.train.microbatch_tokens)
    response, sequence = config.generation.sampling.max_new_tokens, longest_sequence(config)
    return data.check(longest=config.train.microbatch_tokens, prompt=sequence - response, response=response)
