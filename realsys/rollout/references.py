"""Checks the reference of every problem with the verifier of the trial, before any worker starts.

A reference that the verifier cannot use would make every completion of its prompt wrong, or leave it without a verdict.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Self

import msgspec

from realsys.config.doors import JUDGE, VERIFIER
from realsys.config.evaluation_sets import evaluation_sets, verifier_field
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.sections.schema_evaluation import HELD_OUT
from realsys.data.lines import ORIGIN, Lines, Problem
from realsys.data.prompts import open_splits, plain_text
from realsys.errors import ConfigError, DataError, NoVerifierError
from realsys.reward.build import own_verifiers
from realsys.reward.verifiers.base import Item

CHUNK = 1024  # references that are checked together
MAX_PROCESSES = 8


class ReferenceChecker:
    """Processes of one verifier that check references: ``with ReferenceChecker(config) as checker: ...``

    They start with the first check. Must not be used in an event loop. ``has_check``: False if the verifier takes any
    reference; then nothing is started.
    """

    def __init__(self, config: Config, verifier: str = "") -> None:
        """``verifier``: one of the trial's verifiers, ``data.verifier`` by default."""
        self._name = verifier or config.data.verifier
        self.field = verifier_field(config, self._name)
        self.has_check = _has_check(self._name)
        processes = min(MAX_PROCESSES, len(os.sched_getaffinity(0)))
        self._verifiers = own_verifiers(config, processes=processes)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._runner:
            self._runner.run(self._verifiers.close())

    def problems(self, items: Sequence[Item]) -> list[str | None]:
        """Return for each item why the verifier cannot use its reference; None if it can.

        The values of ``extra`` must be JSON. Raises ConfigError if the verifier cannot be loaded or always fails.
        """
        if not self.has_check:
            return [None] * len(items)
        try:
            return self._runner.run(self._problems(items))
        except NoVerifierError as error:
            raise ConfigError(self.field, self._name, str(error)) from error

    async def _problems(self, items: Sequence[Item]) -> list[str | None]:
        keys = [_key(item) for item in items]
        distinct = dict(zip(keys, items, strict=True))  # many rows have the same answer
        checks = (self._verifiers.check_answer(self._name, item) for item in distinct.values())
        problems = dict(zip(distinct, await asyncio.gather(*checks), strict=True))
        return [problems[key] for key in keys]


def check_references(config: Config, paths: TrialPaths) -> None:
    """Raise DataError for the first reference that its verifier cannot use. The arith task fits all functions.

    Raises ConfigError if the verifier cannot be loaded.
    """
    checked = {name: splits for name, splits in _splits_of_verifiers(config).items() if _has_check(name)}
    records = open_splits(config, paths).values() if checked else {}
    for verifier, splits in checked.items():
        with ReferenceChecker(config, verifier) as checker:
            for split in (split for split in splits if split in records):
                _check_lines(checker, records[split])


def _splits_of_verifiers(config: Config) -> dict[str, list[str]]:
    """Return verifier -> splits that it judges and that are not generated."""
    splits: dict[str, dict[str, None]] = {} if config.evaluate_only else {config.data.verifier: {"train": None}}
    for made in evaluation_sets(config).values():
        splits.setdefault(made.verifier, {})[made.split] = None
    # A judge wants keys of the row, which the generated problems may lack; functions take all of their answers.
    fits = ("train", HELD_OUT) if config.data.kind == "arith" else ()
    checked = {name: [s for s in of if name in JUDGE.builtin or s not in fits] for name, of in splits.items()}
    return {name: named for name, named in checked.items() if named}


def _check_lines(checker: ReferenceChecker, lines: Lines[Problem]) -> None:
    for start in range(0, len(lines), CHUNK):
        _check_chunk(checker, lines, range(start, min(start + CHUNK, len(lines))))


def _check_chunk(checker: ReferenceChecker, lines: Lines[Problem], indices: range) -> None:
    rows = [lines.read_whole(index) for index in indices]
    items = [Item(plain_text(problem.prompt), "", problem.answer, extra) for problem, extra in rows]
    for index, item, problem in zip(indices, items, checker.problems(items), strict=True):
        if problem is not None:
            remedy = f"correct the answer, remove the line, or set {checker.field}"
            answer = item.answer[:100]
            raise DataError(f"{lines.where(index)}: answer {answer!r} cannot be verified: {problem}: {remedy}")


def _has_check(name: str) -> bool:
    """Return False for a verifier of the user, which the launcher has imported, that declares no check.

    Built-in verifiers are imported in their processes only: ``math`` needs sympy.
    """
    return name in VERIFIER.builtin or getattr(VERIFIER.load(name), "check_answer", None) is not None


def _key(item: Item) -> bytes:
    extra = {key: value for key, value in item.extra.items() if key != ORIGIN}  # each row has another origin
    return msgspec.json.encode([item.answer, extra])
