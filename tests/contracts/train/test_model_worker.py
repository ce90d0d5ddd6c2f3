"""The request loop on real ranks; only the stream to the master is played."""

import math

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from realsys.algorithm.balance import model_flops
from realsys.cluster.topology import place, whole_mesh
from realsys.config.allocation import ParallelLayout, parse_allocation
from realsys.errors import ConfigError, ModelError
from realsys.manager.messages import DataPosition
from realsys.model_calls import (
    ClearRequest,
    Empty,
    InitializeRequest,
    MaskRequest,
    MfcReply,
    Transfer,
    TransferReply,
    TransferRequest,
)
from realsys.model_files.config_json import read_model
from realsys.train.checkpoint.checkpoint_files import CheckpointState, RoleState, rank_stem
from realsys.train.master.checkpoints import commit
from realsys.train.megatron.device import Device
from realsys.train.requests import (
    CopyWeightsRequest,
    FinishCheckpointRequest,
    LoadCheckpointRequest,
    SaveCheckpointRequest,
    SaveWeightsReply,
    SaveWeightsRequest,
)
from realsys.train.worker import call_service
from realsys.weights.disk.manifest import DiskPlan
from tests.support.training.played_master import REFS, PlayedWorker, Script, call, load, make_config
from tests.support.training.train_ranks import run_ranks

D1 = ParallelLayout()
IDS = [ref.sample_id for ref in REFS]


def test_the_loop_serves_what_the_master_asks_for(folders, tmp_path):
    layout = ParallelLayout(data=2, pipeline=2)
    mesh = whole_mesh(layout)
    parts = [REFS[:6], REFS[6:]]
    heads = mesh.dp_heads()
    moves = []
    for dp, part in enumerate(parts):  # the first head received all samples
        ids = [ref.sample_id for ref in part]
        for worker in mesh.dp_members(dp):
            keys = ["tokens", "loss_mask", "behav_logprobs"] if worker in heads else ["tokens", "loss_mask"]
            moves.append(Transfer(heads[0], [worker], ids, keys))
    script: Script = [
        load("actor", folders),
        ("transfer", TransferRequest(moves, REFS)),
        call("actor_inf", "actor", parts),
        call("actor_train", "actor", parts, lr=1e-3),
        ("copy_weights", CopyWeightsRequest("actor", 1)),
        ("save_weights", SaveWeightsRequest("actor", 1, DiskPlan(str(tmp_path)))),
        ("clear", ClearRequest(IDS)),
    ]

    def body(rank, device):
        worker = PlayedWorker(script, rank, device, make_config(), holders=[heads[0]])
        replies = worker.serve()
        assert worker.data.vocabulary == read_model(folders["actor"]).vocab
        return replies, len(worker.data)

    found = run_ranks(4, body, make_config(), layout)
    shards = []
    for rank, (replies, held) in enumerate(found):
        initialized, transferred, inference, training, _, saved, cleared = replies
        assert isinstance(initialized, Empty) and isinstance(cleared, Empty) and held == 0
        assert isinstance(transferred, TransferReply) and (transferred.received > 0) == (rank != heads[0])
        assert isinstance(inference, MfcReply) and isinstance(training, MfcReply)
        assert isinstance(saved, SaveWeightsReply)
        shards += saved.report
        if rank not in heads:
            assert not training.stats and not training.tokens
            continue
        assert training.tokens == sum(ref.length for ref in parts[heads.index(rank)])
        assert training.stats == found[heads[0]][0][3].stats
        assert training.stats["answer_tokens"] == sum(ref.loss_tokens for ref in REFS)
        assert math.isfinite(training.stats["loss"]) and training.stats["grad_norm"] > 0
        assert inference.stats["logprob_difference_max"] >= inference.stats["logprob_difference_mean"] > 0
    assert [shard.file for shard in shards] == [f"model-{i + 1:05d}-of-00004.safetensors" for i in range(4)]
    sizes, lengths = read_model(folders["actor"]).sizes, [ref.length for ref in REFS]
    for position, share, again in ((2, 1 / 3, 0.0), (3, 1, 1.0)):  # a forward pass; training, which makes logits again
        for count, twice in (("flops", (0.0, 0.0)), ("computed_flops", (0.0, again))):
            flops = share * model_flops(sizes, lengths, sum(ref.loss_tokens for ref in REFS), recomputed=twice)
            assert sum(replies[position].gpu[count] for replies, _ in found) == pytest.approx(flops)
    before = load_file(folders["actor"] / "model.safetensors")
    after = {name: tensor for shard in shards for name, tensor in load_file(tmp_path / shard.file).items()}
    assert after.keys() == before.keys()
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_seconds_of_a_call_contain_its_kernels(folders, monkeypatch):
    """The host is ahead of a GPU: here the kernels that it has queued take a thousand seconds of an injected clock."""

    def body(rank, device):
        clock = [0.0]
        monkeypatch.setattr(call_service.time, "perf_counter", lambda: clock[0])
        monkeypatch.setattr(call_service, "make_role", lambda *given, **how: make_role(*given[:-1], device, **how))
        worker = PlayedWorker([load("actor", folders), inference], rank, device, make_config(), holders=[0])
        worker._service._device = Device(torch.device("cuda", 0), "gloo")  # the one that the loop waits for
        torch.cuda.synchronize = lambda device: clock.__setitem__(0, 1000.0)
        return worker.serve()[1].seconds

    make_role, inference = call_service.make_role, call("actor_inf", "actor", [REFS])
    assert run_ranks(1, body, make_config(), D1) == [1000.0]


