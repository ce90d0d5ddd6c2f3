"""Cost of a change while 512 workers wait for tickets: ``python -m benchmarks.held_allocations``.

The manager's commit loop, its state and its journal, in one process and without HTTP. Every worker holds an allocation
for up to 64 tickets, and asks again when it got some. Per change: CPU time of the loop until it is quiet, decisions,
and who got the tickets.

    nothing    a report of the master that frees no ticket
    one        a group is rejected: one ticket
    a version  as many tickets as there are workers
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._table import report
from realsys.manager.commit_loop import ManagerService
from realsys.manager.decisions import ManagerSettings, ManagerState
from realsys.manager.ledger.journal import Journal
from realsys.manager.messages import AllocateRequest, FinishRequest, TrainedRequest
from realsys.manager.operations import ALLOCATE, FINISH, TRAINED
from realsys.types import PublishedVersion, ServerAddress, Ticket

PLACES = 64


class Trial:
    """A manager with one server, at its bound, and workers that wait."""

    def __init__(self, workers: int, journal: Journal) -> None:
        self.workers = workers
        self.state = ManagerState(ManagerSettings(workers, 0, 16, 2, 1, {"train": 1 << 20}))
        self.service = ManagerService(self.state, journal)
        self.state.observe_servers([ServerAddress("generation_server/0", "http://h", 1, "h", "1")])
        self.version, self.decisions = -1, 0
        self.granted: Counter[str] = Counter()
        self.open: list[Ticket] = []
        decide = self.service._decide

        def counted(operation: Any, request: Any) -> Any:
            self.decisions += operation is ALLOCATE
            return decide(operation, request)

        self.service._decide = counted  # type: ignore[method-assign]

    def publish(self) -> None:
        self.version += 1
        published = PublishedVersion(self.version, "", f"/v{self.version}", self.version)
        assert self.state.servers.publish(published)
        [server] = self.state.servers.all()
        server.verified = published
        self.state.servers.revision += 1
        self.service.settle(True)

    async def work(self, name: str) -> None:
        while True:
            reply = await self.service.call(ALLOCATE, AllocateRequest(name, PLACES, wait_s=10.0))
            self.granted[name] += len(reply.tickets)
            self.open += reply.tickets

    async def quiet(self) -> None:
        """Return when the loop has nothing to do."""
        for _ in range(20):
            await asyncio.sleep(0)


async def measure(workers: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    with Journal(folder / "ledger.jsonl") as journal:
        trial = Trial(workers, journal)
        tasks = [asyncio.create_task(trial.work(f"rollout_worker/{number}")) for number in range(workers)]
        trial.publish()
        await trial.quiet()

        async def nothing() -> None:
            await trial.service.call(TRAINED, TrainedRequest(0, 0))

        async def one() -> None:
            ticket = trial.open.pop()
            await trial.service.call(FINISH, FinishRequest(ticket.ticket_id, ticket.attempt, "w", "rejected"))

        async def a_version() -> None:
            trial.publish()

        rows = [await changes(trial, name, make, rounds) for name, make in
                (("nothing", nothing), ("one", one), ("a version", a_version))]  # fmt: skip
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return rows


async def changes(trial: Trial, name: str, make: Callable[[], Any], rounds: int) -> dict[str, Any]:
    times, decisions, most, served = [], [], [], []
    for _ in range(rounds):
        trial.decisions = 0
        trial.granted.clear()
        began = time.process_time()
        await make()
        await trial.quiet()
        times.append(time.process_time() - began)
        decisions.append(trial.decisions)
        most.append(max(trial.granted.values(), default=0))
        served.append(sum(number > 0 for number in trial.granted.values()))
    return {
        "change": name,
        "cpu ms": 1e3 * statistics.median(times),
        "decisions": statistics.median(decisions),
        "workers with a ticket": statistics.median(served),
        "most tickets of a worker": max(most),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.held_allocations", description=__doc__)
    parser.add_argument("--workers", type=int, default=512, help="held allocations")
    parser.add_argument("--rounds", type=int, default=30, help="changes of each kind")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(measure(arguments.workers, arguments.rounds, Path(folder)))
    report("held_allocations", rows, {**vars(arguments), "places": PLACES})


if __name__ == "__main__":
    main()
