"""Check of a process's lease, right before each act that other processes see.

    Heartbeat.check ── the one implementation; ``ctx.check_alive`` in a worker
    unleased        ── for parts that run without a lease: tools, benchmarks, tests

A process that was suspended beyond its lease wakes up in the middle of its work, and its heartbeat
thread may be the last one to run. So every visible act checks the lease first: publishing weights,
completing a checkpoint, writing shards, pushing and acknowledging groups, appending to the journal,
calling the manager, replying over HTTP.

The check and the act are two steps. If a process is suspended exactly between them, the receiver refuses
the act (``monotonic``): manager, ledger and weight folders are ordered by incarnation and attempt, and
refuse everything older than the newest that they have seen.
"""

from __future__ import annotations

from collections.abc import Callable

#: Returns while the lease holds; else raises Fenced, and ends the process if it is a worker.
CheckAlive = Callable[[], None]


def unleased() -> None:
    """Return at every call: a part without a lease cannot lose it."""
