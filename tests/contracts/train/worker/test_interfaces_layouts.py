"""All calls of a train step, on several layouts, compute what one process computes in plain torch.

Compared are arrays, losses, gradients and their norms at learning rate 0: both minibatches see the same weights.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from realsys.algorithm.redistribute import holders_of_outputs, plan_call
from realsys.cluster.topology import place
from realsys.config.allocation import parse_allocation
from realsys.config.schema import Config
from realsys.train.worker.call_service import execute
from tests.support.serving.hf_models import VOCAB
from tests.support.training.ppo_batch import Arrays, Worker, deal, make_batch
from tests.support.training.train_ranks import cat_exports, run_ranks

TEMPERATURE, GAMMA, LAM, KL_COEF, ENTROPY_COEF, EPS_CLIP, VALUE_CLIP, CAP = 0.7, 0.97, 0.9, 0.2, 0.05, 0.2, 0.1, 4.0
TURN_GAMMA = 0.6

REFS, ARRAYS = make_batch()
MINIBATCHES = [REFS[:4], REFS[4:]]
TRAINED = {"actor": "actor_train", "critic": "critic_train"}

CRITIC: dict[str, Any] = {
    "gamma": GAMMA,
    "lam": LAM,
    "turn_rewards": TURN_GAMMA,
    "critic": {"enabled": True, "eps_clip": VALUE_CLIP, "value_norm": "moving"},
    "kl": {"coef": 0.5, "place": "reward"},  # the call's argument counts, not the setting
}
GROUP: dict[str, Any] = {
    "aggregation": "sequence",
    "truncated_answers": "mask",
    "advantage": {"mean": "group", "std": "group"},
    "kl": {"coef": 0.5, "place": "loss"},
}


@dataclass
class Step:
    """Result of a train step: arrays per sample, statistics per call, gradients of the last minibatch per role."""

    arrays: dict[str, Arrays] = field(default_factory=lambda: {ref.sample_id: {} for ref in REFS})
    stats: dict[str, dict[str, float]] = field(default_factory=dict)
    gradients: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)


def make_config(ppo):
    return Config.model_validate(
        {
            "generation": {"sampling": {"temperature": TEMPERATURE, "max_new_tokens": 24}},
            "roles": {"critic": {"head": "value", "optimizer": {"clip_grad": 1e9}}},
            "train": {
                "microbatch_tokens": 48,
                "optimizer": {"clip_grad": 1e9},
                "ppo": {"behav_imp_weight_cap": CAP, "entropy_coef": ENTROPY_COEF, **ppo},
            },
        }
    )


# ---------------------------------------------------------------- one process, plain torch


def drifted(array, sample_id):
    """The same some way off, as if the weights had moved since: ratios differ from 1, and some are clipped."""
    noise = np.random.default_rng(sum(map(ord, sample_id))).normal(0, 0.25, len(array))
    return (array + noise).astype(np.float32)


def positions(ref):
    return torch.tensor([t for t, counts in enumerate(ARRAYS[ref.sample_id]["loss_mask"]) if counts])


def naive_logprobs(model, ref):
    """Log-probs and entropies of the loss tokens, one row at a time."""
    ids, at = torch.from_numpy(ARRAYS[ref.sample_id]["tokens"]).long(), positions(ref)
    every = (model(ids[None]).logits[0, at - 1] / TEMPERATURE).log_softmax(-1)
    return every.gather(1, ids[at, None])[:, 0], -(every.exp() * every).sum(-1)


def naive_values(model, ref):
    """Return the value of the state before each loss token and after the last, [loss_tokens + 1]."""
    ids, at = torch.from_numpy(ARRAYS[ref.sample_id]["tokens"]).long(), positions(ref)
    values: torch.Tensor = model.score(model.model(ids[None]).last_hidden_state[0])[:, 0]
    return values[torch.cat([at - 1, at[-1:]])]


def k3(policy, reference):
    """At most 10, as the estimate of training."""
    return ((reference - policy).exp() - 1 - (reference - policy)).clamp(max=10.0)


def naive_policy(model, ref, arrays, advantages):
    """Per answer token the policy loss with its entropy bonus, and log-prob, ratio and entropy."""
    theta, entropy = naive_logprobs(model, ref)
    prox, behav = torch.from_numpy(drifted(arrays["prox_logprobs"], ref.sample_id)), ARRAYS[ref.sample_id]
    u, w = (theta - prox).exp(), (prox - torch.from_numpy(behav["behav_logprobs"])).exp()
    surrogate = torch.minimum(u * advantages, u.clamp(1 - EPS_CLIP, 1 + EPS_CLIP) * advantages)
    return -torch.where(w > CAP, 0.0, w) * surrogate - ENTROPY_COEF * entropy, theta, u, entropy


def train_naively(step, role, model, sums):
    """Statistics and gradients of a training call whose minibatches have these (sum of losses, denominator)."""
    norms = []
    for total, denominator in sums:
        model.zero_grad()
        (total / denominator).backward()  # type: ignore[no-untyped-call]
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norms.append(math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values())))
    step.gradients[role] = gradients
    loss = sum(total.item() for total, _ in sums) / sum(denominator for _, denominator in sums)
    step.stats[TRAINED[role]] = {"loss": loss, "grad_norm": sum(norms) / 2, "grad_norm_max": max(norms)}


def naive_inference(step, models):
    with torch.no_grad():
        for ref in REFS:
            step.arrays[ref.sample_id] = {
                "prox_logprobs": naive_logprobs(models["actor"], ref)[0].numpy(),
                "ref_logprobs": naive_logprobs(models["ref"], ref)[0].numpy(),
                "values": naive_values(models["critic"], ref).numpy(),
            }


def naive_advantages(step):
    """By the definition: A_t is the sum over later tokens k of delta_k times the discounts from t to k."""
    raw, divergences = {}, []
    for ref in REFS:
        arrays, n = step.arrays[ref.sample_id], ref.loss_tokens
        values = torch.from_numpy(drifted(arrays["values"], ref.sample_id))
        prox = torch.from_numpy(drifted(arrays["prox_logprobs"], ref.sample_id))
        divergences.append(k3(prox, torch.from_numpy(arrays["ref_logprobs"])))
        rewards = -KL_COEF * divergences[-1] + torch.from_numpy(ARRAYS[ref.sample_id]["token_rewards"])
        rewards[-1] += ref.reward
        at = positions(ref)
        # Behind the last token of a turn other tokens follow before the next one of the loss.
        discount = [GAMMA * (TURN_GAMMA if k + 1 < n and at[k + 1] - at[k] > 1 else 1.0) for k in range(n)]
        delta = rewards - values[:-1] + torch.tensor(discount) * values[1:]
        if not (ref.row_truncated and ref.last):
            delta[-1] = rewards[-1] - values[n - 1]
        raw[ref.sample_id] = torch.stack(
            [
                sum((math.prod(LAM * d for d in discount[t:k]) * delta[k] for k in range(t, n)), torch.zeros(()))
                for t in range(n)
            ]
        )
        arrays["returns"] = (raw[ref.sample_id] + values[:-1]).numpy()
    every = torch.cat([*raw.values()])
    mean, std = every.mean().item(), every.std(correction=0).item()
    for sample_id, advantages in raw.items():
        step.arrays[sample_id]["advantages"] = ((advantages - mean) / (std + 1e-6)).numpy()
    step.stats["advantages"] = {
        "advantage_mean": mean,
        "advantage_std": std,
        "return_mean": float(np.mean(np.concatenate([step.arrays[ref.sample_id]["returns"] for ref in REFS]))),
        "kl_ref_mean": torch.cat(divergences).mean().item(),
    }


def naive_critic(step, model):
    """Clipped squared error in units of the batch's returns: the running statistics have seen nothing else."""
    returns = np.concatenate([step.arrays[ref.sample_id]["returns"] for ref in REFS])
    mean, std = float(returns.mean()), float(returns.std())
    sums, errors, targets = [], [], []
    for refs in MINIBATCHES:
        total = torch.zeros(())
        for ref in refs:
            arrays = step.arrays[ref.sample_id]
            target = (torch.from_numpy(arrays["returns"]) - mean) / std
            old = torch.from_numpy(drifted(arrays["values"], ref.sample_id))[:-1]  # made before the first update
            value = naive_values(model, ref)[:-1]
            near = old + (value - old).clamp(-VALUE_CLIP, VALUE_CLIP)
            total = total + 0.5 * torch.maximum((value - target).square(), (near - target).square()).sum()
            errors.append((target - value).detach())
            targets.append(target)
        sums.append((total, sum(ref.loss_tokens for ref in refs)))
    train_naively(step, "critic", model, sums)
    explained = 1 - torch.cat(errors).var() / torch.cat(targets).var()
    step.stats["critic_train"] |= {"explained_variance": explained.item(), "return_mean": mean}


