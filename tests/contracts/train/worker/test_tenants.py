"""Tenants on ranks: what one of them computes does not depend on the others. Every request goes through the service."""

import json
import threading
from dataclasses import dataclass

import megatron.core.optimizer as megatron_optimizer
import numpy as np
import pytest
import torch
import torch.distributed as dist

from realsys.algorithm.minibatches import sequence_refs
from realsys.algorithm.prefix_tree import shared_beginnings
from realsys.config.allocation import ACTOR, parse_allocation
from realsys.config.dataflow import dataflow_of
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.model_calls import InitializeRequest, MfcRequest, ReadRequest
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
from realsys.types import SequenceRef
from realsys.weights.disk.writer import DiskWriter, ShardWriter
from tests.support.serving.hf_models import VOCAB, make_model
from tests.support.training.checkpoint_ranks import FusedAdam, complete, everything
from tests.support.training.played_master import Message, PlayedMaster, own_share
from tests.support.training.ppo_batch import Worker, whole
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


def make_rows(key, count=5, prompt=3, logprob=-4.0):
    """Rows of ``count`` completions of one prompt, whose log-probs were about ``logprob``."""
    rng = np.random.default_rng(key)
    context = rng.integers(0, VOCAB, prompt)
    rows = ClientRows({}, {}, {}, {})
    for number in range(count):
        answer = int(rng.integers(2, 14))
        name = f"{key}/{number}"
        rows.tokens[name] = np.concatenate([context, rng.integers(0, VOCAB, answer)]).astype(np.int32).tobytes()
        rows.loss_mask[name] = (np.arange(prompt + answer) >= prompt).tobytes()
        rows.logprobs[name] = rng.uniform(logprob - 0.5, logprob + 0.5, answer).astype(np.float32).tobytes()
        rows.advantages[name] = rng.normal(0, 1, answer).astype(np.float32).tobytes()
    return rows


def union_of(parts):
    fields = parts[0].__struct_fields__
    return ClientRows(*({n: x for part in parts for n, x in getattr(part, f).items()} for f in fields))


def run(text, config, body, model, fused=False):
    """``body(Rank)`` on every rank of the layout ``text``. ``fused``: Megatron finds a fused Adam."""
    layout = parse_allocation(f"sglang.d1+{text}").actor

    def on_rank(rank, device):
        if fused:  # in this forked process only
            vars(megatron_optimizer).update(Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False)
        return body(Rank(rank, device, config, model))

    return run_ranks(layout.world_size, on_rank, config, layout)


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
        ("d1", {"fused": True}),
        ("d2", {}),
        ("d2", {"train": {"distributed_optimizer": True}}),
        ("d2", {"train": {"distributed_optimizer": True}, "model": {"dtype": "bfloat16"}}),
        ("p2m2", {"model": {"dtype": "bfloat16"}}),
    ],
)
def test_interleaved_tenants_are_bit_equal_to_each_alone(layout, settings, model, tmp_path):
    fused = settings.get("fused", False)
    config = make_config(**{name: value for name, value in settings.items() if name != "fused"})

    def body(rank):
        return play(rank, list(PROGRAMS), tmp_path / "all")

    together = run(layout, config, body, model, fused)
    for name in PROGRAMS:
        alone = run(layout, config, lambda rank, own=name: play(rank, [own], tmp_path / "alone"), model, fused)
        for (found, states), (own, own_states) in zip(together, alone, strict=True):
            assert found[name] == own[name]
            same(states[name], own_states[name])
    states = together[0][1]
    assert any(not torch.equal(states["c"][name], states["d"][name]) for name in states["c"] if "model/" in name)


# ---- one tenant


def test_step_is_that_of_adamw_with_the_sum_of_gradients(model):
    """Two steps with other settings each: weight decay of all adapters, and a bound on the norm in the second."""

    def body(rank):
        rank.switch("a", 1)
        adapters = rank.adapters()
        expected = {name: p.detach().clone() for name, p in adapters.items()}
        adam = torch.optim.AdamW(expected.values(), fused=True)
        for number, (lr, beta1, beta2, eps, decay, bound) in enumerate(
            [(1e-2, 0.9, 0.95, 1e-12, 0.0, 0.0), (3e-2, 0.5, 0.8, 1e-3, 0.3, 0.1)]
        ):
            for value in expected.values():
                value.grad = torch.zeros_like(value)
            for call in range(2):
                rank.forward_backward(make_rows([number, call]))
                for name, value in expected.items():
                    value.grad += adapters[name].main_grad
            gradients = [value.grad for value in expected.values()]
            norm = sum(float(g.double().square().sum()) for g in gradients) ** 0.5
            if bound:
                for gradient in gradients:
                    gradient *= bound / norm
            adam.param_groups[0].update(lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)
            adam.step()
            reply = rank.step(StepTenantRequest(ACTOR, lr, beta1, beta2, eps, decay, bound))
            assert reply.applied and reply.grad_norm == pytest.approx(norm, rel=1e-5)
            for name, value in expected.items():
                torch.testing.assert_close(adapters[name].detach(), value, msg=lambda m, n=name: f"{n}: {m}")

    run("d1", make_config(), body, model)


