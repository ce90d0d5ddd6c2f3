"""Interfaces on real ranks: what must not depend on luck when numbers, sequences or minibatches are missing."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from realsys.config.dataflow import Dataflow, FunctionCall, dataflow_of
from realsys.config.doors import CALL_HANDLER, HOOK
from realsys.config.schema import Config
from realsys.errors import ConfigError, ModelError, NotFiniteError
from realsys.train.step_gate import SettleRequest, StepAbandoned, StepGate
from realsys.train.worker.call_handlers import CallOutcome, find_handler, find_hook
from realsys.train.worker.optimizer_steps import MAX_SKIPPED_STEPS
from tests.support.training.ppo_batch import Worker, make_batch, whole
from tests.support.training.train_ranks import run_ranks

REFS, ARRAYS = make_batch()


def make_config(**ppo):
    return Config.model_validate({"train": {"microbatch_tokens": 48, "ppo": ppo}})


def skip_more(worker, role, steps):
    """Let the role have skipped further optimizer steps in a row."""
    worker.roles[role].skipped_in_a_row += steps


def weights(worker, role):
    return {name: tensor.clone() for name, tensor in worker.roles[role].engine.export()}


@pytest.mark.parametrize("layout", ["d2", "p2"])
def test_nan_sample_skips_the_step_everywhere(folders, layout):
    """Every rank names the sample."""
    config, meshes = make_config(), whole(layout, "actor")
    bad = REFS[4].sample_id

    def body(rank, device):
        worker = Worker(rank, device, config, meshes, folders)
        worker.fill({name: own | {"prox_logprobs": own["behav_logprobs"]} for name, own in ARRAYS.items()})
        behav = ARRAYS[bad]["behav_logprobs"].copy()
        behav[3] = math.nan
        worker.data.put(bad, {"behav_logprobs": behav})
        before = weights(worker, "actor")
        first = worker.call("actor_train", "actor", [REFS], lr=1e-2).stats
        unchanged = all(torch.equal(tensor, before[name]) for name, tensor in weights(worker, "actor").items())
        skip_more(worker, "actor", MAX_SKIPPED_STEPS - 2)
        with pytest.raises(NotFiniteError) as caught:
            worker.call("actor_train", "actor", [REFS], lr=1e-2)
        return first, unchanged, caught.value.sample_ids, str(caught.value)

    for first, unchanged, named, message in run_ranks(2, body, config):
        assert (first["skipped_steps"], first["optimizer_steps"]) == (1, 0)
        assert math.isnan(first["loss"]) and unchanged
        assert named == [bad]
        assert message == (
            "actor: 5 optimizer steps in a row skipped because loss or gradient was not finite; "
            f"samples of the last one: {bad}"
        )


def test_taken_step_ends_a_row_of_skipped_ones(folders):
    config, meshes = make_config(), whole("d1", "actor")
    first, rest = REFS[:2], REFS[2:]

    def body(rank, device):
        worker = Worker(rank, device, config, meshes, folders)
        worker.fill({name: own | {"prox_logprobs": own["behav_logprobs"]} for name, own in ARRAYS.items()})
        worker.data.put(first[0].sample_id, {"prox_logprobs": np.full(first[0].loss_tokens, np.nan, np.float32)})
        skip_more(worker, "actor", MAX_SKIPPED_STEPS - 2)
        stats = worker.call("actor_train", "actor", [first, rest, first, rest], lr=1e-3).stats
        role = worker.roles["actor"]
        return stats, role.state_dict()

    [(stats, state)] = run_ranks(1, body, config)
    assert (stats["skipped_steps"], stats["skipped_steps_total"], stats["optimizer_steps"]) == (2, 2, 2)
    assert (state["skipped_steps"], state["skipped_in_a_row"]) == (2.0, 0.0)


def test_minibatch_without_a_suspect_is_named_whole(folders):
    """No sample stands out, so all of them are named.

    Weights that overflow make every log-prob NaN.
    """
    config, meshes = make_config(), whole("d1", "actor")

    def body(rank, device):
        worker = Worker(rank, device, config, meshes, folders)
        worker.fill({name: own | {"prox_logprobs": own["behav_logprobs"]} for name, own in ARRAYS.items()})
        with torch.no_grad():
            for parameter in worker.roles["actor"].engine.module.parameters():  # type: ignore[union-attr]
                parameter.mul_(math.inf)
        skip_more(worker, "actor", MAX_SKIPPED_STEPS - 1)
        with pytest.raises(NotFiniteError) as caught:
            worker.call("actor_train", "actor", [REFS[:3], REFS[3:]], lr=1e-3)
        return caught.value.sample_ids

    assert run_ranks(1, body, config) == [[ref.sample_id for ref in REFS[:3]]]


def test_nan_of_the_critic_stays_with_its_sample(folders):
    """Neither the batch's mean nor the running statistics carry it to the others."""
    config = make_config(critic={"enabled": True, "value_norm": "moving"})
    bad, rest = REFS[1], [ref for ref in REFS if ref is not REFS[1]]

    def body(rank, device):
        worker = Worker(rank, device, config, whole("d2", "actor", "critic"), folders)
        worker.fill(ARRAYS)
        worker.call("actor_inf", "actor", [REFS])
        worker.call("critic_inf", "critic", [REFS])
        if worker.data.has(bad.sample_id, "values"):
            values = worker.data.get(bad.sample_id, "values").copy()
            values[-2] = math.inf
            worker.data.put(bad.sample_id, {"values": values})
        worker.call("advantages", "actor", [REFS])
        worker.spread(REFS, "prox_logprobs", "values", "advantages", "returns")
        named = []
        for call, role in (("actor_train", "actor"), ("critic_train", "critic")):
            skip_more(worker, role, MAX_SKIPPED_STEPS - 1)
            with pytest.raises(NotFiniteError) as caught:
                worker.call(call, role, [REFS], lr=1e-3)
            named.append(caught.value.sample_ids)
        running = worker.roles["critic"].running_values
        untouched = (running.mean, running.std)
        stats = worker.call("actor_train", "actor", [rest], lr=1e-3).stats
        return named, untouched, stats["optimizer_steps"]

    for named, running, steps in run_ranks(2, body, config):
        assert named == [[bad.sample_id], [bad.sample_id]]
        assert running == (0.0, 1.0)
        assert steps == 1


