"""sft, dpo and reward_model on several layouts compute what one process computes in plain torch.

Compared are losses, gradients and statistics at learning rate 0: both minibatches see the same weights. A call that
measures changes nothing.
"""

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch.nn.functional import logsigmoid

from realsys.config.schema import Config
from tests.support.training.pair_batch import deal_pairs, make_pairs
from tests.support.training.ppo_batch import Worker, whole
from tests.support.training.train_ranks import cat_exports, run_ranks

BETA, SMOOTHING, CENTER = 0.3, 0.1, 0.05
ARGUMENTS = {"sft": {}, "dpo": {"beta": BETA, "label_smoothing": SMOOTHING}, "reward_model": {"center": CENTER}}
MODELS = {"sft": "actor", "dpo": "actor", "reward_model": "reward"}  # whose weights the actor starts with

REFS, ARRAYS = make_pairs()
MINIBATCHES = [REFS[:6], REFS[6:]]


def make_config(algorithm, **train):
    return Config.model_validate(
        {
            "generation": {"sampling": {"temperature": 0.7}},  # must not matter
            "warmup": {"optimizer": {"name": "sgd"}},
            "train": {
                "microbatch_tokens": 40,
                "optimizer": {"clip_grad": 1e9},
                "ppo": {"algorithm": algorithm, "loss_args": ARGUMENTS[algorithm]},
                **train,
            },
        }
    )


@dataclass
class Found:
    stats: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


# ---------------------------------------------------------------- one process, plain torch


def naive_tokens(model, ref):
    """Log-probs of the loss tokens, and whether each is the most probable one."""
    ids, mask = (torch.from_numpy(ARRAYS[ref.sample_id][key]) for key in ("tokens", "loss_mask"))
    at = mask.nonzero()[:, 0]
    every = model(ids[None].long()).logits[0, at - 1].log_softmax(-1)
    return every.gather(1, ids.long()[at, None])[:, 0], every.argmax(-1) == ids[at]


def score_of(model, ref):
    ids = torch.from_numpy(ARRAYS[ref.sample_id]["tokens"]).long()[None]
    return model.score(model.model(ids).last_hidden_state[0, -1])[0]


def naive_sft(models, refs):
    logprobs, right = zip(*(naive_tokens(models["actor"], ref) for ref in refs), strict=True)
    return -torch.cat(logprobs), {"accuracy": torch.cat(right).float()}


def naive_dpo(models, refs):
    sums = torch.stack([naive_tokens(models["actor"], ref)[0].sum() for ref in refs]).view(-1, 2)
    with torch.no_grad():
        reference = torch.stack([naive_tokens(models["ref"], ref)[0].sum() for ref in refs]).view(-1, 2)
    rewards = BETA * (sums - reference)
    margin = rewards[:, 0] - rewards[:, 1]
    losses = -(1 - SMOOTHING) * logsigmoid(margin) - SMOOTHING * logsigmoid(-margin)
    return losses, {
        "accuracy": (margin.sign() + 1) / 2,
        "margin_mean": margin,
        "chosen_reward_mean": rewards[:, 0],
        "rejected_reward_mean": rewards[:, 1],
        "chosen_logprob_mean": sums[:, 0],
        "rejected_logprob_mean": sums[:, 1],
    }


def naive_reward_model(models, refs):
    scores = torch.stack([score_of(models["reward"], ref) for ref in refs]).view(-1, 2)
    margin = scores[:, 0] - scores[:, 1]
    return -logsigmoid(margin) + CENTER * scores.sum(1).square(), {
        "accuracy": (margin.sign() + 1) / 2,
        "margin_mean": margin,
        "chosen_score_mean": scores[:, 0],
        "rejected_score_mean": scores[:, 1],
    }


NAIVE = {"sft": naive_sft, "dpo": naive_dpo, "reward_model": naive_reward_model}


def expect(algorithm, models):
    """Statistics over both minibatches, and the gradients of the last one."""
    model, found, norms = models[MODELS[algorithm]], Found(), []
    numbers: dict[str, list[torch.Tensor]] = {}
    for refs in MINIBATCHES:
        model.zero_grad()
        losses, stats = NAIVE[algorithm](models, refs)
        losses.mean().backward()
        found.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norms.append(math.sqrt(sum(float(g.double().square().sum()) for g in found.gradients.values())))
        for name, values in {"loss": losses, **stats}.items():
            numbers.setdefault(name, []).append(values.detach())
    found.stats = {name: torch.cat(values).mean().item() for name, values in numbers.items()}
    found.stats["grad_norm"] = sum(norms) / len(norms)
    return found


