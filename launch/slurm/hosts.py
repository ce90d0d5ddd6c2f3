"""Reads the variables of SLURM that describe an allocation. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

JOB = "SLURM_JOB_ID"


@dataclass(frozen=True, slots=True)
class Allocation:
    """The nodes of a job. ``cpus``: of the node that has the fewest, 0 if SLURM does not say."""

    job: str
    hosts: list[str]
    cpus: int = 0
    gpus: int = 0
    restarts: int = 0

    @classmethod
    def read(cls, env: Mapping[str, str]) -> Allocation | None:
        """Return the allocation in which this process runs, None outside of one. Raises ValueError."""
        if not env.get(JOB) or not env.get("SLURM_JOB_NODELIST"):
            return None
        # 8(x3),16: three nodes with 8 CPUs, one with 16
        cpus = [int(part.partition("(")[0]) for part in env.get("SLURM_JOB_CPUS_PER_NODE", "0").split(",")]
        gpus = env.get("SLURM_GPUS_ON_NODE", "")
        restarts = env.get("SLURM_RESTART_COUNT", "")
        return cls(
            env[JOB],
            list(expand(env["SLURM_JOB_NODELIST"])),
            min(cpus),
            int(gpus) if gpus.isdigit() else 0,
            int(restarts) if restarts.isdigit() else 0,
        )


def expand(hosts: str) -> Iterator[str]:
    """Yield the names of a list of hosts as SLURM writes it: ``gpu[01-03,7],login``. Raises ValueError."""
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hosts):
        yield from _expand_one(part)


def _expand_one(part: str) -> Iterator[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    ranges, _, after = rest.partition("]")
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield from (f"{before}{number:0{len(first)}d}{tail}" for tail in _expand_one(after))