def test_abandoned_critic_step_takes_its_returns_back(folders):
    """The step is trained again, and its returns must enter the running statistics once."""
    config = make_config(critic={"enabled": True, "value_norm": "moving"})

    def body(rank, device):
        worker = Worker(rank, device, config, whole("d1", "critic"), folders)
        worker.fill(ARRAYS)
        for ref in REFS:
            values = {
                "values": np.zeros(ref.loss_tokens + 1, np.float32),
                "returns": np.ones(ref.loss_tokens, np.float32),
            }
            worker.data.put(ref.sample_id, values)
        role = worker.roles["critic"]
        gate = role.engine.gate = StepGate()
        gate.settle(SettleRequest(abandon=True, limits={"critic_train": 1}))
        gate.begin(0, "critic_train")
        with pytest.raises(StepAbandoned):
            worker.call("critic_train", "critic", [REFS], lr=1e-3)
        return role.running_values.mean, role.running_values.std

    assert run_ranks(1, body, config) == [(0.0, 1.0)]


def test_a_role_keeps_its_state_over_a_checkpoint(folders):
    config = make_config(critic={"enabled": True, "value_norm": "exponential"})

    def body(rank, device):
        worker = Worker(rank, device, config, whole("d1", "critic"), folders)
        role = worker.roles["critic"]
        role.skipped_steps, role.skipped_in_a_row = 7, 2
        role.running_values.update(4, 8.0, 80.0)  # mean 2, variance 20 - 4
        state = role.state_dict()
        other = Worker(rank, device, config, whole("d1", "critic"), folders).roles["critic"]
        other.load_state_dict(state)
        return other.skipped_steps, other.skipped_in_a_row, other.running_values.mean, other.running_values.std

    [(total, in_a_row, mean, std)] = run_ranks(1, body, config)
    assert (total, in_a_row) == (7, 2)
    assert (mean, std) == (pytest.approx(2.0), pytest.approx(4.0))


