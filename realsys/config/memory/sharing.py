"""Share of a GPU's memory that a server may take if other processes have the GPU, too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from realsys.config.allocation import parse_allocation
from realsys.config.dataflow import dataflow_of
from realsys.config.devices.device_plan import SERVER, Seat, owners
from realsys.config.memory.device_memory import RANK_SHARE, rank_uses
from realsys.config.schema import Config

#: share of a GPU that is left to kernels and buffers of its processes
_UNPLANNED = 0.1
_LEAST = 0.01  # a share must be positive: the memory check refuses it with the numbers


def largest_rank(config: Config) -> int:
    """Return the predicted bytes of the training rank that needs most of its GPU. Raises ModelError."""
    uses = rank_uses(config, parse_allocation(config.allocation), dataflow_of(config), on_gpu=True)
    return max(use.total for use, _ in uses)


def owners_beside_servers(seats: Sequence[Seat]) -> set[tuple[int, int]]:
    """Return the numbers of training ranks and of servers on the GPUs that servers have."""
    count, served = owners(seats), owners([seat for seat in seats if seat.kind == SERVER])
    return {(count[gpu] - number, number) for gpu, number in served.items()}


def smallest_gpu_for_ranks(config: Config) -> int:
    """Return the bytes of the smallest GPU on which each training rank fits. Raises ModelError."""
    return math.ceil(largest_rank(config) / RANK_SHARE)


def server_share(gpus: Iterable[tuple[int, int]], rank_share: float | None) -> float:
    """Return the share of each server, down to two digits: the least of all GPUs that servers have.

    gpus        numbers of training ranks and of servers on these GPUs
    rank_share  predicted share that a rank needs; None: not known, the processes of a GPU split it evenly
    """
    free = 1 - _UNPLANNED
    shares = [
        free / (ranks + servers) if rank_share is None else (free - ranks * rank_share) / servers
        for ranks, servers in gpus
    ]
    return max(_LEAST, math.floor(100 * min(shares) + 1e-9) / 100)
