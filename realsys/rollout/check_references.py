"""Checks the reference of every problem with the verifier of the trial, before any worker starts.

A reference that the verifier cannot use would make every completion of its prompt wrong, or leave it without a verdict.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Self

import msgspec

from realsys.config.dataflow import takes_prompts
from realsys.config.doors import JUDGE, VERIFIER
from realsys.config.evaluation_sets import evaluation_sets, verifier_field
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.schema_data import HELD_OUT
from realsys.data.lines import ORIGIN, Lines, Problem
from realsys.data.prompts import open_splits, plain_text
from realsys.errors import ConfigError, DataError, NoVerifierError, RewardError
from realsys.reward.open_verifiers import own_verifiers
from realsys.reward.verifier_protocol import NO_VERDICT
from realsys.reward.verifiers.contract import Item, Verdict

CHUNK = 1024  # references that are checked together
MAX_PROCESSES = 8
TRIED = 3  # rows on which a verifier of the user is tried
SPREAD = 256  # further rows, over all of the data, whose references it should judge right if it does so on these


class ReferenceChecker:
    """Processes of one verifier that check references: ``with ReferenceChecker(config) as checker: ...``

    They start with the first check. Must not be used in an event loop. ``has_check``: False if the verifier takes any
    reference; then nothing is started.
    """

    def __init__(self, config: Config, verifier: str = "") -> None:
        """``verifier``: one of the trial's verifiers, ``data.verifier`` by default."""
        self._name = verifier or config.data.verifier
        self._cut_reward = config.rollout.reward.wrong
        self.field = verifier_field(config, self._name)
        # built-in verifiers are imported in their processes only: ``math`` needs sympy
        self.has_check = (
            self._name in VERIFIER.builtin or getattr(VERIFIER.load(self._name), "check_answer", None) is not None
        )
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

    def try_on(self, lines: Lines[Problem]) -> list[str]:
        """Judge the references of the first rows, and empty completions. Returns warnings.

        Raises ConfigError if the verifier returns no verdict, or decides nothing.
        """
        return self._runner.run(self._try_on(lines))

    async def _try_on(self, lines: Lines[Problem]) -> list[str]:
        tried = range(min(TRIED, len(lines)))
        rows = [lines.read_whole(index) for index in tried]
        items = [Item(plain_text(p.prompt), text, p.answer, extra) for p, extra in rows for text in (p.answer, "")]
        judged = await asyncio.gather(*(self._verifiers.verify(self._name, i) for i in items), return_exceptions=True)
        failures = [one for one in judged if isinstance(one, BaseException)]
        misused = [one for one in failures if not isinstance(one, RewardError) or one.cause == NO_VERDICT]
        if misused or len(failures) == len(judged):
            first = (misused or failures)[0]
            where = lines.where(tried[judged.index(first) // 2])
            problem = str(first).removeprefix(f"verifier {self._name}: ")
            raise ConfigError(self.field, self._name, f"tried on {where}: {problem}")
        warnings = []
        is_right = [_is_right(one) for one in judged[::2]]
        if failures:
            warnings.append(f"has no verdict on {len(failures)} of {len(judged)} trials: {failures[0]}")
        elif not any(is_right):
            warnings.append(f"judges no reference right that stands alone, as in {lines.where(0)}")
        elif all(is_right):
            warnings += await self._wrong_references(lines)
        rewards = [one.reward for one in judged if isinstance(one, Verdict) and one.reward is not None]
        if rewards and not min(0.0, *rewards) <= self._cut_reward <= max(1.0, *rewards):
            cut = f"rollout.reward.wrong={self._cut_reward:g}"
            warnings.append(
                f"gives rewards such as {rewards[0]:g}, but a completion that is cut off gets {cut}: set it, too"
            )
        return [f"{self.field}={self._name} {warning}" for warning in warnings]

    async def _wrong_references(self, lines: Lines[Problem]) -> list[str]:
        """Judge references from all over the data; return a warning if some are not judged right."""
        some = range(len(lines))[:: max(1, len(lines) // SPREAD)]
        rows = [lines.read_whole(index) for index in some]
        items = [Item(plain_text(problem.prompt), problem.answer, problem.answer, extra) for problem, extra in rows]
        judged = await asyncio.gather(*(self._verifiers.verify(self._name, i) for i in items), return_exceptions=True)
        wrong = [index for index, one in zip(some, judged, strict=True) if not _is_right(one)]
        if not wrong:
            return []
        return [f"does not judge {len(wrong)} of {len(some)} references right, the first in {lines.where(wrong[0])}"]

    async def _problems(self, items: Sequence[Item]) -> list[str | None]:
        keys = [_key(item) for item in items]
        distinct = dict(zip(keys, items, strict=True))  # many rows have the same answer
        checks = (self._verifiers.check_answer(self._name, item) for item in distinct.values())
        problems = dict(zip(distinct, await asyncio.gather(*checks), strict=True))
        return [problems[key] for key in keys]


def _is_right(judged: object) -> bool:
    return isinstance(judged, Verdict) and judged.correct is not False


def check_references(config: Config, paths: TrialPaths) -> list[str]:
    """Check the references with their verifiers, and try the verifiers of the user on some rows. Returns warnings.

    Raises DataError for the first reference that its verifier cannot use; the arith task fits all built-in functions.
    Raises ConfigError if a verifier cannot be loaded, or judges nothing.
    """
    warnings = []
    checked = _splits_of_verifiers(config)
    records = open_splits(config, paths).values() if checked else {}
    for verifier, splits in checked.items():
        lines = [records[split] for split in splits if split in records]
        with ReferenceChecker(config, verifier) as checker:
            for each in lines if checker.has_check else ():
                _check_lines(checker, each)
            if lines and verifier not in VERIFIER.builtin:
                warnings += checker.try_on(lines[0])
    return warnings


def _splits_of_verifiers(config: Config) -> dict[str, list[str]]:
    """Return verifier -> splits that it judges. A built-in function needs no check on generated problems."""
    splits: dict[str, dict[str, None]] = {config.data.verifier: {"train": None}} if takes_prompts(config) else {}
    for made in evaluation_sets(config).values():
        splits.setdefault(made.verifier, {})[made.split] = None
    # A judge wants keys of the row, which the generated problems may lack, and so may a function of the user.
    fits = ("train", HELD_OUT) if config.data.kind == "arith" else ()
    fitting = VERIFIER.builtin.keys() - JUDGE.builtin.keys()
    checked = {name: [s for s in of if name not in fitting or s not in fits] for name, of in splits.items()}
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


def _key(item: Item) -> bytes:
    extra = {key: value for key, value in item.extra.items() if key != ORIGIN}  # each row has another origin
    return msgspec.json.encode([item.answer, extra])
