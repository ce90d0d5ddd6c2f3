"""Waits of the host for the GPU, counted on the meta device: none in a micro-batch, whatever the loss reads."""

from typing import Any

import numpy as np
import pytest

from realsys.algorithm.loss import actor_loss
from realsys.config.allocation import ParallelLayout
from realsys.config.schema import Config
from realsys.model_calls import MfcRequest
from tests.support.gpu.meta_rank import count_call
from tests.support.serving.qwen_models import write_qwen
from tests.support.training.sample_records import make_mask, make_ref

LENGTH, PROMPT = 64, 8


def config_of(folder, train):
    train = {"microbatch_tokens": 2 * LENGTH, "head_chunk_tokens": 32, **train}
    return Config.model_validate({"model": {"dtype": "bfloat16", "path": str(folder)}, "train": train})


def call(handler, role, rows):
    """A call over two data ranks with ``rows`` rows each, two of which are an episode, and its arrays."""
    refs, samples = [], {}
    for number in range(rows):
        refs.append(make_ref(f"{number}/0", LENGTH, PROMPT, float(number % 2), group=number // 2))
        refs[-1].episode = number // 2
        refs[-1].last = number % 2 == 1
        refs[-1].episode_tokens = 2 * (LENGTH - PROMPT)
        tokens = np.arange(LENGTH, dtype=np.int32)
        answer = np.zeros(LENGTH - PROMPT, np.float32)
        arrays = dict.fromkeys(("behav_logprobs", "prox_logprobs", "ref_logprobs", "returns"), answer)
        arrays |= {"advantages": answer, "values": np.zeros(len(answer) + 1, np.float32)}
        samples[f"{number}/0"] = {"tokens": tokens, "loss_mask": make_mask(LENGTH, PROMPT), **arrays}
    args = {"lr": 1e-5, "kl_coef": 0.1}
    return MfcRequest(handler, role, handler, 0, 0, [[refs, refs]], args=args), samples


def waits(folder, handler, role, rows, layout, train) -> dict[str, int]:
    request, samples = call(handler, role, rows)
    return dict(count_call(folder, layout, config_of(folder, train), request, samples)[0].waits)


ACTOR: list[Any] = [
    pytest.param({}, ParallelLayout(2), id="decoupled"),
    pytest.param({"recompute": True, "sequence_parallel": True}, ParallelLayout(2, 1, 2), id="m2"),
    pytest.param({"ppo": {"loss": "gspo", "aggregation": "sequence"}}, ParallelLayout(2), id="gspo"),
    pytest.param({"ppo": {"kl": {"coef": 0.1}, "entropy_coef": 0.1}}, ParallelLayout(2), id="kl-entropy"),
    pytest.param({"distributed_optimizer": True}, ParallelLayout(2), id="distributed"),
    pytest.param({"lora": {"rank": 4}}, ParallelLayout(2), id="lora"),
]


@pytest.mark.parametrize(("train", "layout"), ACTOR)
def test_host_waits_for_no_micro_batch(train, layout, tmp_path):
    """Four micro-batches or two: as many waits, which are those of an optimizer step."""
    folder = write_qwen(tmp_path, "1.5B", num_hidden_layers=1)
    few, many = (waits(folder, "actor_train", "actor", rows, layout, train) for rows in (4, 8))
    assert few == many
    assert set(few) <= {"_local_scalar_dense", "copy to host", "copy to device"} and sum(few.values()) <= 6


@pytest.mark.parametrize(
    ("handler", "role"), [("critic_train", "critic"), ("sft", "actor"), ("dpo", "actor"), ("reward_model", "actor")]
)
def test_host_waits_for_no_micro_batch_of_others(handler, role, tmp_path):
    folder = write_qwen(tmp_path, "1.5B", num_hidden_layers=1)
    train = {"ppo": {"algorithm": handler if role == "actor" else "ppo"}}
    few, many = (waits(folder, handler, role, rows, ParallelLayout(2), train) for rows in (4, 8))
    assert few == many


def test_wait_of_a_loss_is_counted(tmp_path, monkeypatch):
    """Once per micro-batch: the counter sees what it is for."""

    def reads(theta, *args, **how):
        theta.sum().item()
        return actor_loss(theta, *args, **how)

    monkeypatch.setattr("realsys.train.worker.actor.actor_loss", reads)
    folder = write_qwen(tmp_path, "1.5B", num_hidden_layers=1)
    few, many = (waits(folder, "actor_train", "actor", rows, ParallelLayout(2), {}) for rows in (4, 8))
    assert many["_local_scalar_dense"] - few["_local_scalar_dense"] == 2
