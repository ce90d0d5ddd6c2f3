"""A verifier pool with one process that judges programs, for benchmarks of the verifier ``code``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

import psutil

from realsys.errors import RewardError
from realsys.reward.pool import ItemLimits, VerifierPool
from realsys.reward.verifiers.contract import Item


class Judge:
    """A verifier pool with its event loop. ``judges`` makes and closes it."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._pool = VerifierPool(1, ItemLimits(60.0, 120.0))

    def one(self, item: Item) -> bool | None:
        """Return whether a program is right; None if there is no verdict."""
        try:
            return self._runner.run(self._pool.verify("code", item)).correct
        except RewardError:
            return None

    def all(self, items: Sequence[Item]) -> list[bool | None]:
        """Judge all items, given at the same time."""

        async def gather() -> list[bool | None]:
            verdicts = await asyncio.gather(*(self._pool.verify("code", item) for item in items))
            return [verdict.correct for verdict in verdicts]

        return self._runner.run(gather())

    def close(self) -> None:
        self._runner.run(self._pool.close())
        self._runner.close()


@contextlib.contextmanager
def judges() -> Iterator[Judge]:
    judge = Judge()
    try:
        yield judge
    finally:
        judge.close()


def cpu_s() -> float:
    """Return the CPU time of this process and all below it."""
    own, used_s = psutil.Process(), 0.0
    for process in [own, *own.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a program has just ended
            used_s += sum(process.cpu_times()[:4])
    return used_s
