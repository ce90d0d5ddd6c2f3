"""The prompts of a trial, by split and index; every process that opens them gets the same ones.

``data.eval`` names the held-out problems. Without it they are a part of ``data.train``, chosen by a hash of the prompt.
The choice depends on nothing else: a repeated prompt is never in both splits, and a new line moves no other line.
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
    """One prompt, with its dataset row.

    text    the prompt without chat template
    answer  the reference answer, which a verifier compares with a completion
    ids     token ids for the model
    extra   the other keys of the row, with any JSON values, unchanged
    """

    text: str
    answer: str
    ids: list[int]
    extra: dict[str, Any] = field(default_factory=dict)


class PromptDataset:
    """Splits "train" and "eval". Opening checks every line; ``prompt`` tokenises one prompt."""

    def __init__(self, config: Config, paths: TrialPaths, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._chat = config.data.chat_template
        self._max_tokens = config.data.max_prompt_tokens
        self._splits = open_splits(config, paths)

    def size(self, split: str) -> int:
        return len(self._lines(split))

    def prompt(self, split: str, index: int) -> Prompt:
        """Read and tokenise one prompt. DataError names file and line, also if it has too many tokens."""
        lines = self._lines(split)
        problem, extra = lines.read_whole(index)
        ids = self._encode(lines, index, problem)
        self._check_length(lines, index, ids)
        return Prompt(plain_text(problem.prompt), problem.answer, ids, extra)

    def check(self) -> list[str]:
        """Tokenise every prompt of every split once. Raises DataError for the first that cannot be used.

        Returns the characters that the tokenizer does not know.
        """
        characters: set[str] = set()
        for lines in self._splits.values():
            for indices, problems in lines.chunks():
                try:
                    encoded = self._tokenizer.encode_prompts(
                        [p.prompt for p in problems], chat=self._chat, tools=[p.tools for p in problems]
                    )
                except DataError:
                    # The batch does not tell which prompt failed; one by one, the error names the line.
                    encoded = [self._encode(lines, i, p) for i, p in zip(indices, problems, strict=True)]
                for i, ids in zip(indices, encoded, strict=True):
                    self._check_length(lines, i, ids)
                characters.update(*(plain_text(problem.prompt) for problem in problems))
        return self._tokenizer.unknown(characters)

    def _encode(self, lines: Lines[Problem], index: int, problem: Problem) -> list[int]:
        try:
            return self._tokenizer.encode_prompt(problem.prompt, chat=self._chat, tools=problem.tools)
        except DataError as error:
            raise DataError(f"{lines.where(index)}: {error}") from None

    def _check_length(self, lines: Lines[Problem], index: int, ids: list[int]) -> None:
        if len(ids) > self._max_tokens:
            problem = f"the prompt has {len(ids)} tokens, but data.max_prompt_tokens is {self._max_tokens}"
            raise DataError(f"{lines.where(index)}: {problem}: increase it or remove the line")
        if not ids:
            raise DataError(f"{lines.where(index)}: the prompt has no tokens: remove the line")

    def _lines(self, split: str) -> Lines[Problem]:
        try:
            return self._splits[split]
        except KeyError:
            raise DataError(f"split {split!r} not found: use one of {', '.join(self._splits)}") from None


def split_sizes(config: Config, paths: TrialPaths) -> dict[str, int]:
    """Count the prompts per split, without a tokenizer. Raises DataError."""
    return {split: len(lines) for split, lines in open_splits(config, paths).items()}


def open_splits(config: Config, paths: TrialPaths) -> Splits:
    """Open all splits. Raises DataError for a bad line, or for a needed split that is empty."""
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
    """Hash a prompt to [0, 1), equal for the same prompt on any machine."""
    digest = hashlib.blake2b(msgspec.json.encode(prompt), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _check_sizes(splits: Splits, files: DatasetFiles, config: Config) -> None:
    if not len(splits["train"]):
        raise DataError(f"{files.train}: no prompts to train on: add lines")
    if len(splits["eval"]) or not config.evaluation.problems:
        return
    if files.eval is not None:
        raise DataError(f"{files.eval}: no problems to evaluate on: add lines, or set evaluation.problems=0")
    total, fraction = len(splits["train"]), config.data.eval_fraction
    remedy = "increase data.eval_fraction, set data.eval, or set evaluation.problems=0"
    raise DataError(f"{files.train}: data.eval_fraction={fraction} holds out none of {total} prompts: {remedy}")


def plain_text(prompt: PromptText) -> str:
    """Return the text of a prompt, for a verifier."""
    return prompt if isinstance(prompt, str) else "\n".join(message.content or "" for message in prompt)