# ---------------------------------------------------------------- the calls on ranks


def make_worker(rank, device, config, layout, folders):
    """A worker with the actor of the algorithm, and the log-probs of the reference if it needs them."""
    algorithm = config.train.ppo.algorithm
    roles = ("actor", "ref") if algorithm == "dpo" else ("actor",)
    folders = {"actor": folders[MODELS[algorithm]], "ref": folders["ref"]}
    worker = Worker(rank, device, config, whole(layout, *roles), folders)
    worker.fill(ARRAYS)
    if algorithm == "dpo":
        worker.call("ref_inf", "ref", MINIBATCHES, deal_pairs)
        worker.spread(REFS, "ref_logprobs")
    return worker


def one_step(rank, device, config, layout, folders):
    worker = make_worker(rank, device, config, layout, folders)
    outcome = worker.call(config.train.ppo.algorithm, "actor", MINIBATCHES, deal_pairs, lr=0.0)
    engine = worker.roles["actor"].engine
    gradients = {name: tensor.clone() for name, tensor in engine.export("gradients")}
    return Found(outcome.stats if engine.groups.last_stage else {}, gradients)


def check(found, expected):
    for own in (part.stats for part in found if part.stats):
        assert {name: own[name] for name in expected.stats} == pytest.approx(expected.stats, rel=1e-4, abs=1e-5)
    merged = cat_exports([part.gradients for part in found])
    assert merged.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(
            merged[name],
            gradient,
            atol=5e-6,
            rtol=5e-4,
            msg=lambda m, n=name: f"{n}: {m}",  # type: ignore[misc]
        )


@pytest.mark.parametrize("layout", ["d1", "d2", "p2", "m2", "d2p2m2"])
@pytest.mark.parametrize("algorithm", ["sft", "dpo", "reward_model"])
def test_layouts_agree_with_plain_torch(algorithm, layout, models, folders):
    """With shared beginnings of pairs, a data rank without pairs, and micro-batches without any."""
    config, ranks = make_config(algorithm), math.prod(int(n) for n in layout if n.isdigit())
    found = run_ranks(ranks, lambda rank, device: one_step(rank, device, config, layout, folders), config)
    check(found, expect(algorithm, models))


def step_and_measure(rank, device, config, layout, folders):
    """Statistics of a measuring call before and after the first step, and everything that it must not change."""
    worker = make_worker(rank, device, config, layout, folders)
    engine, algorithm = worker.roles["actor"].engine, config.train.ppo.algorithm

    def measure():
        return worker.call(algorithm, "actor", MINIBATCHES, deal_pairs, measure=True).stats

    def state():
        tensors = [p.detach().clone() for p in engine.module.parameters()]
        if engine.optimizer is not None:
            tensors += [
                x.clone()
                for part in engine.optimizer.chained_optimizers
                for s in part.optimizer.state.values()
                for x in s.values()
                if isinstance(x, torch.Tensor)
            ]
        return tensors

    before = state()
    first = measure()
    assert engine.optimizer is None, "measuring made an optimizer"
    assert all(map(torch.equal, before, state()))
    trained = worker.call(algorithm, "actor", MINIBATCHES, deal_pairs, lr=0.0).stats
    worker.call(algorithm, "actor", MINIBATCHES, deal_pairs, lr=1e-2)
    stepped = state()
    later = measure()
    again = state()
    assert len(stepped) > len(before) and len(again) == len(stepped) and all(map(torch.equal, stepped, again))
    return first, trained, later


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize(("algorithm", "layout"), [("sft", "d2"), ("dpo", "p2"), ("reward_model", "d1")])
def test_measuring_call_changes_nothing(algorithm, layout, lora, folders):
    """It reports what a call that trains reports, and a lower loss after a step."""
    config = make_config(algorithm, lora={"rank": lora})
    ranks = int(layout[1])
    results = run_ranks(ranks, lambda rank, device: step_and_measure(rank, device, config, layout, folders), config)
    first, trained, later = results[-1]
    assert first.keys() <= trained.keys() and "grad_norm" not in first and "lr" not in first
    assert first == pytest.approx({name: trained[name] for name in first}, rel=1e-6)
    assert later["loss"] < first["loss"]
