"""Batches of rows of ``data.demos``: those of a supervised run, and those of the warm-up.

    batch number, seed ──> lines ──load_rows──> DP heads: each tokenises an equal share ──> groups of rows

The lines of a batch depend on its number and the seed alone, so a run goes on with the right ones after any failure.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import numpy as np

from realsys.cluster.topology import Mesh
from realsys.config.schema_data import HELD_OUT, TRAIN
from realsys.train.master.model_workers import ModelWorkers
from realsys.types import SampleMeta

#: held-out lines that are measured at a time: their tokens are on the ranks together
MOST_HELD_OUT = 1024


class LearnedRows:
    """The batches of a run. Every pass over the lines has its own permutation."""

    def __init__(self, workers: ModelWorkers, mesh: Mesh, *, lines: int, held_out: int, batch: int, seed: int) -> None:
        """``lines``: to train on; ``held_out``: those that are only measured; ``mesh``: of the actor."""
        self.held_out_lines = min(held_out, MOST_HELD_OUT)
        self._workers = workers
        self._heads = mesh.dp_heads()
        self.lines = lines
        self._batch = batch
        self._seed = seed
        self._order = (-1, np.zeros(0, np.int64))  # of the epoch that was asked for last
        self._upcoming: dict[int, asyncio.Task[list[list[SampleMeta]]]] = {}

    async def take(self, number: int, last: int) -> list[list[SampleMeta]]:
        """Return the groups of batch ``number``, from 0: a line each. The heads then load the next, up to ``last``."""
        groups = await self._begun(number)
        del self._upcoming[number]
        if number < last:
            self._begun(number + 1)
        return groups

    async def held_out(self) -> list[list[SampleMeta]]:
        """Load the held-out lines that are measured."""
        return await self._load(HELD_OUT, range(self.held_out_lines), HELD_OUT)

    async def close(self) -> None:
        """Give up what is loaded ahead."""
        for task in self._upcoming.values():
            task.cancel()
        # Also retrieves its exception: asyncio would otherwise log a second error next to the one that ends the run.
        await asyncio.gather(*self._upcoming.values(), return_exceptions=True)

    def _begun(self, number: int) -> asyncio.Task[list[list[SampleMeta]]]:
        if number not in self._upcoming:
            self._upcoming[number] = asyncio.create_task(self._load(f"{TRAIN}/{number}", self._indices(number), TRAIN))
        return self._upcoming[number]

    def _indices(self, number: int) -> list[int]:
        indices: list[int] = []
        position = number * self._batch
        while len(indices) < self._batch:
            epoch, offset = divmod(position + len(indices), self.lines)
            if epoch != self._order[0]:  # made once: with millions of lines it takes a while
                self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(self.lines)
            indices.extend(int(i) for i in self._order[1][offset : offset + self._batch - len(indices)])
        return indices

    async def _load(self, name: str, indices: Sequence[int], split: str) -> list[list[SampleMeta]]:
        # The names tell places in the batch alone, so it is packed alike after a failure, and on any layout.
        lines = {f"{name}.{place:06}": index for place, index in enumerate(indices)}
        shares = [dict(itertools.islice(lines.items(), i, None, len(self._heads))) for i in range(len(self._heads))]
        loads = [
            self._workers.load_rows(head, own, split) for head, own in zip(self._heads, shares, strict=True) if own
        ]
        groups: dict[str, list[SampleMeta]] = {each: [] for each in lines}
        for reply in await asyncio.gather(*loads):
            for sample in reply.samples:
                groups[sample.ticket_id].append(sample)
        return list(groups.values())