def test_masked_tokens_are_in_no_loss(folders):
    """Training counts the tokens that are left, and the log-probs of those are computed in their whole context."""
    layout = ParallelLayout(data=1)
    versions = {ref.sample_id: np.arange(ref.loss_tokens, dtype=np.int32) for ref in REFS}
    left = [
        msgspec.structs.replace(ref, loss_tokens=ref.loss_tokens - 2, episode_tokens=ref.loss_tokens - 2)
        for ref in REFS
        if ref.loss_tokens > 2
    ]
    ids = [ref.sample_id for ref in left]
    whole: Script = [load("actor", folders), call("actor_inf", "actor", [REFS])]
    script: Script = [
        load("actor", folders),
        ("mask", MaskRequest(ids, 2)),
        call("actor_inf", "actor", [left]),
        call("actor_train", "actor", [left], lr=1e-3),
    ]

    def body(rank, device):
        plain, masked = (PlayedWorker(work, rank, device, make_config(), holders=[0]) for work in (whole, script))
        for worker in (plain, masked):
            for name, array in versions.items():
                worker.data.put(name, {"versions": array})
        plain.serve()
        replies = masked.serve()
        return replies, {n: (plain.data.get(n, "prox_logprobs"), masked.data.get(n, "prox_logprobs")) for n in ids}

    [(replies, logprobs)] = run_ranks(1, body, make_config(), layout)
    training = replies[3].stats
    assert training["answer_tokens"] == sum(ref.loss_tokens for ref in left) and math.isfinite(training["loss"])
    for before, after in logprobs.values():
        assert np.allclose(before[2:], after, atol=1e-4)


