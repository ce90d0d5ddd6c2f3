"""Several meshes in one world, on real ranks: who is in which group, and what Megatron sees while a mesh is active."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from realsys.cluster.topology import Mesh, place
from realsys.config.allocation import ParallelLayout, parse_allocation
from realsys.config.schema import Config
from realsys.model_calls import MfcRequest
from realsys.train.megatron.megatron_core import parallel_state
from realsys.train.worker.call_handlers import find_handler
from tests.support.training.ppo_batch import make_batch
from tests.support.training.train_ranks import FORMED, build_role, run_ranks


def members(group):
    return dist.get_process_group_ranks(group)


def groups_of(role):
    formed = FORMED[role]
    axes = {"data": formed.data, "tensor": formed.tensor, "pipeline": formed.pipeline, "whole": formed.whole}
    return {name: members(group) for name, group in axes.items()}


def megatron_groups():
    """Every group that Megatron has now, by the name of its global."""
    state = vars(parallel_state)
    return {
        name: members(value) for name, value in state.items() if name.isupper() and isinstance(value, dist.ProcessGroup)
    }


def test_groups_wait_as_long_as_the_master():
    """Not torch's default, which ends a run whose rank waits 10 minutes on NCCL."""
    config = Config.model_validate({"cluster": {"request_timeout_s": 7200.0}})
    layout = ParallelLayout(2, 1, 1)

    def body(rank, device):
        formed = FORMED["actor"]
        groups = [formed.whole, formed.data, formed.tensor, formed.pipeline]
        backends: list[Any] = [group._get_backend(device.device) for group in groups]
        return {backend.options._timeout.total_seconds() for backend in backends}

    assert run_ranks(2, body, config, layout) == [{7200.0}] * 2