@pytest.mark.parametrize("layout", ["d2", "p2"])
def test_early_stop_skips_the_rest_on_every_rank(folders, layout):
    config, meshes = make_config(early_stop_ratio=1.5), whole(layout, "actor")
    minibatches = [REFS[:3], REFS[3:6], REFS[6:]]

    def body(rank, device):
        worker = Worker(rank, device, config, meshes, folders)
        worker.fill(ARRAYS)
        worker.call("actor_inf", "actor", minibatches)
        for ref in minibatches[1]:  # u = e on every token of the second minibatch, but only the last stage knows
            if worker.data.has(ref.sample_id, "prox_logprobs"):
                worker.data.put(ref.sample_id, {"prox_logprobs": worker.data.get(ref.sample_id, "prox_logprobs") - 1})
        return worker.call("actor_train", "actor", minibatches, lr=1e-6).stats

    for stats in run_ranks(2, body, config):
        assert (stats["optimizer_steps"], stats["early_stopped"], stats["skipped_steps"]) == (1, 1, 0)
        assert stats["answer_tokens"] == sum(ref.loss_tokens for ref in minibatches[0])


@pytest.mark.parametrize("layout", ["d2", "p2"])
def test_reward_model_scores_the_last_token(folders, models, layout):
    config, meshes = make_config(), whole(layout, "reward")
    model: Any = models["reward"]
    expected = {}
    for ref in REFS:
        ids = torch.from_numpy(ARRAYS[ref.sample_id]["tokens"]).long()[None]
        expected[ref.sample_id] = model.score(model.model(ids).last_hidden_state[0, -1]).item()

    def body(rank, device):
        worker = Worker(rank, device, config, meshes, folders)
        worker.fill(ARRAYS)
        outcome = worker.call("reward_inf", "reward", [REFS])
        return outcome.stats, outcome.scores, worker.roles["reward"].groups.last_stage

    last = [(stats, scores) for stats, scores, is_last in run_ranks(2, body, config) if is_last]
    merged: dict[str, float] = {}
    for stats, scores in last:
        assert not merged.keys() & scores.keys()
        merged |= scores
        assert stats["score_mean"] == pytest.approx(np.mean([*expected.values()]), abs=1e-5)
        assert stats["score_std"] == pytest.approx(np.std([*expected.values()]), abs=1e-5)
    assert merged == pytest.approx(expected, abs=1e-5)


def everything_to_the_first(refs, data_ranks):
    return [list(refs), *([] for _ in range(data_ranks - 1))]


def test_data_rank_without_sequences_joins_every_call(folders):
    config = make_config(critic={"enabled": True, "value_norm": "moving"}, kl={"coef": 0.1, "place": "reward"})
    calls: list[tuple[str, str, dict[str, float]]] = [
        ("actor_inf", "actor", {}),
        ("ref_inf", "ref", {}),
        ("critic_inf", "critic", {}),
        ("reward_inf", "reward", {}),
        ("advantages", "actor", {"kl_coef": 0.1}),
        ("actor_train", "actor", {"lr": 0.0, "kl_coef": 0.1}),
        ("critic_train", "critic", {"lr": 0.0}),
        ("sft", "actor", {"lr": 0.0}),
    ]

    def body_of(layout):
        def body(rank, device):
            worker = Worker(rank, device, config, whole(layout, "actor", "ref", "critic", "reward"), folders)
            worker.fill(ARRAYS if rank == 0 else {})
            return [
                worker.call(interface, role, [REFS[:4], REFS[4:]], everything_to_the_first, **args).stats
                for interface, role, args in calls
            ]

        return body

    [alone] = run_ranks(1, body_of("d1"), config)
    for stats in run_ranks(2, body_of("d2"), config):
        for expected, found, (name, _, _) in zip(alone, stats, calls, strict=True):
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True), name


class CountsTokens:
    """A handler of the user: reads the request and the role's data, leaves statistics."""

    def run(self, role, request):
        own = role.own_sequences(request)
        return CallOutcome({"longest": float(max(len(role.data.get(ref.sample_id, "tokens")) for ref in own))})


def test_own_handler_runs_by_its_import_string(folders):
    config = make_config()

    def body(rank, device):
        worker = Worker(rank, device, config, whole("d1", "actor"), folders)
        worker.fill(ARRAYS)
        return worker.call(f"{__name__}:CountsTokens", "actor", [REFS[:2], REFS[2:]]).stats

    assert run_ranks(1, body, config) == [{"longest": float(max(ref.length for ref in REFS))}]