def naive_actor_with_critic(step, model):
    sums, ratios = [], []
    for refs in MINIBATCHES:
        total = torch.zeros(())
        for ref in refs:
            arrays = step.arrays[ref.sample_id]
            losses, _, u, _ = naive_policy(model, ref, arrays, torch.from_numpy(arrays["advantages"]))
            total = total + losses.sum()
            ratios.append(u.detach())
        sums.append((total, sum(ref.loss_tokens for ref in refs)))
    train_naively(step, "actor", model, sums)
    step.stats["actor_train"] |= {"u_mean": torch.cat(ratios).mean().item()}


def naive_actor_by_group(step, model):
    """Means of episodes over those that were not cut off; the KL to the reference is a term of the loss."""
    sums, divergences, entropies = [], [], []
    for refs in MINIBATCHES:
        total, counted = torch.zeros(()), [ref for ref in refs if not ref.truncated]
        for ref in counted:
            group = np.array([other.reward for other in REFS if other.group == ref.group and other.last])
            advantage = torch.tensor((ref.reward - group.mean()) / (group.std() + 1e-6), dtype=torch.float32)
            arrays = step.arrays[ref.sample_id]
            losses, theta, _, entropy = naive_policy(model, ref, arrays, advantage)
            divergence = k3(theta, torch.from_numpy(arrays["ref_logprobs"]))
            # The mean over the tokens of all rows of the episode.
            own = sum(other.loss_tokens for other in REFS if other.episode == ref.episode)
            total = total + (losses + KL_COEF * divergence).sum() / own
            divergences.append(divergence.detach())
            entropies.append(entropy.detach())
        sums.append((total, len({ref.episode for ref in counted})))
    train_naively(step, "actor", model, sums)
    kl, entropy = torch.cat(divergences).mean().item(), torch.cat(entropies).mean().item()
    step.stats["actor_train"] |= {"kl_ref_mean": kl, "entropy_mean": entropy}