def test_roles_get_data_from_outside_their_mesh(folders, tmp_path):
    """Each role runs on separate workers.

    actor d2 on workers 0, 1 has the samples; the others work on 2, 3, and the reference's answers go back.
    """
    roles = ["actor", "ref", "reward"]
    meshes = place(parse_allocation("sglang.d1+actor.d2+ref.m2,reward.p2"), roles)
    config = make_config()
    first, second = REFS[:5], REFS[5:]
    held_by = [(0, [ref.sample_id for ref in first]), (1, [ref.sample_id for ref in second])]
    there = [Transfer(source, [target], ids, ["tokens", "loss_mask"]) for source, ids in held_by for target in (2, 3)]
    back = [Transfer(2, [target], ids, ["ref_logprobs"]) for target, ids in held_by]
    same = {**folders, "ref": folders["actor"]}  # so that its log-probs must be the actor's
    transfer_there = ("transfer", TransferRequest(there, REFS))
    transfer_back = ("transfer", TransferRequest(back, REFS))
    actor: Script = [
        load("actor", same),
        transfer_there,
        call("actor_inf", "actor", [first, second]),
        transfer_back,
        ("clear", ClearRequest(IDS, ["behav_logprobs", "versions"])),
    ]
    others: Script = [
        load("ref", same, trainable=False),
        load("reward", same, trainable=False),
        transfer_there,
        call("ref_inf", "ref", [REFS]),
        call("reward_inf", "reward", [REFS]),
        transfer_back,
        ("copy_weights", CopyWeightsRequest("ref", 1)),
        ("save_weights", SaveWeightsRequest("ref", 1, DiskPlan(str(tmp_path)))),
    ]

    def body(rank, device):
        worker = PlayedWorker(actor if rank < 2 else others, rank, device, config, holders=[0, 1])
        replies = worker.serve()
        keys = ["tokens", "behav_logprobs", "prox_logprobs", "ref_logprobs"]
        held = {name: {key: worker.data.get(name, key) for key in keys if worker.data.has(name, key)} for name in IDS}
        return replies, held

    found = run_ranks(4, body, config, meshes=meshes)
    for worker, part in ((0, first), (1, second)):
        held = found[worker][1]
        for ref in part:
            arrays = held[ref.sample_id]
            assert arrays.keys() == {"tokens", "prox_logprobs", "ref_logprobs"}  # behav_logprobs: cleared
            np.testing.assert_allclose(arrays["ref_logprobs"], arrays["prox_logprobs"], atol=2e-5)
    ref_replies, reward_replies = ([found[worker][0][i] for worker in (2, 3)] for i in (3, 4))
    # The head of ref m2 is its first tensor rank, of reward p2 its last stage.
    tokens = sum(ref.length for ref in REFS)
    assert [reply.tokens for reply in ref_replies] == [tokens, 0]
    assert [reply.tokens for reply in reward_replies] == [0, tokens]
    assert ref_replies[0].stats and not ref_replies[1].stats and not ref_replies[0].scores
    assert not reward_replies[0].scores and reward_replies[1].scores.keys() == set(IDS)
    files = [shard.file for worker in (2, 3) for shard in found[worker][0][7].report]
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_training_resumes_bit_by_bit_from_a_checkpoint(folders, tmp_path):
    """Saved while the next step is taken; loaded by workers that start anew and take that step again."""
    layout, config = ParallelLayout(data=2), make_config(train={"ppo": {"use_decoupled_loss": False}})
    parts = [REFS[:5], REFS[5:]]
    tmp, went_on, resumed = tmp_path / "step-00000001.tmp", tmp_path / "went_on", tmp_path / "resumed"
    for directory in (tmp, went_on, resumed):
        directory.mkdir()

    def serve(*script):
        def body(rank, device):
            PlayedWorker([load("actor", folders), *script], rank, device, config, holders=[0, 1]).serve()

        run_ranks(2, body, config, layout)

    step = call("actor_train", "actor", parts, lr=1e-3)
    serve(
        step,
        ("save_checkpoint", SaveCheckpointRequest("actor", 1, str(tmp))),
        step,
        ("copy_weights", CopyWeightsRequest("actor", 2)),
        ("save_weights", SaveWeightsRequest("actor", 2, DiskPlan(str(went_on)))),
        ("finish_checkpoint", FinishCheckpointRequest("actor", 1)),
    )
    state = CheckpointState(
        1, 1, 1, 4, DataPosition(0, [], 10, 1), {"actor": RoleState({}, "adam", str(layout))}, {}, "", 0.0
    )
    checkpoint = commit(tmp, state, [rank_stem("actor", rank, 2) for rank in (0, 1)])
    serve(
        ("load_checkpoint", LoadCheckpointRequest("actor", str(checkpoint))),
        step,
        ("copy_weights", CopyWeightsRequest("actor", 2)),
        ("save_weights", SaveWeightsRequest("actor", 2, DiskPlan(str(resumed)))),
    )
    start = load_file(folders["actor"] / "model.safetensors")
    for file in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        expected, found = load_file(went_on / file), load_file(resumed / file)
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor)
            assert not torch.equal(start[name], tensor)


KNOWN_HANDLERS = (
    "actor_inf, actor_train, advantages, critic_inf, critic_train, dpo, ref_inf, reward_inf, reward_model, sft, "
    "tenant_loss"
)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (
            call("no_such", "actor", [[]]),
            f"ConfigError: config: dataflow='no_such': unknown call handler: use one of {KNOWN_HANDLERS},"
            " or package.module:name",
        ),
        (
            call("actor_inf", "actor", [[]], after=["no_such"]),
            "ConfigError: config: dataflow='no_such': unknown hook: use one of offload, onload, or package.module:name",
        ),
        (
            call("critic_inf", "critic", [[]]),
            "ModelError: model_worker/0 has no role 'critic' (it has actor): send 'initialize' first",
        ),
        (
            ("initialize", InitializeRequest("critic", "somewhere")),
            "ModelError: model_worker/0 is on no mesh of role 'critic': its roles are actor",
        ),
        (
            ("save_checkpoint", SaveCheckpointRequest("ref", 1, "somewhere")),
            "ModelError: model_worker/0 has no role 'ref' (it has actor): send 'initialize' first",
        ),
    ],
    ids=["handler", "hook", "role of a call", "role to load", "role to save"],
)
def test_error_gets_a_one_line_reply(folders, entry, expected):
    """The worker ends after it."""
    script: Script = [load("actor", folders), entry, ("clear", ClearRequest([]))]

    def body(rank, device):
        worker = PlayedWorker(script, rank, device, make_config())
        with pytest.raises((ConfigError, ModelError)):
            worker.serve()
        return worker.endpoint.errors, len(worker.endpoint.replies)

    [(errors, replies)] = run_ranks(1, body, make_config(), D1)
    assert errors == [expected]
    assert replies == 1  # initialize; requests after the error are not served