def test_worker_makes_one_group_for_each_split():
    """Not one for each group of the mesh, most of which have other members."""
    meshes = place(parse_allocation("sglang.d1+actor.d2m2"), ["actor"])

    def body(rank, device):
        return sorted(members(group) for group in dist.distributed_c10d._world.pg_map)

    world, data, tensor = [0, 1, 2, 3], [[0, 2], [1, 3]], [[0, 1], [2, 3]]
    assert run_ranks(4, body, Config(), meshes=meshes) == [
        sorted([world, data[rank % 2], tensor[rank // 2], [rank]]) for rank in range(4)
    ]


def test_mesh_on_shared_workers_has_separate_groups():
    meshes = place(parse_allocation("sglang.d1+actor.d2p1m1,critic.d1m2"), ["actor", "critic"])

    def body(rank, device):
        return {role: groups_of(role) for role in FORMED}

    found = run_ranks(2, body, Config(), meshes=meshes)
    for worker in (0, 1):
        alone, both = [worker], [0, 1]
        assert found[worker] == {
            "actor": {"data": both, "tensor": alone, "pipeline": alone, "whole": both},
            "critic": {"data": alone, "tensor": both, "pipeline": alone, "whole": both},
        }


def test_meshes_overlap_where_they_are_placed_so():
    meshes = place(parse_allocation("sglang.d1+actor.d2+critic.m2"), ["actor", "critic"])
    meshes["ref"] = Mesh(ParallelLayout(pipeline=2), (1, 2))

    def body(rank, device):
        sums = {}
        for role, formed in FORMED.items():  # every group carries another message, to its members only
            value = torch.tensor([float(10**rank)])
            dist.all_reduce(value, group=formed.whole)
            sums[role] = int(value.item())
        flags = {role: formed.any_rank(rank == 0, device) for role, formed in FORMED.items()}
        stages = {role: (formed.rank, formed.first_stage, formed.last_stage) for role, formed in FORMED.items()}
        return {role: groups_of(role) for role in FORMED}, sums, flags, stages

    found = run_ranks(4, body, Config(), meshes=meshes)
    assert [sorted(groups) for groups, *_ in found] == [["actor"], ["actor", "ref"], ["critic", "ref"], ["critic"]]
    assert found[1][0] == {
        "actor": {"data": [0, 1], "tensor": [1], "pipeline": [1], "whole": [0, 1]},
        "ref": {"data": [1], "tensor": [1], "pipeline": [1, 2], "whole": [1, 2]},
    }
    assert found[2][0] == {
        "critic": {"data": [2], "tensor": [2, 3], "pipeline": [2], "whole": [2, 3]},
        "ref": {"data": [2], "tensor": [2], "pipeline": [1, 2], "whole": [1, 2]},
    }
    assert [sums for _, sums, *_ in found] == [
        {"actor": 11},
        {"actor": 11, "ref": 110},
        {"critic": 1100, "ref": 110},
        {"critic": 1100},
    ]
    assert [flags for _, _, flags, _ in found] == [
        {"actor": True},
        {"actor": True, "ref": False},
        {"critic": False, "ref": False},
        {"critic": False},
    ]
    assert found[1][3]["ref"] == (0, True, False) and found[2][3]["ref"] == (1, False, True)


def test_mesh_at_an_offset_has_the_expected_groups():
    """The expected groups were worked out by hand."""
    #   stage 0: workers 1 2      stage 1: workers 3 4      worker 0 is on no mesh
    mesh = Mesh(ParallelLayout(pipeline=2, tensor=2), (1, 2, 3, 4))

    def body(rank, device):
        if not FORMED:
            return None
        formed = FORMED["critic"]
        with formed.active():
            seen = megatron_groups()
            neighbours = (
                parallel_state.get_pipeline_model_parallel_prev_rank(),
                parallel_state.get_pipeline_model_parallel_next_rank(),
            )
            sources = (parallel_state.get_tensor_model_parallel_src_rank(), parallel_state.get_data_parallel_src_rank())
        return (formed.rank, formed.data_rank, formed.tensor_rank, formed.pipeline_rank), seen, neighbours, sources

    found = run_ranks(5, body, Config(), meshes={"critic": mesh})
    assert found[0] is None
    for worker, place_on_mesh, tensor, pipeline in (
        (1, (0, 0, 0, 0), [1, 2], [1, 3]),
        (2, (1, 0, 1, 0), [1, 2], [2, 4]),
        (3, (2, 0, 0, 1), [3, 4], [1, 3]),
        (4, (3, 0, 1, 1), [3, 4], [2, 4]),
    ):
        at, seen, neighbours, sources = found[worker]
        assert at == place_on_mesh
        assert seen["_TENSOR_MODEL_PARALLEL_GROUP"] == tensor
        assert seen["_PIPELINE_MODEL_PARALLEL_GROUP"] == seen["_EMBEDDING_GROUP"] == pipeline
        assert seen["_MODEL_PARALLEL_GROUP"] == [1, 2, 3, 4]
        assert seen["_DATA_PARALLEL_GROUP"] == seen["_CONTEXT_PARALLEL_GROUP"] == [worker]
        assert seen.get("_POSITION_EMBEDDING_GROUP") == ([worker] if worker in (1, 2) else None)
        other_stage = next(other for other in pipeline if other != worker)
        assert neighbours == (other_stage, other_stage)
        assert sources == (tensor[0], worker)


@pytest.mark.parametrize("layout", [ParallelLayout(2, 2, 1), ParallelLayout(1, 2, 2), ParallelLayout(2, 1, 2)], ids=str)
def test_whole_mesh_has_the_groups_of_megatron(layout):
    def body(rank, device):
        with FORMED["actor"].active():
            ours = megatron_groups(), parallel_state.get_all_ranks()
        with device.active():
            parallel_state.initialize_model_parallel(
                layout.tensor, layout.pipeline, order="tp-cp-ep-dp-pp", create_gloo_process_groups=False
            )
        theirs = megatron_groups(), parallel_state.get_all_ranks()
        parallel_state.destroy_model_parallel()
        return ours, theirs

    for ours, theirs in run_ranks(4, body, Config(), layout):
        assert ours == theirs


def test_what_was_active_before_is_active_again():
    meshes = place(parse_allocation("sglang.d1+actor.d2,critic.m2"), ["actor", "critic"])

    def axes():
        return (
            parallel_state.get_data_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
            dist.get_world_size(),
        )

    def body(rank, device):
        actor, critic = FORMED["actor"], FORMED["critic"]
        seen = []
        with actor.active():
            seen.append(axes())
            with critic.active():
                seen.append(axes())
                with actor.active():
                    seen.append(axes())
                seen.append(axes())
            seen.append(axes())
            with pytest.raises(ValueError, match="in a call"), critic.active():
                raise ValueError("in a call")
            seen.append(axes())
        assert not parallel_state.is_initialized() and not megatron_groups()
        assert dist.get_world_size is dist.distributed_c10d.get_world_size
        return seen

    actor, critic = (2, 1, 2), (1, 2, 2)
    for seen in run_ranks(2, body, Config(), meshes=meshes):
        assert seen == [actor, critic, actor, critic, actor, actor]


def test_megatron_gathers_over_the_mesh_only():
    meshes = {"actor": Mesh(ParallelLayout(data=2), (1, 2))}

    def body(rank, device):
        if not FORMED:
            return dist.get_world_size()
        with FORMED["actor"].active():
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, f"worker {rank}")
        return found, dist.get_world_size()

    both = ["worker 1", "worker 2"]
    assert run_ranks(3, body, Config(), meshes=meshes) == [3, (both, 3), (both, 3)]


REFS, ARRAYS = make_batch()
FORWARD = {"actor": "actor_inf", "critic": "critic_inf", "ref": "ref_inf"}
LEAVES = {"actor": "prox_logprobs", "critic": "values", "ref": "ref_logprobs"}
TRAIN = {"actor": "sft", "critic": "critic_train"}


def run_rounds(config, folders, rank, device):
    """The roles of this worker do two rounds of a forward pass and, if they are trained, a step: taking turns.

    Role -> its statistics in order, the arrays of its last forward pass, its weights.
    """
    roles = {
        name: build_role(config, formed.mesh.layout, rank, device, folders[name], name, trainable=name in TRAIN)
        for name, formed in FORMED.items()
    }
    for role in roles.values():
        for ref in REFS:
            returns = {"returns": np.sin(np.arange(ref.loss_tokens) + ref.length)}
            role.data.put(ref.sample_id, {**ARRAYS[ref.sample_id], **returns})
    stats: dict[str, list[dict[str, float]]] = {name: [] for name in roles}
    for _ in range(2):
        for interfaces in (FORWARD, TRAIN):
            for name, interface in interfaces.items():  # one order on all workers
                if name in roles:
                    stats[name].append(call(roles[name], interface))
    return {name: (stats[name], *results(role)) for name, role in roles.items()}


def call(role, interface):
    """All sequences, dealt over the data ranks of the role's mesh."""
    ranks = role.groups.mesh.layout.data
    parts = [REFS[rank::ranks] for rank in range(ranks)]
    request = MfcRequest(interface, role.name, interface, 0, 0, [parts], {"lr": 1e-3})
    return find_handler(interface).run(role, request).stats


def results(role):
    key, ids = LEAVES[role.name], [ref.sample_id for ref in REFS]
    arrays = {sample_id: role.data.get(sample_id, key) for sample_id in ids if role.data.has(sample_id, key)}
    return arrays, {name: tensor.clone() for name, tensor in role.engine.export()}


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed optimizer"])
def test_overlapping_meshes_do_not_change_a_result(folders, distributed):
    """Each model computes the same as in a world without the other.

    Three workers, each holding a shard of two models with different layouts.
    """
    config = Config.model_validate(
        {"train": {"microbatch_tokens": 64, "distributed_optimizer": distributed, "ppo": {"critic": {"enabled": True}}}}
    )
    meshes = {
        "actor": Mesh(ParallelLayout(data=2), (0, 1)),
        "critic": Mesh(ParallelLayout(tensor=2), (1, 2)),
        "ref": Mesh(ParallelLayout(pipeline=2), (0, 2)),
    }

    def body(rank, device):
        return run_rounds(config, folders, rank, device)

    together = run_ranks(3, body, config, meshes=meshes)
    assert [sorted(roles) for roles in together] == [["actor", "ref"], ["actor", "critic"], ["critic", "ref"]]
    for name, mesh in meshes.items():
        [own_world] = run_ranks(1, body, config, meshes={name: Mesh(ParallelLayout(), (0,))})
        expected_stats, expected_arrays, expected_weights = own_world[name]
        heads = [together[worker][name] for worker in mesh.dp_heads()]
        for stats, *_ in heads:
            for seen, expected in zip(stats, expected_stats, strict=True):
                assert seen == pytest.approx(expected, rel=2e-4, abs=1e-5, nan_ok=True)
        arrays = {sample_id: array for _, held, _ in heads for sample_id, array in held.items()}
        assert arrays.keys() == expected_arrays.keys()
        for sample_id, array in expected_arrays.items():
            np.testing.assert_allclose(arrays[sample_id], array, atol=5e-5)
        weights = {key: tensor for worker in mesh.workers for key, tensor in together[worker][name][2].items()}
        assert weights.keys() == expected_weights.keys()
        for key, tensor in expected_weights.items():
            torch.testing.assert_close(weights[key], tensor, atol=5e-5, rtol=0.0)