# ---------------------------------------------------------------- the interfaces on ranks


@dataclass
class Found:
    """Report of one rank: gathered arrays, its statistics (of the roles whose DP head it is), its exports."""

    step: Step
    moments: tuple[float, float]


def one_rank(rank, device, config, meshes, folders):
    """A whole step. Between calls every worker gets every array, moved as far as the reference's."""
    worker, step = Worker(rank, device, config, meshes, folders), Step()
    worker.fill(ARRAYS)
    kl = {"kl_coef": KL_COEF}

    def call(interface, role, *keys, **args):
        outcome = worker.call(interface, role, MINIBATCHES, **args)
        for sample_id, arrays in worker.spread(REFS, *keys).items():
            step.arrays[sample_id] |= arrays
        if rank in meshes[role].dp_heads():
            step.stats[interface] = outcome.stats

    call("actor_inf", "actor", "prox_logprobs")
    call("ref_inf", "ref", "ref_logprobs")
    if "critic" in meshes:
        call("critic_inf", "critic", "values")
    for sample_id, arrays in step.arrays.items():
        moved: Arrays = {key: drifted(arrays[key], sample_id) for key in ("prox_logprobs", "values") if key in arrays}
        worker.data.put(sample_id, moved)
    if "critic" in meshes:
        call("advantages", "actor", "advantages", "returns", **kl)
        call("critic_train", "critic", lr=0.0)
    call("actor_train", "actor", lr=0.0, **kl)
    for role, engine in ((name, own.engine) for name, own in worker.roles.items() if name in TRAINED):
        step.gradients[role] = {name: tensor.clone() for name, tensor in engine.export("gradients")}
    running = worker.roles["critic"].running_values if "critic" in worker.roles else None
    return Found(step, (running.mean, running.std) if running is not None else (math.nan, math.nan))


