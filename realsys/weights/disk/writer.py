"""One rank's file of a weight version."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from realsys.cluster.failpoint import failpoint
from realsys.cluster.lease import CheckAlive, unleased
from realsys.weights.base import Share
from realsys.weights.disk.records import DiskPlan, ShardInfo
from realsys.weights.disk.shards import ShardWriter


class DiskWriter:
    """Writer of one rank's file. Its report lists the written shard; it is empty without tensors."""

    def __init__(self, files: ShardWriter, check_alive: CheckAlive = unleased) -> None:
        self._files = files
        self._check_alive = check_alive

    def write(self, share: Share, tensors: Mapping[str, torch.Tensor]) -> list[ShardInfo]:
        """Write the file into the plan's folder, fsynced. Raises WeightsError, which names path and
        cause."""
        plan = msgspec.convert(share.plan, DiskPlan)
        # Numbered over all ranks of the mesh: a rank does not know which others have nothing to write.
        file = Path(plan.directory) / f"model-{share.rank + 1:05d}-of-{share.ranks:05d}.safetensors"
        self._check_alive()
        shards = [self._files.write(file, tensors, plan.base, share.checksums)] if tensors else []
        failpoint("weights.shard", file)
        return shards
