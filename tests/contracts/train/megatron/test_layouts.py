"""Every parallel layout computes what one process with transformers and plain torch computes.

Compared are log-probs, loss, gradients and their norm, not parameters: Adam turns near-zero gradients into steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from realsys.algorithm.prefix_tree import row_tree, shared_beginnings
from realsys.config.allocation import ParallelLayout, parse_allocation
from realsys.config.schema import Config
from realsys.model_calls import MfcRequest
from realsys.train.worker.call_handlers import find_handler
from realsys.types import SequenceRef
from tests.support.serving.hf_models import VOCAB, make_model, weights_of
from tests.support.training.train_ranks import build_role, cat_exports, coordinates, run_ranks

TEMPERATURE = 0.7


@dataclass
class Reference:
    """A model directory, and what transformers and torch make of the batch."""

    path: Path
    weights: dict[str, torch.Tensor]
    logprobs: dict[str, np.ndarray[Any, Any]]
    gradients: dict[str, torch.Tensor]
    loss: float
    grad_norm: float
    entropy: float


@dataclass
class Found:
    """Report of one rank."""

    prox: dict[str, np.ndarray[Any, Any]]
    stats: dict[str, float]
    exported: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


#: rows that share an episode with the row before them
SECOND_ROWS = (5, 9)


def batch():
    """Eleven rows of nine episodes at three prompts, of very different length: no layout divides them evenly.

    Every third row has two turns, with feedback between them and behind the last. Rows of a prompt begin alike, some
    of them for longer than others, so they are packed as trees.
    """
    rng = np.random.default_rng(3)
    refs, arrays, episode = [], {}, -1
    for i in range(11):
        prompt, answer = int(rng.integers(1, 9)), int(rng.integers(1, 6)) * int(rng.integers(1, 8))
        runs = [prompt, answer] if i % 3 else [prompt, answer, 3, 2, 1]
        episode += i not in SECOND_ROWS
        name, length, loss_tokens = f"t{i // 4}/{i % 4}", sum(runs), sum(runs[1::2])
        reward = refs[-1].reward if i in SECOND_ROWS else float(rng.choice([5.0, -5.0]))
        tokens = rng.integers(0, VOCAB, length).astype(np.int32)
        if i % 4:
            before = arrays[refs[-1].sample_id]["tokens"]
            alike = 3 * min(length, len(before)) // 4
            tokens[:alike] = before[:alike]
        refs.append(SequenceRef(name, length, loss_tokens, reward, i == 3, i // 4, episode, loss_tokens))
        arrays[name] = {
            "tokens": tokens,
            "loss_mask": np.repeat(np.arange(len(runs)) % 2 == 1, runs),
            "behav_logprobs": rng.uniform(-4, -3, loss_tokens).astype(np.float32),
        }
    for i in SECOND_ROWS:
        whole = refs[i - 1].loss_tokens + refs[i].loss_tokens
        refs[i - 1] = replace(refs[i - 1], episode_tokens=whole, last=False)
        refs[i] = replace(refs[i], episode_tokens=whole)
    for first in (0, 4, 8):
        own = refs[first : first + 4]
        found = shared_beginnings([arrays[ref.sample_id]["tokens"] for ref in own])
        refs[first : first + 4] = [replace(ref, shared=shared) for ref, shared in zip(own, found, strict=True)]
    return refs, arrays


REFS, ARRAYS = batch()


def test_rows_of_a_prompt_are_packed_as_a_tree():
    assert row_tree(REFS).tokens < 0.8 * sum(ref.length for ref in REFS)
    assert max(len(segment.parents) for segment in row_tree(REFS).segments) > 1


def make_config(**train):
    return Config.model_validate(
        {
            "generation": {"sampling": {"temperature": TEMPERATURE}},
            "train": {
                "microbatch_tokens": 80,
                "optimizer": {"clip_grad": 1e9},
                "ppo": {"minibatches": 2, "c_clip": 3.0, "behav_imp_weight_cap": 0.0},
                **train,
            },
        }
    )


def reference(model, path):
    """The same step in one process: sequence by sequence, the loss as the paper has it."""
    model.save_pretrained(path)
    weights = weights_of(model)
    # The paper's: rewards normalised over all answer tokens.
    rewards = np.repeat([ref.reward for ref in REFS], [ref.loss_tokens for ref in REFS])
    tokens = len(rewards)
    logprobs: dict[str, np.ndarray[Any, Any]] = {}
    total, entropies = torch.zeros(()), 0.0
    for ref in REFS:
        ids = torch.from_numpy(ARRAYS[ref.sample_id]["tokens"]).long()
        at = torch.from_numpy(np.flatnonzero(ARRAYS[ref.sample_id]["loss_mask"]))
        every = (model(ids[None]).logits[0, at - 1] / TEMPERATURE).log_softmax(-1)
        theta = every.gather(1, ids[at, None])[:, 0]
        entropies -= (every.exp() * every).sum().item()
        logprobs[ref.sample_id] = theta.detach().numpy().copy()
        prox, behav = theta.detach(), torch.from_numpy(ARRAYS[ref.sample_id]["behav_logprobs"])
        u, w, advantage = (theta - prox).exp(), (prox - behav).exp(), (ref.reward - rewards.mean()) / rewards.std()
        term = torch.minimum(u * advantage, u.clamp(0.8, 1.2) * advantage)
        total = total - (w * term).sum()
    loss = total / tokens
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    return Reference(path, weights, logprobs, gradients, loss.item(), norm, entropies / tokens)


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    torch.set_num_threads(1)
    models = {"qwen2-tied": make_model("qwen2", tied=True)}
    models |= {f"{family}-untied": make_model(family) for family in ("qwen2", "qwen3", "llama")}
    models |= {f"odd-{name}": make_model(vocab_size=VOCAB + 1, tied=name == "tied") for name in ("tied", "untied")}
    return {name: reference(model, tmp_path_factory.mktemp(name)) for name, model in models.items()}


def deal(layout):
    """Unevenly: data rank 0 gets most."""
    parts: list[list[SequenceRef]] = [[] for _ in range(layout.data)]
    for i, ref in enumerate(REFS):
        parts[min(i // 8, layout.data - 1)].append(ref)
    return parts


def one_rank(rank, device, path, config, layout):
    """actor_inf, then actor_train on one minibatch, as the service would call them."""
    role = build_role(config, layout, rank, device, path)
    exported = {name: tensor.clone() for name, tensor in role.engine.export()}
    parts = deal(layout)
    for ref in parts[coordinates(layout, rank)[0]]:
        role.data.put(ref.sample_id, ARRAYS[ref.sample_id])
    find_handler("actor_inf").run(role, MfcRequest("actor_inf", "actor", "actor_inf", 0, 0, [parts]))
    prox = {}
    if role.engine.groups.last_stage:
        own = parts[role.engine.groups.data_rank]
        prox = {ref.sample_id: role.data.get(ref.sample_id, "prox_logprobs") for ref in own}
    request = MfcRequest("actor_train", "actor", "actor_train", 0, 0, [parts], args={"lr": 0.0})
    stats = find_handler("actor_train").run(role, request).stats
    gradients = {name: tensor.clone() for name, tensor in role.engine.export("gradients")}
    return Found(prox, stats, exported, gradients)


def check(found, expected, layout):
    exported = cat_exports([f.exported for f in found])
    assert exported.keys() == expected.weights.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in expected.weights.items())
    heads = [r for r in range(layout.world_size) if coordinates(layout, r)[1:] == (0, layout.pipeline - 1)]
    last = [f for rank, f in enumerate(found) if coordinates(layout, rank)[2] == layout.pipeline - 1]
    for name, logprobs in expected.logprobs.items():
        holders = [f.prox[name] for f in last if name in f.prox]
        assert len(holders) == layout.tensor
        for values in holders:
            np.testing.assert_allclose(values, logprobs, atol=5e-6)
    gradients = cat_exports([f.gradients for f in found])
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(gradients[name], gradient, atol=2e-6, rtol=2e-4, msg=lambda m, n=name: f"{n}: {m}")
    for head in heads:
        stats = found[head].stats
        assert stats["loss"] == pytest.approx(expected.loss, abs=2e-6)
        assert stats["grad_norm"] == pytest.approx(expected.grad_norm, rel=2e-5)
        assert stats["entropy_mean"] == pytest.approx(expected.entropy, rel=1e-5)
        assert stats["u_max"] == pytest.approx(1.0, abs=1e-5)
        assert stats["skipped_steps"] == 0


def layout_cases():
    qwen2 = ["qwen2-tied", "qwen2-untied"]
    everything = [*qwen2, "qwen3-untied", "llama-untied"]
    yield pytest.param("d1p1m1", {}, everything, id="d1p1m1")
    yield pytest.param("d2", {}, qwen2, id="d2")
    yield pytest.param("m2", {}, qwen2, id="m2")
    yield pytest.param("m2", {"sequence_parallel": True}, [*qwen2, "qwen3-untied"], id="m2-sp")
    yield pytest.param("p2", {}, qwen2, id="p2")
    # Two ranks share a key-value head.
    yield pytest.param("m4", {}, ["qwen2-tied", "qwen3-untied"], id="m4")
    yield pytest.param("m4", {"sequence_parallel": True, "recompute": True}, ["qwen3-untied"], id="m4-sp-recompute")
    odd = ["odd-tied", "odd-untied"]  # the vocabulary is padded
    yield pytest.param("m2", {"head_chunk_tokens": 7}, odd, id="m2-odd")
    yield pytest.param("d2p2m2", {"sequence_parallel": True}, odd, id="d2p2m2-sp-odd")
    yield pytest.param("p3", {}, qwen2, id="p3-uneven")  # 2, 1 and 1 of 4 layers
    yield pytest.param("p2m2", {}, everything, id="p2m2")
    yield pytest.param("d2p2m2", {"sequence_parallel": True}, qwen2, id="d2p2m2-sp")
    yield pytest.param("p2m2", {"recompute": True}, ["qwen2-tied"], id="p2m2-recompute")
    for layers in (1, 2, 3):  # of the four; of two on a stage
        yield pytest.param("d1p1m1", {"recompute": layers}, ["qwen2-tied"], id=f"d1-recompute-{layers}")
    yield pytest.param("p2m2", {"recompute": 1, "sequence_parallel": True}, qwen2, id="p2m2-sp-recompute-1")
    yield pytest.param("p3", {"recompute": 1}, ["qwen2-tied"], id="p3-recompute-1")  # all of the stages with one layer
    yield pytest.param("p2m2", {"head_chunk_tokens": 7, "sequence_parallel": True}, qwen2, id="p2m2-sp-chunks")


@pytest.mark.parametrize(("text", "train", "models"), layout_cases())
def test_a_layout_agrees_with_transformers(text, train, models, references):
    layout = parse_allocation(f"sglang.d1+{text}").actor
    config = make_config(**train)

    def body(rank, device):
        return [one_rank(rank, device, references[model].path, config, layout) for model in models]

    found = run_ranks(layout.world_size, body, config, layout)
    for i, model in enumerate(models):
        check([per_rank[i] for per_rank in found], references[model], layout)


def test_the_distributed_optimizer_steps_like_the_plain_one(references):
    layout = ParallelLayout(data=2)
    path = references["qwen2-untied"].path

    def stepped(distributed):
        config = make_config(distributed_optimizer=distributed, optimizer={"eps": 1.0, "clip_grad": 0.5})

        def body(rank, device):
            role = build_role(config, layout, rank, device, path)
            parts = deal(layout)
            for ref in parts[rank]:
                role.data.put(
                    ref.sample_id, ARRAYS[ref.sample_id] | {"prox_logprobs": ARRAYS[ref.sample_id]["behav_logprobs"]}
                )
            request = MfcRequest("actor_train", "actor", "actor_train", 0, 0, [parts], args={"lr": 1.0})
            stats = find_handler("actor_train").run(role, request).stats
            return {name: tensor.clone() for name, tensor in role.engine.export()}, stats["grad_norm"]

        found = run_ranks(2, body, config, layout)
        return cat_exports([tensors for tensors, _ in found]), found[0][1]

    (plain, plain_norm), (sharded, sharded_norm) = stepped(False), stepped(True)
    assert sharded_norm == pytest.approx(plain_norm, rel=1e-5)
    before = references["qwen2-untied"].weights
    assert any(not torch.equal(plain[name], before[name]) for name in before)
    for name, tensor in plain.items():
        torch.testing.assert_close(sharded[name], tensor, atol=1e-5, rtol=1e-5)
