"""NCCL between ranks: groups, bytes of all ranks, and sample arrays that move from GPU to GPU."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from realsys.cluster.topology import Mesh
from realsys.config.allocation import ACTOR, ParallelLayout, parse_allocation
from realsys.config.schema import Config
from realsys.model_calls import Transfer, TransferRequest
from realsys.train.megatron.collectives import gather_bytes
from realsys.train.worker.call_service import execute
from realsys.train.worker.data_manager import DataManager
from tests.gpu.conftest import STAND_IN
from tests.support.training.sample_records import make_ref
from tests.support.training.train_ranks import FORMED, run_ranks

pytestmark = pytest.mark.gpu
REFS = [make_ref(f"s{i}", 4000 + i, 3, 0.0, False, 0) for i in range(2)]
BACKEND = "gloo" if STAND_IN else "nccl"


def tokens(number):
    return np.arange(REFS[number].length, dtype=np.int32) + 7 * number


def communicate(rank, device):
    """Return backend, bytes of all ranks, sum over the ranks, and the tokens here after each rank sent its own."""
    groups, world = FORMED[ACTOR], dist.get_world_size()
    data = DataManager(rank)
    data.put(REFS[rank].sample_id, {"tokens": tokens(rank)})
    total = torch.tensor([rank + 1.0], device=device.device)
    dist.all_reduce(total, group=groups.whole)
    ids = [ref.sample_id for ref in REFS]
    plan = [Transfer(source, [world - 1 - source], [ids[source]], ["tokens"]) for source in range(world)]
    execute(TransferRequest(plan, REFS), data, rank, device)
    everything = gather_bytes(bytes([rank]) * (rank + 1), groups.whole)
    held = {i: data.get(ids[i], "tokens").tolist() for i in range(world)}
    assert groups.any_rank(rank == 0, device) and not groups.any_rank(False, device)
    return dist.get_backend(groups.whole), everything, total.item(), held


def test_rank_alone_has_its_groups(compute_on):
    compute_on("gpu")
    (found,) = run_ranks(1, communicate, Config(), parse_allocation("serve.d1+d1").actor)
    assert found == (BACKEND, [b"\0"], 1.0, {0: tokens(0).tolist()})


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("layout", ["d2", "m2", "p2"])
def test_arrays_move_between_gpus(layout, compute_on):
    compute_on("gpu")
    found = run_ranks(2, communicate, Config(), parse_allocation(f"serve.d1+{layout}").actor)
    expected = (BACKEND, [b"\0", b"\1\1"], 3.0, {i: tokens(i).tolist() for i in range(2)})
    assert found == [expected, expected]


@pytest.mark.usefixtures("two_gpus")
def test_transfers_cross_separate_meshes(compute_on):
    """They use the communicator of the world: no group has both workers."""
    compute_on("gpu")
    meshes = {ACTOR: Mesh(ParallelLayout(), (0,)), "critic": Mesh(ParallelLayout(), (1,))}

    def body(rank, device):
        data = DataManager(rank)
        if rank == 0:
            data.put(REFS[0].sample_id, {"tokens": tokens(0)})
        execute(TransferRequest([Transfer(0, [1], [REFS[0].sample_id], ["tokens"])], REFS), data, rank, device)
        return data.get(REFS[0].sample_id, "tokens").tolist()

    assert run_ranks(2, body, Config(), meshes=meshes) == [tokens(0).tolist()] * 2
