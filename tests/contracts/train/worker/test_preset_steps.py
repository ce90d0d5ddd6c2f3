"""Every published algorithm's settings take a train step of a real model. Objectives: unit/algorithm/test_presets.py.

The recorded log-probs are the model's own, so before the first update both ratios are 1 and nothing is clipped.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from realsys import configs
from realsys.config.compose import compose
from realsys.config.dataflow import TEACHER, TEACHER_LOGPROBS, TEACHER_TOKENS, dataflow_of
from realsys.config.schema import Config
from realsys.train.master.executor import CallResult
from realsys.train.master.step_statistics import train_record
from tests.support.run_logs import undocumented
from tests.support.training.ppo_batch import Worker, make_batch, make_models, save_models, whole
from tests.support.training.train_ranks import run_ranks

REFS, ARRAYS = make_batch()
Stats = dict[str, dict[str, float]]


def config_of(preset):
    return compose(["experiment=arith", f"algorithm={preset}", "generation.sampling.max_new_tokens=24"])


ALL = sorted(path.stem for path in (Path(configs.__file__).parent / "algorithm").glob("*.yaml"))
PRESETS = [
    preset for preset in ALL if dataflow_of(config_of(preset)).rows == "rollout"
]  # others: test_supervised_layouts


def of_teacher(count, k):
    """Its k most probable of k + 1 tokens, the same at each loss token."""
    logprobs = np.log(np.arange(1.0, k + 1) / np.arange(1.0, k + 2).sum())
    return {TEACHER_TOKENS: np.tile(np.arange(k), count), TEACHER_LOGPROBS: np.tile(logprobs, count)}


def step(rank, device, config, folders):
    """Call -> statistics; of one minibatch, so that the loss is that of the weights which sampled."""
    flow = dataflow_of(config)
    worker = Worker(rank, device, config, whole("d1", *flow.roles), folders)
    worker.fill(ARRAYS)
    if flow.source_keys >= TEACHER:
        worker.fill({ref.sample_id: of_teacher(ref.loss_tokens, config.train.ppo.top_k) for ref in REFS})
    worker.call("actor_inf", "actor", [REFS])
    for ref in REFS:
        sampled: dict[str, np.ndarray[tuple[int], np.dtype[np.float32]]] = {
            "behav_logprobs": worker.data.get(ref.sample_id, "prox_logprobs")
        }
        worker.fill({ref.sample_id: sampled})
    args = {"lr": 1e-3, "kl_coef": config.train.ppo.kl.coef}
    return {call.name: worker.call(call.handler, call.role, [REFS], **args).stats for call in flow.calls}


@pytest.fixture(scope="module")
def composed():
    return {preset: config_of(preset) for preset in PRESETS}


@pytest.fixture(scope="module")
def found(composed, tmp_path_factory):
    torch.set_num_threads(1)
    folders = save_models(make_models(), tmp_path_factory.mktemp("models"))

    def body(rank, device):
        return {preset: step(rank, device, config, folders) for preset, config in composed.items()}

    [by_preset] = run_ranks(1, body, Config())
    stats: dict[str, Stats] = by_preset
    return stats


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_takes_a_step(preset, composed, found):
    ppo = composed[preset].train.ppo
    for name, stats in found[preset].items():
        assert stats and all(math.isfinite(value) for value in stats.values()), (name, stats)
    assert ("ref_inf" in found[preset]) == (ppo.kl.coef > 0)
    assert ("critic_train" in found[preset]) == ppo.critic.enabled
    actor = found[preset]["actor_train"]
    assert (actor["u_mean"], actor["w_mean"]) == (pytest.approx(1.0, abs=1e-4), pytest.approx(1.0, abs=1e-4))
    assert (actor["clip_fraction"], actor["capped_fraction"], actor["optimizer_steps"]) == (0, 0, 1)
    assert actor["answer_tokens"] == sum(ref.loss_tokens for ref in REFS)
    assert actor["grad_norm"] > 0
    if ppo.kl.coef and ppo.kl.place == "loss":
        assert actor["kl_ref_mean"] > 0
    elif ppo.loss == "ppo" and ppo.aggregation == "token" and ppo.advantage.mean == "batch":
        # At ratio 1 the loss is minus the mean of the advantages, which is taken off.
        assert actor["loss"] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_statistic_is_documented(preset, found):
    results = {name: CallResult(stats, {}, 1.0, 0.0, 1.0, 0) for name, stats in found[preset].items()}
    seconds = {"inf": 1.0, "train": 1.0, "total": 2.0}
    record = train_record({"tokens": 1, "answer_tokens": 1}, seconds, results)
    assert undocumented([{"kind": "train", **record}]) == set()


def test_rewards_of_tokens_are_their_advantages(tmp_path):
    """Distillation from an endpoint: nothing else is added, nothing taken off, and none reaches another token."""
    folders = save_models({"actor": make_models()["actor"]}, tmp_path)
    config, refs = config_of("distill_endpoint"), [msgspec.structs.replace(ref, reward=0.0) for ref in REFS]
    rewards = {ref.sample_id: np.linspace(-2, 3, ref.loss_tokens, dtype=np.float32) for ref in refs}

    def body(rank, device):
        worker = Worker(rank, device, config, whole("d1", "actor"), folders)
        worker.fill(ARRAYS)
        worker.fill({name: {"token_rewards": values} for name, values in rewards.items()})
        worker.call("advantages", "actor", [refs])
        return {name: worker.data.get(name, "advantages") for name in rewards}

    [advantages] = run_ranks(1, body, config)
    for name, values in rewards.items():
        np.testing.assert_array_equal(advantages[name], values)
