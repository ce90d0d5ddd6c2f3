"""The prompts to roll out, by split and index; every process that opens them sees the same ones.

``data.eval`` names the held-out problems. Without it they are part of ``data.train``, chosen by a hash of the prompt:
the choice depends on nothing else, so a repeated prompt is never on both sides, and adding lines moves no other line.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.data.dataset_files import DatasetFiles, dataset_files
from realsys.data.lines import Lines, LinesBuilder, Problem, PromptText, RecordReader, index_file
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import DataError

Splits = dict[str, Lines[Problem]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt to roll out, with its dataset row.

    text    the prompt without chat template
    answer  the reference that a verifier compares a completion with
    ids     token ids that the model is given
    extra   the other keys of the row, with any JSON values, unchanged
    """

    text: str
    answer: str
    ids: list[int]
    extra: dict[str, Any] = field(default_factory=dict)


class PromptDataset:
    """Splits "train" and "eval". Opening checks every line; prompts are tokenised when they are asked for."""

    def __init__(self, config: Config, paths: TrialPaths, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._chat = config.data.chat_template
        self._max_tokens = config.data.max_prompt_tokens
        self._splits = open_splits(config, paths)

    def size(self, split: str) -> int:
        return len(self._lines(split))

    def prompt(self, split: str, index: int) -> Prompt:
        """Raises DataError naming file and line, also when the prompt has too many tokens."""
        lines = self._lines(split)
        problem, extra = lines.read_whole(index)
        ids = self._encode(lines, index, problem)
        self._check_length(lines, index, ids)
        return Prompt(plain_text(problem.prompt), problem.answer, ids, extra)

    def check(self) -> None:
        """Tokenise every prompt of every split once. Raises DataError for the first that cannot be used."""
        for lines in self._splits.values():
            for indices, problems in lines.chunks():
                try:
                    encoded = self._tokenizer.encode_prompts([p.prompt for p in problems], chat=self._chat)
                except DataError:
                    encoded = [self._encode(lines, i, p) for i, p in zip(indices, problems, strict=True)]  # finds it
                for i, ids in zip(indices, encoded, strict=True):
                    self._check_length(lines, i, ids)

    def _encode(self, lines: Lines[Problem], index: int, problem: Problem) -> list[int]:
        try:
            return self._tokenizer.encode_prompt(problem.prompt, chat=self._chat)
        except DataError as error:
            raise DataError(f"{lines.where(index)}: {error}") from None

    def _check_length(self, lines: Lines[Problem], index: int, ids: list[int]) -> None:
        if len(ids) > self._max_tokens:
            problem = f"the prompt has {len(ids)} tokens, data.max_prompt_tokens is {self._max_tokens}"
            raise DataError(f"{lines.where(index)}: {problem}; raise that or remove the line")
        if not ids:
            raise DataError(f"{lines.where(index)}: the prompt has no tokens")

    def _lines(self, split: str) -> Lines[Problem]:
        try:
            return self._splits[split]
        except KeyError:
            raise DataError(f"there is no split {split!r}; there are: {', '.join(self._splits)}") from None


def split_sizes(config: Config, paths: TrialPaths) -> dict[str, int]:
    """Prompts per split, without a tokenizer. Raises DataError."""
    return {split: len(lines) for split, lines in open_splits(config, paths).items()}


def check_file(path: Path) -> int:
    """Check every line of a file of problems and return how many there are. Raises DataError at the first bad one."""
    return len(index_file(path, RecordReader(Problem)))


def open_splits(config: Config, paths: TrialPaths) -> Splits:
    """Raises DataError for a bad line, or a split that is needed and empty."""
    files = dataset_files(config, paths)
    reader = RecordReader(Problem)
    if files.eval is not None:
        splits = {"train": index_file(files.train, reader), "eval": index_file(files.eval, reader)}
    else:
        splits = _hold_out(files.train, reader, config.data.eval_fraction)
    _check_sizes(splits, files, config)
    return splits


def _hold_out(path: Path, reader: RecordReader[Problem], fraction: float) -> Splits:
    builders = {"train": LinesBuilder(path, reader), "eval": LinesBuilder(path, reader)}
    for offset, number, problem in reader.scan(path):
        split = "eval" if _hash(problem.prompt) < fraction else "train"
        builders[split].add(offset, number)
    return {split: builder.build() for split, builder in builders.items()}


def _hash(prompt: PromptText) -> float:
    """In [0, 1), the same for the same prompt on any machine."""
    digest = hashlib.blake2b(msgspec.json.encode(prompt), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _check_sizes(splits: Splits, files: DatasetFiles, config: Config) -> None:
    if not len(splits["train"]):
        raise DataError(f"{files.train}: no prompts to train on")
    if len(splits["eval"]) or not config.evaluation.problems:
        return
    if files.eval is not None:
        raise DataError(f"{files.eval}: no problems to evaluate on")
    total, fraction = len(splits["train"]), config.data.eval_fraction
    remedy = "raise data.eval_fraction, name data.eval, or set evaluation.problems=0"
    raise DataError(f"{files.train}: none of {total} prompts are held out at data.eval_fraction={fraction}; {remedy}")


def plain_text(prompt: PromptText) -> str:
    """The prompt as a verifier may want to see it."""
    return prompt if isinstance(prompt, str) else "\n".join(message.content for message in prompt)
