"""Tenants on ranks: what one of them computes does not depend on the others. Every request goes through the service."""

import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist

from realsys.algorithm.minibatches import sequence_refs
from realsys.config.allocation import ACTOR, parse_allocation
from realsys.config.dataflow import dataflow_of
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.model_calls import InitializeRequest, MfcRequest, ReadRequest
from realsys.train.checkpoint.checkpoint_files import index_file, rank_stem, read_index
from realsys.train.requests import (
    AddRowsRequest,
    ClientRows,
    FinishCheckpointRequest,
    LoadTenantRequest,
    SaveCheckpointRequest,
    StepTenantRequest,
    SwitchTenantRequest,
)
from realsys.train.worker.call_service import ModelWorkerService, WorkerParts
from realsys.train.worker.data_manager import DataManager
from realsys.weights.disk.writer import DiskWriter, ShardWriter
from tests.support.serving.hf_models import VOCAB, make_model
from tests.support.training.checkpoint_ranks import complete, everything
from tests.support.training.played_master import Message, PlayedMaster, own_share
from tests.support.training.train_ranks import FORMED, run_ranks

STEP = StepTenantRequest(ACTOR, 1e-2, 0.8, 0.9, 1e-4, 0.1, 0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("model")
    make_model(num_hidden_layers=2).save_pretrained(path)
    return path


def make_config(**settings):
    train = {"microbatch_tokens": 48, "lora": {"rank": 4}, "ppo": {"algorithm": "serve"}, **settings.pop("train", {})}
    return Config.model_validate({"seed": 7, **settings, "train": train})


class Rank:
    """A ModelWorker with the actor, and the requests of a master. Each rank holds all rows, as after a transfer."""

    def __init__(self, rank, device, config, model):
        self.config, self.rank = config, rank
        self._endpoint = PlayedMaster([], threading.Event())
        self.data = DataManager(rank)
        parts = WorkerParts(rank, FORMED, self._endpoint, self.data, device, DiskWriter(ShardWriter()))
        self._service = ModelWorkerService(config, TrialPaths.of(config), parts)
        self.ask("initialize", InitializeRequest(ACTOR, str(model), True))
        self.role = self._service._role(ACTOR)

    def ask(self, handler, payload):
        self._service.handle(Message(handler, payload))
        return self._endpoint.replies[-1]

    def switch(self, tenant, seed=0, drop=()):
        self.ask("switch_tenant", SwitchTenantRequest(ACTOR, tenant, seed, list(drop)))

    def forward_backward(self, rows, loss="importance_sampling", backward=True):
        """Returns the log-probs of this data rank by row, and the statistics; of the last stage."""
        samples = self.ask("add_rows", AddRowsRequest(rows)).samples
        assert [sample.sample_id for sample in samples] == list(rows.tokens)
        refs = sequence_refs([samples])
        data = FORMED[ACTOR].mesh.layout.data
        (call,) = dataflow_of(self.config).calls
        arguments = {"loss": loss, "config": {}, "backward": backward}
        request = MfcRequest(
            call.name, ACTOR, call.handler, 0, 0, [[refs[d::data] for d in range(data)]], arguments,
            [*call.pre_hooks], [*call.post_hooks],
        )  # fmt: skip
        reply = self.ask("mfc", own_share(request))
        found = {}
        if FORMED[ACTOR].last_stage:
            own = [ref.sample_id for ref in refs[FORMED[ACTOR].data_rank :: data]]
            read = self.ask("read", ReadRequest(own, ["prox_logprobs"]))
            found = {name: arrays[0] for name, arrays in zip(own, read.arrays, strict=True)}
        self.data.clear(rows.tokens)
        return found, {key: value for key, value in reply.stats.items() if key != "seconds"}

    def step(self, request=STEP):
        return self.ask("step_tenant", request)

    def save(self, folder):
        tmp = folder.with_suffix(".tmp")
        tmp.mkdir(parents=True, exist_ok=True)
        self.ask("save_checkpoint", SaveCheckpointRequest(ACTOR, 1, str(tmp)))
        self.ask("finish_checkpoint", FinishCheckpointRequest(ACTOR, 1))
        dist.barrier()
        if self.rank == 0:
            complete(tmp, FORMED[ACTOR].mesh.layout, 1)
        dist.barrier()

    def load(self, folder, optimizer=True):
        self.ask("load_tenant", LoadTenantRequest(ACTOR, str(folder), optimizer))

    def state(self):
        """Every number of the current tenant, and the weights that it computes with."""
        return {name: value for name, value in everything(self.role).items() if name != "rng"}

    def adapters(self):
        return {name: p for name, p in self.role.engine.module.named_parameters() if p.requires_grad}


def make_rows(key, count=5, prompt=3):
    """Rows of ``count`` completions of one prompt."""
    rng = np.random.default_rng(key)
    context = rng.integers(0, VOCAB, prompt)
    rows = ClientRows({}, {}, {}, {})
    for number in range(count):
        answer = int(rng.integers(2, 14))
        name = f"{key}/{number}"
        rows.tokens[name] = np.concatenate([context, rng.integers(0, VOCAB, answer)]).astype(np.int32).tobytes()
        rows.loss_mask[name] = (np.arange(prompt + answer) >= prompt).tobytes()
        rows.logprobs[name] = rng.uniform(-4.5, -3.5, answer).astype(np.float32).tobytes()
        rows.advantages[name] = rng.normal(0, 1, answer).astype(np.float32).tobytes()
    return rows


def run(text, config, body, model):
    """``body(Rank)`` on every rank of the layout ``text``."""
    layout = parse_allocation(f"sglang.d1+{text}").actor
    return run_ranks(layout.world_size, lambda r, d: body(Rank(r, d, config, model)), config, layout)


def same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]) if isinstance(value, torch.Tensor) else value == right[name], name