class ConstantAdvantages:
    def run(self, role, request):
        for ref in role.own_sequences(request):
            role.data.put(ref.sample_id, {"advantages": np.full(ref.loss_tokens, 0.5, np.float32)})
        return CallOutcome()


CONSTANT = f"{__name__}:ConstantAdvantages"


def constant(config):
    source, made = frozenset({"tokens", "behav_logprobs"}), frozenset({"advantages"})
    return Dataflow(
        [
            FunctionCall("scored", "actor", CONSTANT, source, made),
            FunctionCall("actor_train", "actor", "actor_train", source | made, trains=True),
        ]
    )


def test_training_reads_the_advantages_of_an_own_algorithm(folders):
    config = make_config(algorithm=f"{__name__}:constant", use_decoupled_loss=False, loss="reinforce")

    def body(rank, device):
        worker = Worker(rank, device, config, whole("d1", "actor"), folders)
        worker.fill(ARRAYS)
        worker.call(CONSTANT, "actor", [REFS])
        loss = worker.call("actor_train", "actor", [REFS], lr=0.0).stats["loss"]
        mean = worker.call("ref_inf", "actor", [REFS]).stats["ref_logprob_mean"]
        return loss + 0.5 * mean  # the loss is -A * theta

    assert run_ranks(1, body, config) == [pytest.approx(0.0, abs=1e-5)]


def test_every_builtin_handler_and_hook_exists():
    handlers = [find_handler(name) for name in CALL_HANDLER.builtin]
    assert len({type(handler) for handler in handlers}) == 11
    assert find_handler("sft") is find_handler("sft"), "one instance per process"
    assert [find_hook(name).__name__ for name in HOOK.builtin] == list(HOOK.builtin)


def test_unknown_handler_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        find_handler("critic_trian")
    assert str(caught.value) == (
        "config: dataflow='critic_trian': unknown call handler: use one of actor_inf, actor_train, advantages, "
        "critic_inf, critic_train, dpo, ref_inf, reward_inf, reward_model, sft, tenant_loss, or package.module:name"
    )


@pytest.mark.parametrize("mode", [True, "interpolated"])
@pytest.mark.parametrize("layout", ["d2", "p2"])
def test_step_without_an_inference_pass_equals_one_with_it(folders, layout, mode):
    """One minibatch: the training pass has the weights before the step. Interpolated: A-3PO on the same numbers."""
    with_pass, without = make_config(minibatches=2), make_config(minibatches=1, use_decoupled_loss=mode)
    assert [call.name for call in dataflow_of(without).calls] == ["actor_train"]
    meshes = whole(layout, "actor")
    ages = {ref.sample_id: (np.arange(ref.loss_tokens) % 4).astype(np.int32) for ref in REFS}

    def body(rank, device):
        ends = []
        for config in (with_pass, without):
            worker = Worker(rank, device, config, meshes, folders)
            worker.fill({name: own | {"versions": -ages[name]} for name, own in ARRAYS.items()})
            if config is with_pass:
                worker.call("actor_inf", "actor", [REFS])
                worker.spread(REFS, "prox_logprobs")
                for name, age in ages.items() if mode == "interpolated" else ():
                    behav, theta = ARRAYS[name]["behav_logprobs"], worker.data.get(name, "prox_logprobs")
                    prox = (behav / (1 + age) + theta * age / (1 + age)).astype(np.float32)
                    worker.data.put(name, {"prox_logprobs": prox})
            stats = worker.call("actor_train", "actor", [REFS], lr=1e-2).stats
            ends.append((stats, weights(worker, "actor")))
        return ends

    for (stored, before), (computed, after) in run_ranks(2, body, without):
        assert stored.keys() == computed.keys()
        for name, tensor in before.items():
            torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-5)
        if "w_mean" in stored:
            assert computed["w_mean"] == pytest.approx(stored["w_mean"], rel=1e-6)
            assert computed["u_mean"] == pytest.approx(stored["u_mean"], rel=1e-6)


def test_training_without_a_learning_rate_is_refused(folders):
    config = make_config()

    def body(rank, device):
        worker = Worker(rank, device, config, whole("d1", "actor"), folders)
        with pytest.raises(ModelError) as caught:
            worker.call("actor_train", "actor", [REFS])
        return str(caught.value)

    assert run_ranks(1, body, config) == ["call 'actor_train' has no argument 'lr': the master must send it"]
