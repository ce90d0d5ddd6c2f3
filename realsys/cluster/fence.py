"""The question a process asks right before each act that others see: does its lease still hold?

    Heartbeat.check ── the one implementation; ``ctx.check_alive`` in a worker
    unleased        ── for parts that run without a lease: tools, benchmarks, tests

A process that was suspended beyond its lease wakes up in the middle of whatever it did, and the thread that would
notice may be the last one to run. So the acts ask for themselves: publishing weights, completing a checkpoint, writing
shards, pushing and acknowledging groups, journal records, calls of the manager, answers over HTTP.

Asking and acting are two steps. A process suspended exactly between them is found out by the receiver: manager, ledger
and weight folders order what comes by incarnation and attempt, and refuse what is older than what they know.
"""

from __future__ import annotations

from collections.abc import Callable

#: Returns while the lease holds; else raises Fenced, and has the process end if it is a worker's.
CheckAlive = Callable[[], None]


def unleased() -> None:
    """There is no lease to lose."""