# ---- tenants beside each other


@dataclass(frozen=True)
class Program:
    """Calls of a tenant: b an own batch, f a forward pass only, s a step, w save, l load, n load without optimizer."""

    calls: str
    seed: int
    loss: str
    lr: float


PROGRAMS = {
    "a": Program("bbsbbsfbs", 1, "importance_sampling", 1e-2),
    "b": Program("bswbsblbs", 2, "cross_entropy", 3e-2),
    "c": Program("fbsbsbsf", 3, "ppo", 1e-3),
    "d": Program("bswbsnbsf", 3, "gspo", 2e-2),
}


def play(rank, names, folder):
    """Run the programs of the tenants in turn, call by call. Returns the results of each, and its state at the end."""
    found = {name: [] for name in names}
    for number in range(max(len(program.calls) for program in PROGRAMS.values())):
        for name in names:
            program = PROGRAMS[name]
            if number >= len(program.calls):
                continue
            call, checkpoint = program.calls[number], folder / name / "step-00000001"
            rank.switch(name, program.seed)
            if call in "bf":
                rows = make_rows([program.seed, number])
                found[name].append(rank.forward_backward(rows, program.loss, call == "b"))
            elif call == "s":
                request = StepTenantRequest(ACTOR, program.lr, 0.5 + program.seed / 10, 0.9, 1e-8, 0.1, 0.5)
                reply = rank.step(request)
                assert reply.applied
                found[name].append(reply.grad_norm)
            elif call == "w":
                rank.save(checkpoint)
            else:
                rank.load(checkpoint, optimizer=call == "l")
    states = {}
    for name in names:
        rank.switch(name)
        states[name] = rank.state()
    return found, states


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("d1", {}),
        ("d1", {"train": {"offload": "all"}}),
        ("d2", {}),
        ("d2", {"train": {"distributed_optimizer": True}}),
        ("d2", {"train": {"distributed_optimizer": True}, "model": {"dtype": "bfloat16"}}),
        ("p2m2", {"model": {"dtype": "bfloat16"}}),
    ],
)
def test_interleaved_tenants_are_bit_equal_to_each_alone(layout, settings, model, tmp_path):
    config = make_config(**settings)

    def body(rank):
        return play(rank, list(PROGRAMS), tmp_path / "all")

    together = run(layout, config, body, model)
    for name in PROGRAMS:
        alone = run(layout, config, lambda rank, own=name: play(rank, [own], tmp_path / "alone"), model)
        for (found, states), (own, own_states) in zip(together, alone, strict=True):
            assert found[name] == own[name]
            same(states[name], own_states[name])
    states = together[0][1]
    assert any(not torch.equal(states["c"][name], states["d"][name]) for name in states["c"] if "model/" in name)