def check(found, expected, meshes):
    for sample_id, arrays in found[0].step.arrays.items():
        for key, array in arrays.items():
            np.testing.assert_allclose(
                array, expected.arrays[sample_id][key], atol=2e-5, rtol=1e-5, err_msg=f"{sample_id} {key}"
            )
    for interface, stats in expected.stats.items():
        mesh = meshes["critic" if interface.startswith("critic") else "actor"]
        for head in mesh.dp_heads():
            own = found[head].step.stats[interface]
            assert {name: own[name] for name in stats} == pytest.approx(stats, rel=1e-4, abs=1e-5), interface
    for role, gradients in expected.gradients.items():
        merged = cat_exports([part.step.gradients.get(role, {}) for part in found])
        assert merged.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                merged[name],
                gradient,
                atol=5e-6,
                rtol=5e-4,
                msg=lambda m, n=name, r=role: f"{r} {n}: {m}",  # type: ignore[misc]
            )


def allocations():
    for text in ("d1", "d2", "m2", "p2", "d2p2"):
        yield pytest.param(f"actor.{text}", id=text)
    yield pytest.param("actor.d2,critic.m2", id="shared workers")
    yield pytest.param("actor.p2,ref.d2+critic.d2", id="critic apart")


@pytest.mark.parametrize("allocation", allocations())
def test_ppo_with_critic_agrees_with_plain_torch(allocation, models, folders):
    """The reference model is part of the comparison."""
    config, placed = make_config(CRITIC), parse_allocation(f"sglang.d1+{allocation}")
    meshes = place(placed, ["actor", "ref", "critic"])
    expected = Step()
    naive_inference(expected, models)
    naive_advantages(expected)
    naive_critic(expected, models["critic"])
    naive_actor_with_critic(expected, models["actor"])
    found = run_ranks(placed.workers, lambda rank, device: one_rank(rank, device, config, meshes, folders), config)
    check(found, expected, meshes)
    assert {len(found[0].step.arrays[ref.sample_id]) for ref in REFS} == {5}
    returns = np.concatenate([expected.arrays[ref.sample_id]["returns"] for ref in REFS])
    for worker in meshes["critic"].workers:  # any rank may write them to a checkpoint
        assert found[worker].moments == pytest.approx((returns.mean(), returns.std()), rel=1e-4)


TOP: dict[str, Any] = {
    "loss": "distill",
    "loss_args": {"top_k": 5, "beta": 0.4},
    "use_decoupled_loss": False,
    "skip_zero_advantage": False,
}


def foreign(tokens):
    """Replace every seventh token of the teacher by one that the student lacks."""
    tokens = tokens.copy()
    tokens[::7] = VOCAB + 1
    return tokens