@pytest.mark.parametrize("distributed", [False, True])
def test_several_calls_are_one_call_with_all_rows(distributed, model):
    parts = [make_rows([9, call]) for call in range(3)]
    union = union_of(parts)

    def body(rank):
        norms, found = [], []
        for tenant, calls in {"several": parts, "one": [union]}.items():
            rank.switch(tenant, 1)
            for _ in range(2):
                for rows in calls:
                    rank.forward_backward(rows)
                norms.append(rank.step().grad_norm)
            found.append({name: p.detach().clone() for name, p in rank.adapters().items()})
        assert norms[:2] == pytest.approx(norms[2:], rel=1e-5)
        for name, value in found[0].items():
            torch.testing.assert_close(found[1][name], value, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")

    run("d2", make_config(train={"distributed_optimizer": distributed}), body, model)


def test_layouts_train_the_same_tenant(model):
    """Also the adapter that it begins with."""

    def body(rank):
        found, norms = [], []
        for seed in (1, 2):
            rank.switch(f"tenant {seed}", seed)
            for number in range(3):
                logprobs, stats = rank.forward_backward(make_rows([seed, number]))
                found.append((logprobs, stats.get("loss_sum")))
                norms.append(rank.step().grad_norm)
        return found, norms

    expected, norms = run("d1", make_config(), body, model)[0]
    for layout in ("d2", "p2", "m2", "d2p2m2"):
        for found, own_norms in run(layout, make_config(), body, model):
            assert own_norms == pytest.approx(norms, rel=1e-3)
            for (logprobs, loss), (wanted, wanted_loss) in zip(found, expected, strict=True):
                assert logprobs == {name: pytest.approx(wanted[name], abs=1e-3) for name in logprobs}
                assert loss in (None, pytest.approx(wanted_loss, rel=1e-3, abs=1e-2))
    assert norms[0] != norms[3]


def with_advantages(rows, value):
    advantages = {n: np.full(len(x) // 4, value, np.float32).tobytes() for n, x in rows.advantages.items()}
    return ClientRows(rows.tokens, rows.loss_mask, rows.logprobs, advantages)


@pytest.mark.parametrize("value", [None, 0.0, float("nan")])
def test_step_without_a_usable_gradient_changes_nothing(value, model):
    """No gradient, a gradient of zero, one that is not finite; and the next step does not have it."""

    def body(rank):
        rank.switch("a", 1)
        rank.forward_backward(make_rows([1]))
        rank.step()
        before = rank.state()
        if value is not None:
            rank.forward_backward(with_advantages(make_rows([2]), value))
        reply = rank.step()
        assert not reply.applied
        same(before, rank.state())
        assert rank.role.gradients is None
        rank.forward_backward(make_rows([3]))
        assert rank.step().applied

    run("d2", make_config(train={"distributed_optimizer": True}), body, model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_and_dropped_tenants_start_anew(dtype, model):
    def body(rank):
        own = {name: p.detach().clone() for name, p in rank.adapters().items()}
        rank.switch("a", seed=7)  # that of the configuration
        fresh = rank.state()
        same(own, {name: p.detach().clone() for name, p in rank.adapters().items()})
        for drop in ({"a"}, set(), {"a", "b"}):
            rank.forward_backward(make_rows([1]))
            assert rank.step().applied
            rank.forward_backward(make_rows([2]))
            rank.switch("b" if drop == set() else "a", seed=7, drop=drop)
            assert rank.role.gradients is None
            same(fresh, rank.state())
        rank.switch("c", seed=8)
        assert any(not torch.equal(value, own[name]) for name, value in rank.adapters().items())

    run("d1", make_config(model={"dtype": dtype}), body, model)


def test_checkpoint_of_a_tenant_moves_to_another_layout(model, tmp_path):
    """It has adapters and their optimizer state only, and a load leaves the random generators alone."""

    def write(rank):
        rank.switch("a", 1)
        for number in range(2):
            rank.forward_backward(make_rows([number]))
            rank.step()
        rank.save(tmp_path / "step-00000001")
        rank.forward_backward(make_rows([5]))
        return rank.step().grad_norm, rank.forward_backward(make_rows([6]), backward=False)[0]

    def read(rank):
        rank.switch("other", 3)
        rank.forward_backward(make_rows([8]))
        rank.load(tmp_path / "step-00000001")
        torch.rand(3)
        state = torch.get_rng_state()
        rank.load(tmp_path / "step-00000001")
        assert torch.equal(torch.get_rng_state(), state) and rank.role.gradients is None
        rank.forward_backward(make_rows([5]))
        return rank.step().grad_norm, rank.forward_backward(make_rows([6]), backward=False)[0]

    written = run("d2", make_config(train={"distributed_optimizer": True}), write, model)
    texts = [json.loads(path.read_text()) for path in (tmp_path / "step-00000001").glob("*.json")]
    names = {piece["name"] for text in texts for piece in text.get("pieces", ()) if piece["kind"] == "param"}
    assert names and all(".adapter." in name for name in names)
    expected = {name: values for _, part in written for name, values in part.items()}
    for norm, logprobs in run("m2", make_config(), read, model):
        assert norm == pytest.approx(written[0][0], rel=1e-4)
        assert logprobs == {name: pytest.approx(values, abs=1e-4) for name, values in expected.items()}


# ---- a tenant beside `realsys run`

SIGNALS = [(1, 0, 0, 1), (0, 0, 0, 0), (0, 1, 0, 0), (1, 1, 1, 0)]  # rewards of the groups of a batch


def as_a_run(rows):
    """Return references and arrays of a batch of ``realsys run``: groups of four rows of ``make_rows``."""
    refs, arrays = [], {}
    shared = shared_beginnings([np.frombuffer(tokens, np.int32) for tokens in rows.tokens.values()])
    for number, name in enumerate(rows.tokens):
        mask, tokens = np.frombuffer(rows.loss_mask[name], bool), np.frombuffer(rows.tokens[name], np.int32)
        group, reward, size = number // 4, float(SIGNALS[number // 4][number % 4]), int(mask.sum())
        refs.append(SequenceRef(name, len(mask), size, reward, False, group, number, size, shared=shared[number]))
        logprobs = np.frombuffer(rows.logprobs[name], np.float32)
        arrays[name] = {"tokens": tokens, "loss_mask": mask, "behav_logprobs": logprobs}
    return refs, arrays


def as_of_a_client(rows):
    """Return the rows that a loop sends: advantages without the mean of the group, and no group without a signal."""
    kept = ClientRows({}, {}, {}, {})
    for number, name in enumerate(rows.tokens):
        group = SIGNALS[number // 4]
        if len(set(group)) > 1:
            advantage = np.full(len(rows.logprobs[name]) // 4, group[number % 4] - np.mean(group), np.float32)
            kept.advantages[name] = advantage.tobytes()
            for field in ("tokens", "loss_mask", "logprobs"):
                getattr(kept, field)[name] = getattr(rows, field)[name]
    return kept


def test_tenant_takes_the_steps_of_a_run(model):
    """With the settings of benchmarks.cookbook. The run divides its loss by 16 rows of 16 tokens; Adam does not."""
    batches = [union_of([make_rows([40, step, group], 4, logprob=-1.0) for group in range(4)]) for step in range(3)]
    optimizer = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8 / 256, "weight_decay": 0.0, "clip_grad": 0.0}
    ppo = {"minibatches": 1, "use_decoupled_loss": False, "eps_clip": 1.0, "eps_clip_higher": 10.0}
    ppo |= {"aggregation": "constant", "advantage": {"mean": "group", "std": "none"}, "skip_zero_advantage": True}
    train = {"microbatch_tokens": 48, "lora": {"rank": 4}, "optimizer": optimizer, "ppo": ppo}
    run_config = Config.model_validate({"seed": 7, "generation": {"sampling": {"max_new_tokens": 16}}, "train": train})

    def by_run(rank, device):
        worker = Worker(rank, device, run_config, whole("d1", ACTOR), {ACTOR: model})
        for rows in batches:
            refs, arrays = as_a_run(rows)
            worker.fill(arrays)
            assert worker.call("actor_train", ACTOR, [refs], lr=1e-3).stats["optimizer_steps"] == 1
        module = worker.roles[ACTOR].engine.module
        return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}

    def by_tenant(rank):
        rank.switch("a", run_config.seed)
        for rows in batches:
            rank.forward_backward(as_of_a_client(rows))
            rank.step(StepTenantRequest(ACTOR, 1e-3, 0.9, 0.95, 1e-8, 0.0, 0.0))
        return {name: p.detach().clone() for name, p in rank.adapters().items()}

    (expected,) = run_ranks(1, by_run, run_config)
    (found,) = run("d1", make_config(), by_tenant, model)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], atol=1e-7, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert all(value.count_nonzero() for value in found.values())
