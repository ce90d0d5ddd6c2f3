"""The effect of the train calls on one role: gradients, optimizer steps, weights."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from realsys.config.allocation import ParallelLayout
from realsys.config.schema import Config
from realsys.data.arith import make_tiny_model
from realsys.model_calls import MfcRequest
from realsys.train.megatron.train_engine import optimizer_tensors
from realsys.train.worker.call_handlers import find_handler
from realsys.train.worker.optimizer_steps import OptimizerSteps
from tests.support.training.sample_records import make_mask, make_ref
from tests.support.training.train_ranks import build_role, run_ranks

D1 = ParallelLayout()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny = {"hidden_size": 16, "head_dim": 4, "intermediate_size": 24}
    make_tiny_model(Config.model_validate({"model": {"tiny": tiny}}).model.tiny, directory, seed=1)
    return directory


def make_config(**changes):
    return Config.model_validate({"train": {"microbatch_tokens": 64, **changes}})


def make_batch(groups=4):
    """Two answers per prompt; those to the first prompt have equal rewards."""
    rng = np.random.default_rng(5)
    refs, arrays = [], {}
    for i in range(2 * groups):
        answer, name = int(rng.integers(2, 20)), f"t{i // 2}/{i % 2}"
        reward = 5.0 if i < 2 or i % 2 else -5.0
        refs.append(make_ref(name, 3 + answer, 3, reward, False, i // 2))
        arrays[name] = {
            "tokens": rng.integers(0, 40, 3 + answer),
            "loss_mask": make_mask(3 + answer, 3),
            "behav_logprobs": rng.uniform(-4, -3, answer),
        }
    return refs, arrays


def call(role, interface, minibatches, *, version=0, **args):
    """The call's statistics."""
    request = MfcRequest(interface, "actor", interface, 0, version, [[part] for part in minibatches], args=dict(args))
    return find_handler(interface).run(role, request).stats


def fill(role, arrays):
    for name, values in arrays.items():
        role.data.put(name, values)


def weights(role):
    return {name: tensor.clone() for name, tensor in role.engine.export()}


def test_loss_that_is_not_finite_skips_the_step_on_all_stages(model):
    """Only the last stage sees the loss. The gradients are finite, so their norm would not tell the others."""
    refs, arrays = make_batch()
    layout, config = ParallelLayout(pipeline=2), make_config()

    def body(rank, device):
        role = build_role(config, layout, rank, device, model)
        fill(role, arrays)
        role.engine.use_optimizer("train", role.settings.optimizer)
        steps = OptimizerSteps(role, 1e-3)

        def loss(batch, outputs):
            return outputs.logprobs.mean(), {"loss_sum": torch.tensor(math.nan), "tokens": torch.tensor(1.0)}

        steps.take([refs], role.microbatches([refs]), loss, 1.0)
        return steps.skipped, steps.taken

    assert run_ranks(2, body, config, layout) == [(1, 0), (1, 0)]