def naive_distillation(step, models):
    """Generalised JSD of six events: those of the teacher's five most probable tokens that the student has, and the
    others together.
    """
    sums = []
    for refs in MINIBATCHES:
        total = torch.zeros(())
        for ref in refs:
            ids, at = torch.from_numpy(ARRAYS[ref.sample_id]["tokens"]).long(), positions(ref) - 1
            p, q = ((models[role](ids[None]).logits[0, at] / TEMPERATURE).softmax(-1) for role in ("actor", "ref"))
            top = q.detach().topk(5)
            step.arrays[ref.sample_id] = {
                "teacher_tokens": foreign(top.indices.flatten().numpy()),
                "teacher_logprobs": top.values.log().flatten().numpy(),
            }
            entropy = -(p * p.log()).sum(-1)
            known = torch.from_numpy(step.arrays[ref.sample_id]["teacher_tokens"]).view(-1, 5) < VOCAB
            p, q = (torch.where(known, x.gather(1, top.indices), 0.0) for x in (p, q.detach()))
            p, q = (torch.cat([x, 1 - x.sum(1, keepdim=True)], 1) + 1e-12 for x in (p, q))
            m = 0.4 * q + 0.6 * p
            losses = 0.4 * (q * (q / m).log()).sum(1) + 0.6 * (p * (p / m).log()).sum(1)
            total = total + (losses - ENTROPY_COEF * entropy).sum()
        sums.append((total, sum(ref.loss_tokens for ref in refs)))
    train_naively(step, "actor", models["actor"], sums)


@pytest.mark.parametrize("allocation", ["actor.d1", "actor.d2", "actor.m2", "actor.d2p2,ref.m2", "actor.p2,ref.d2"])
def test_top_k_distillation_agrees_with_plain_torch(allocation, models, folders):
    """The teacher is the reference model. Its arrays go to the ranks of the actor as the master sends them."""
    config, placed = make_config(TOP), parse_allocation(f"sglang.d1+{allocation}")
    config = config.model_copy(update={"train": config.train.model_copy(update={"sequence_parallel": True})})
    meshes = place(placed, ["actor", "ref"])
    keys = ("teacher_tokens", "teacher_logprobs")
    expected = Step()
    naive_distillation(expected, models)

    def body(rank, device):
        worker, step = Worker(rank, device, config, meshes, folders), Step()
        worker.fill(ARRAYS)
        worker.call("ref_inf", "ref", [REFS])
        dealt = [deal(REFS, meshes["actor"].layout.data)]
        owners = dict.fromkeys(keys, holders_of_outputs(meshes["ref"], [deal(REFS, meshes["ref"].layout.data)]))
        plan = plan_call(meshes["actor"], dealt, keys, owners).by_worker(dealt)
        if rank in plan:
            execute(plan[rank], worker.data, rank, device)
        for name in (ref.sample_id for ref in REFS if worker.data.has(ref.sample_id, "teacher_tokens")):
            worker.data.put(name, {"teacher_tokens": foreign(worker.data.get(name, "teacher_tokens"))})
        outcome = worker.call(
            "actor_train",
            "actor",
            MINIBATCHES,
            lambda refs, ranks: [[ref for ref in part if ref in refs] for part in dealt[0]],
            lr=0.0,
            kl_coef=0.0,
        )
        step.arrays = {name: dict(own) for name, own in worker.spread(REFS, *keys).items()}
        if rank in meshes["actor"].dp_heads():
            step.stats["actor_train"] = outcome.stats
        if "actor" in worker.roles:
            engine = worker.roles["actor"].engine
            step.gradients["actor"] = {name: tensor.clone() for name, tensor in engine.export("gradients")}
        return Found(step, (math.nan, math.nan))

    check(run_ranks(placed.workers, body, config), expected, meshes)


@pytest.mark.parametrize("allocation", ["actor.d1", "actor.d2", "actor.p2,ref.m2"])
def test_group_advantages_agree_with_plain_torch(allocation, models, folders):
    """With the KL term in the loss."""
    config, placed = make_config(GROUP), parse_allocation(f"sglang.d1+{allocation}")
    meshes = place(placed, ["actor", "ref"])
    expected = Step()
    naive_inference(expected, models)
    for ref in REFS:
        if ref.truncated:  # out of the loss, so it is not computed
            expected.arrays[ref.sample_id]["prox_logprobs"] = np.zeros(ref.loss_tokens, np.float32)
    naive_actor_by_group(expected, models["actor"])
    found = run_ranks(placed.workers, lambda rank, device: one_rank(rank, device, config, meshes, folders), config)
    check(found, expected, meshes)
