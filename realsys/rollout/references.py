"""Checks the reference of every problem with the verifier of the trial, before any worker starts.

A reference that the verifier cannot use would make every completion of its prompt wrong, or leave it without a verdict.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator

import msgspec

from realsys.config.doors import VERIFIER
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.data.prompts import open_splits, plain_text
from realsys.errors import ConfigError, DataError, NoVerifierError
from realsys.reward.pool import VerifierPool
from realsys.reward.verifier_process import Limits
from realsys.reward.verifiers.base import Item

CHUNK = 1024  # references that are checked together
MAX_PROCESSES = 8

#: place of a row, as file:line, and its item without a completion
Row = tuple[str, Item]


def check_references(config: Config, paths: TrialPaths) -> None:
    """Raise DataError for the first reference that ``data.verifier`` cannot use. Generated data needs no check.

    Raises ConfigError if the verifier cannot be loaded.
    """
    if config.data.kind == "arith" or not _checks_answers(config.data.verifier):
        return
    try:
        for where, answer, problem in bad_references(config, _rows(config, paths)):
            remedy = "correct the answer, remove the line, or set data.verifier"
            raise DataError(f"{where}: answer {answer[:100]!r} cannot be verified: {problem}: {remedy}")
    except NoVerifierError as error:
        raise ConfigError("data.verifier", config.data.verifier, str(error)) from error


def _checks_answers(name: str) -> bool:
    """Return False for a verifier of the user, which the launcher has imported, that declares no check.

    Built-in verifiers are imported in their processes only: ``math`` needs sympy.
    """
    return name in VERIFIER.builtin or getattr(VERIFIER.load(name), "check_answer", None) is not None


def bad_references(config: Config, rows: Iterable[Row]) -> Iterator[tuple[str, str, str]]:
    """Yield (place, answer, problem) of the rows whose reference ``data.verifier`` cannot use, in their order.

    Must not be called in an event loop. Raises NoVerifierError.
    """
    with asyncio.Runner() as runner:
        processes = min(MAX_PROCESSES, len(os.sched_getaffinity(0)))
        name = config.data.verifier
        pool = VerifierPool(processes, Limits.of(config.rollout.reward), {name: config.data.verifier_args})
        try:
            for chunk in _chunks(rows):
                problems = runner.run(_problems(pool, name, chunk))
                yield from (
                    (where, item.answer, problems[_key(item)] or "") for where, item in chunk if problems[_key(item)]
                )
        finally:
            runner.run(pool.close())


async def _problems(pool: VerifierPool, name: str, rows: list[Row]) -> dict[bytes, str | None]:
    items = {_key(item): item for _, item in rows}  # many rows have the same answer
    problems = await asyncio.gather(*(pool.check_answer(name, item) for item in items.values()))
    return dict(zip(items, problems, strict=True))


def _key(item: Item) -> bytes:
    return msgspec.json.encode([item.answer, item.extra])


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _rows(config: Config, paths: TrialPaths) -> Iterator[Row]:
    for lines in open_splits(config, paths).values():
        for index in range(len(lines)):
            problem, extra = lines.read_whole(index)
            yield lines.where(index), Item(plain_text(problem.prompt), "", problem.answer, extra)