def test_skipping_zero_advantages_changes_no_gradient(model):
    refs, arrays = make_batch()
    group = {"mean": "group", "std": "group"}

    def body(rank, device):
        found: list[Any] = []
        for skip in (False, True):
            config = make_config(ppo={"skip_zero_advantage": skip, "advantage": group})
            role = build_role(config, D1, rank, device, model)
            fill(role, arrays)
            inference = call(role, "actor_inf", [refs])
            stats = call(role, "actor_train", [refs], lr=0.0)
            found.append((inference, stats, dict(role.engine.export("gradients"))))
        return found

    [[(all_inf, all_stats, all_grads), (some_inf, some_stats, some_grads)]] = run_ranks(1, body, make_config(), D1)
    skipped = sum(ref.loss_tokens for ref in refs[:2])
    assert all_inf["tokens"] - some_inf["tokens"] == all_stats["tokens"] - some_stats["tokens"] == skipped
    assert some_stats["answer_tokens"] == all_stats["answer_tokens"] == all_stats["tokens"]
    assert some_stats["loss"] == pytest.approx(all_stats["loss"], rel=1e-5)
    assert some_stats["grad_norm"] == pytest.approx(all_stats["grad_norm"], rel=1e-5)
    for name, grad in all_grads.items():
        torch.testing.assert_close(some_grads[name], grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("term", [{"entropy_coef": 0.5}, {"kl": {"coef": 0.5}}], ids=["entropy", "kl"])
def test_zero_advantages_keep_other_gradients(model, term):
    """An entropy bonus and a KL in the loss have a gradient where the advantage is 0: no sample may be skipped."""
    refs, arrays = make_batch()
    reference = {name: {"ref_logprobs": values["behav_logprobs"] - 0.5} for name, values in arrays.items()}

    def body(rank, device):
        results: list[Any] = []
        for skip in (False, True):
            advantage = {"mean": "group", "std": "group"}
            config = make_config(ppo={"skip_zero_advantage": skip, "advantage": advantage, **term})
            role = build_role(config, D1, rank, device, model)
            fill(role, arrays)
            fill(role, reference)
            call(role, "actor_inf", [refs])
            stats = call(role, "actor_train", [refs], lr=0.0, kl_coef=0.5)
            results.append((stats, dict(role.engine.export("gradients"))))
        return results

    [[(all_stats, all_grads), (some_stats, some_grads)]] = run_ranks(1, body, make_config(), D1)
    assert some_stats["tokens"] == all_stats["tokens"] == sum(ref.loss_tokens for ref in refs)
    assert some_stats["grad_norm"] == pytest.approx(all_stats["grad_norm"], rel=1e-6)
    for name, grad in all_grads.items():
        torch.testing.assert_close(some_grads[name], grad)


def test_batch_without_advantage_keeps_step_with_the_others(model):
    refs, arrays = make_batch(groups=1)
    config = make_config(ppo={"skip_zero_advantage": True, "advantage": {"mean": "group", "std": "group"}})

    def body(rank, device):
        role = build_role(config, ParallelLayout(data=2), rank, device, model)
        fill(role, arrays)
        both = MfcRequest("actor_train", "actor", "actor_train", 0, 0, [[refs[:1], refs[1:]]], args={"lr": 1e-3})
        return find_handler("actor_train").run(role, both).stats

    for stats in run_ranks(2, body, config, ParallelLayout(data=2)):
        assert (stats["tokens"], stats["grad_norm"], stats["loss"]) == (0.0, 0.0, 0.0)
        assert stats["answer_tokens"] == sum(ref.loss_tokens for ref in refs)


def test_zero_gradient_takes_no_step(model):
    """Momentum and weight decay move no weight, and the momentum itself does not decay."""
    refs, arrays = make_batch()
    group = {"mean": "group", "std": "group"}

    def body(rank, device):
        role = build_role(make_config(ppo={"advantage": group}), D1, rank, device, model)
        fill(role, {name: values | {"prox_logprobs": values["behav_logprobs"]} for name, values in arrays.items()})
        learned = call(role, "actor_train", [refs], lr=1e-3)
        before = weights(role), [x.clone() for x in optimizer_tensors(role.engine.optimizer)]
        idle = call(role, "actor_train", [refs[:2]], lr=1e-3)
        same = [torch.equal(tensor, before[0][name]) for name, tensor in weights(role).items()]
        same += [torch.equal(a, b) for a, b in zip(before[1], optimizer_tensors(role.engine.optimizer), strict=True)]
        return learned, idle, all(same)

    [(learned, idle, same)] = run_ranks(1, body, make_config(), D1)
    assert (learned["optimizer_steps"], learned["zero_gradient_steps"]) == (1, 0)
    assert (idle["optimizer_steps"], idle["zero_gradient_steps"], idle["skipped_steps"]) == (0, 1, 0)
    assert idle["grad_norm"] == 0.0 and same


def test_step_with_nan_is_skipped_and_counted(model):
    refs, arrays = make_batch()
    arrays[refs[1].sample_id]["behav_logprobs"][0] = math.nan

    def body(rank, device):
        role = build_role(make_config(), D1, rank, device, model)
        fill(role, {name: values | {"prox_logprobs": values["behav_logprobs"]} for name, values in arrays.items()})
        before = weights(role)
        bad = call(role, "actor_train", [refs[:2]], lr=1e-3)
        unchanged = all(torch.equal(tensor, before[name]) for name, tensor in weights(role).items())
        mixed = call(role, "actor_train", [refs[:2], refs[2:]], lr=1e-3)
        finite = all(bool(tensor.isfinite().all()) for tensor in weights(role).values())
        return bad, unchanged, mixed, finite

    [(bad, unchanged, mixed, finite)] = run_ranks(1, body, make_config(), D1)
    assert unchanged and finite
    assert (bad["skipped_steps"], bad["optimizer_steps"]) == (1, 0) and math.isnan(bad["loss"])
    assert (mixed["skipped_steps"], mixed["optimizer_steps"], mixed["skipped_steps_total"]) == (1, 1, 2)
    assert math.isfinite(mixed["loss"]) and mixed["answer_tokens"] == sum(ref.loss_tokens for ref in refs[2:])


def test_training_after_warm_up_starts_with_fresh_state(model):
    """The warm-up learns; its optimizer state is dropped."""
    refs, arrays = make_batch()

    def body(rank, device):
        optimizer = {"lr": 1e-3, "clip_grad": 0.0, "weight_decay": 0.0, "eps": 1e-12}
        config = make_config(optimizer=optimizer, ppo={"behav_imp_weight_cap": 0.0})
        role = build_role(config, D1, rank, device, model)
        fill(role, arrays)
        losses = [call(role, "sft", [refs], version=-1, lr=1e-2)["loss"] for _ in range(25)]
        before = weights(role)
        call(role, "actor_inf", [refs])
        call(role, "actor_train", [refs], lr=1e-3)
        moves = [(tensor - before[name]).abs().max().item() for name, tensor in weights(role).items()]
        return losses, max(moves)

    [(losses, move)] = run_ranks(1, body, make_config(), D1)
    assert losses[0] == pytest.approx(math.log(44), rel=0.3)
    assert losses[-1] < 0.8 * losses[0]
    # The first step of a fresh Adam moves every parameter by lr at most; momentum left over would add to it.
    assert move == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_warm_up_is_scored_at_temperature_one(model, temperature):
    """The demonstrations are not samples of the policy, so the sampling temperature is not theirs."""
    refs, arrays = make_batch()
    config = make_config()
    sampling = config.generation.sampling.model_copy(update={"temperature": temperature})
    config = config.model_copy(update={"generation": config.generation.model_copy(update={"sampling": sampling})})

    def body(rank, device):
        role = build_role(config, D1, rank, device, model)
        fill(role, arrays)
        tokens = {ref.sample_id: torch.as_tensor(arrays[ref.sample_id]["tokens"]) for ref in refs}
        nll = call(role, "sft", [refs], lr=0.0)["loss"]
        call(role, "actor_inf", [refs])
        scored = [role.data.get(name, "prox_logprobs") for name in tokens]
        return nll, -float(np.concatenate(scored).mean())

    [(nll, at_sampling)] = run_ranks(1, body, config, D1)
    assert (nll == pytest.approx(at_sampling, rel=1e-4)) == (temperature == 1.0)


def test_training_in_bfloat16_writes_bfloat16(model):
    refs, arrays = make_batch()
    config = Config.model_validate({"model": {"dtype": "bfloat16"}, "train": {"microbatch_tokens": 64}})

    def body(rank, device):
        role = build_role(config, ParallelLayout(tensor=2), rank, device, model)
        fill(role, arrays)
        call(role, "actor_inf", [refs])
        prox = role.data.get(refs[0].sample_id, "prox_logprobs")
        stats = call(role, "actor_train", [refs], lr=1e-2)
        return stats, prox, weights(role)

    found = run_ranks(2, body, config, ParallelLayout(tensor=2))
    stats, prox, exported = found[0]
    assert stats["optimizer_steps"] == 1 and stats["u_max"] == pytest.approx(1.0, abs=1e-6)
    assert prox.dtype == np.float32
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}


def test_a_tied_model_has_its_embedding_written_once(model, tmp_path):
    tied = tmp_path / "tied"
    tied.mkdir()
    settings = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tied / "config.json").write_text(json.dumps(settings))
    tensors = {k: v for k, v in load_file(model / "model.safetensors").items() if k != "lm_head.weight"}
    save_file(tensors, tied / "model.safetensors")
    layout = ParallelLayout(pipeline=2)

    def body(rank, device):
        return sorted(weights(build_role(make_config(), layout, rank, device, tied)))

    first, last = run_ranks(2, body, make_config(), layout)
    assert sorted(first + last) == sorted(tensors)
    assert "model.embed_tokens.weight" in first
