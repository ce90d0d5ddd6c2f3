"""tenant_loss on several layouts computes the log-probs, the loss and the gradient of one process in plain torch."""

import math

import numpy as np
import pytest
import torch

from realsys.config.schema import Config
from tests.support.training.pair_batch import deal_pairs, make_pairs
from tests.support.training.ppo_batch import Worker, whole
from tests.support.training.train_ranks import cat_exports, run_ranks

REFS, ARRAYS = make_pairs()
RNG = np.random.default_rng(3)
for one in ARRAYS.values():
    size = int(one["loss_mask"].sum())
    one["behav_logprobs"] = RNG.uniform(-4.5, -3.5, size).astype(np.float32)
    one["advantages"] = RNG.normal(0, 1, size).astype(np.float32)
CONFIG = Config.model_validate(
    {
        "generation": {"sampling": {"temperature": 0.7}},  # must not matter
        "train": {"microbatch_tokens": 40, "ppo": {"algorithm": "serve"}},
    }
)


def naive_logprobs(model, ref):
    ids, mask = (torch.from_numpy(ARRAYS[ref.sample_id][key]) for key in ("tokens", "loss_mask"))
    at = mask.nonzero()[:, 0]
    every = model(ids[None].long()).logits[0, at - 1].log_softmax(-1)
    return every.gather(1, ids.long()[at, None])[:, 0]


def naive_loss(name, theta, old, advantages, low=0.8, high=1.2, beta=0.05):
    """Loss of one row."""
    ratio = (theta - old).exp()
    if name == "gspo":
        ratio = (theta - old).mean().detach().exp() * (theta - theta.detach()).exp()
    if name in ("ppo", "gspo"):
        return torch.where(
            advantages > 0, -ratio.clamp(max=high) * advantages, -ratio.clamp(min=low) * advantages
        ).sum()
    if name == "cispo":
        return -(ratio.detach().clamp(0, 4) * advantages * theta).sum()
    if name == "dro":
        return (beta / 2 * (theta - old) ** 2 - advantages * theta).sum()
    return -((ratio if name == "importance_sampling" else theta) * advantages).sum()


def expect(name, model):
    model.zero_grad()
    total, logprobs = torch.zeros(()), {}
    for ref in REFS:
        theta = naive_logprobs(model, ref)
        logprobs[ref.sample_id] = theta.detach().numpy()
        old, advantages = (torch.from_numpy(ARRAYS[ref.sample_id][key]) for key in ("behav_logprobs", "advantages"))
        total = total + naive_loss(name, theta, old, advantages)
    total.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    return total.item(), logprobs, gradients


def compute(rank, device, name, layout, folders, backward):
    worker = Worker(rank, device, CONFIG, whole(layout, "actor"), folders)
    worker.fill(ARRAYS)
    role = worker.roles["actor"]
    outcome = worker.call("tenant_loss", "actor", [REFS], deal_pairs, loss=name, config={}, backward=backward)
    logprobs = {n: each["prox_logprobs"] for n, each in worker.spread(REFS, "prox_logprobs").items() if each}
    gradients = {n: tensor.clone() for n, tensor in role.engine.export("gradients")} if backward else {}
    return outcome.stats if role.groups.last_stage else {}, logprobs, gradients, role.gradients is not None


EVERYWHERE = [(name, layout) for name in ("cross_entropy", "gspo") for layout in ("d1", "d2", "p2", "m2", "d2p2m2")]


@pytest.mark.parametrize(
    ("name", "layout"), [*EVERYWHERE, *((name, "d2") for name in ("importance_sampling", "ppo", "cispo", "dro"))]
)
def test_layouts_agree_with_plain_torch(name, layout, models, folders):
    """With shared beginnings of rows, uneven data ranks, and micro-batches without any row."""
    ranks = math.prod(int(n) for n in layout if n.isdigit())
    found = run_ranks(ranks, lambda rank, device: compute(rank, device, name, layout, folders, True), CONFIG)
    loss, logprobs, gradients = expect(name, models["actor"])
    for stats, own, _, pending in found:
        assert pending
        assert own.keys() == logprobs.keys()
        for sample_id, values in own.items():
            np.testing.assert_allclose(values, logprobs[sample_id], atol=1e-5)
        if stats:
            assert stats["loss_sum"] == pytest.approx(loss, rel=1e-4)
            assert stats["tokens"] == sum(ref.loss_tokens for ref in REFS)
    merged = cat_exports([part[2] for part in found])
    assert merged.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(merged[key], gradient, atol=5e-4, rtol=5e-4)


def test_forward_pass_has_the_loss_and_no_gradient(models, folders):
    (found,) = run_ranks(1, lambda rank, device: compute(rank, device, "ppo", "d1", folders, False), CONFIG)
    stats, logprobs, _, pending = found
    loss, expected, _ = expect("ppo", models["actor"])
    assert stats["loss_sum"] == pytest.approx(loss, rel=1e-4) and not pending
    for sample_id, values in logprobs.items():
        np.testing.assert_allclose(values, expected[sample_id], atol=1e-5)
