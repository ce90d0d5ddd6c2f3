"""Reads the variables of SLURM that describe an allocation. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

JOB = "SLURM_JOB_ID"


@dataclass(frozen=True, slots=True)
class Allocation:
    """The nodes of a job, or of one component of a heterogeneous job.

    cpus   those of the node that has the fewest, 0 if SLURM does not say
    group  number of the component; None: the job is not heterogeneous
    """

    job: str
    hosts: list[str]
    cpus: int = 0
    gpus: int = 0
    restarts: int = 0
    group: int | None = None

    @classmethod
    def read(cls, env: Mapping[str, str]) -> Allocation | None:
        """Return the allocation in which this process runs, None outside of one. Raises ValueError."""
        if not env.get(JOB) or not env.get("SLURM_JOB_NODELIST"):
            return None
        return cls(
            env[JOB],
            list(expand(env["SLURM_JOB_NODELIST"])),
            _fewest_cpus(env.get("SLURM_JOB_CPUS_PER_NODE", "0")),
            _number(env.get("SLURM_GPUS_ON_NODE", "")),
            _number(env.get("SLURM_RESTART_COUNT", "")),
        )

    @classmethod
    def components(cls, env: Mapping[str, str]) -> list[Allocation]:
        """Return the components of a heterogeneous job, else the one allocation; [] outside of a job.

        Raises ValueError.
        """
        whole = cls.read(env)
        if whole is None:
            return []
        groups = range(_number(env.get("SLURM_HET_SIZE", "")))
        return [
            cls(
                whole.job,
                list(expand(env[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"])),
                _fewest_cpus(env.get(f"SLURM_JOB_CPUS_PER_NODE_HET_GROUP_{group}", "0")),
                restarts=whole.restarts,
                group=group,
            )
            for group in groups
        ] or [whole]


def _fewest_cpus(text: str) -> int:
    # 8(x3),16: three nodes with 8 CPUs, one with 16
    return min(int(part.partition("(")[0]) for part in text.split(","))


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


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
