"""The losses beside PPO's, and aggregation over tokens and answers: by hand and against autograd."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.algorithm.loss import actor_loss, loss_denominator, merge_stats
from realsys.algorithm.loss_tokens import Segments
from realsys.algorithm.minibatches import counts_in_loss
from realsys.config.schema_train import PPOConfig
from tests.support.training.sample_records import make_ref

# Two answers of two tokens. log u = 0.2, -0.5 | -0.5, 1.0 and log w = 0.3, -0.1 | 0, -0.2
THETA = [-1.0, -2.0, -2.0, -0.5]
PROX = [-1.2, -1.5, -1.5, -1.5]
BEHAV = [-1.5, -1.4, -1.5, -1.3]
TOKENS = [2.0, -1.0, 2.0, -3.0]  # advantages of tokens
ANSWERS = [2.0, 2.0, -3.0, -3.0]  # advantages of answers
ALL = torch.ones(4, dtype=torch.bool)


def config(**fields):
    return PPOConfig.model_validate(fields)


def segments(*lengths):
    return Segments(torch.tensor(lengths, dtype=torch.int64))


def run(cfg, advantages, *, lengths=(2, 2), denominator=1.0, mask=ALL):
    theta = torch.tensor(THETA, requires_grad=True)
    others = (torch.tensor(x) for x in (PROX, BEHAV, list(advantages)))
    loss, stats = actor_loss(theta, *others, mask, denominator, cfg, segments=segments(*lengths))
    loss.backward()
    return loss.item(), theta.grad.tolist(), {name: value.item() for name, value in stats.items()}


# --- GSPO


def test_gspo_has_one_ratio_and_weight_per_completion():
    loss, gradient, stats = run(config(loss="gspo", aggregation="sequence"), ANSWERS, denominator=2)
    # mean log u: -0.15, 0.25; mean log w: 0.1, -0.1. Answer 0: -e^(0.1-0.15)*2; answer 1, A < 0 and u above the clip,
    # which bounds nothing there: e^(-0.1+0.25)*3
    first, second = -1.9024588, 3.4855027
    assert loss == pytest.approx((first + second) / 2, rel=1e-6)
    assert gradient == pytest.approx([first / 4, first / 4, second / 4, second / 4], rel=1e-6)
    assert stats["u_max"] == pytest.approx(1.2840254, rel=1e-6)
    assert stats["u_sum"] == pytest.approx(2 * 0.8607080 + 2 * 1.2840254, rel=1e-6)
    assert stats["w_max"] == pytest.approx(1.1051709, rel=1e-6)
    # divergences stay those of the tokens: sum(w) - 4 - 0 and sum(u) - 4 - 0.2
    assert stats["kl_behav_prox_sum"] == pytest.approx(0.0734270, rel=1e-5)
    assert stats["kl_prox_theta_sum"] == pytest.approx(0.9527459, rel=1e-5)


def test_gspo_clips_whole_answers():
    """The first token of the answer is below the clip by itself, and has no gradient all the same."""
    loss, gradient, stats = run(config(loss="gspo", aggregation="sequence"), [0.0, 0.0, 3.0, 3.0], denominator=2)
    assert loss == pytest.approx(-0.9048374 * 1.2 * 3 / 2, rel=1e-6)
    assert gradient == [0.0] * 4
    assert stats["clip_count"] == 2


def test_gspo_gradient_is_that_of_the_sequence_mean():
    generator = torch.Generator().manual_seed(3)
    lengths = [3, 1, 5, 2]
    prox, behav = -torch.rand(2, 11, generator=generator)
    drift = torch.tensor([0.2, -0.1, 0.1, 0.01, 0.3, -0.2, 0.0, 0.1, -0.1, -0.05, -0.05])
    theta = (prox + drift).requires_grad_()  # the first answer beyond its clip, the last on the side without one
    advantages = torch.tensor([1.5, -0.5, -2.0, 0.7])
    found, _ = actor_loss(
        theta,
        prox,
        behav,
        advantages.repeat_interleave(torch.tensor(lengths)),
        torch.ones(11, dtype=torch.bool),
        4,
        config(loss="gspo", aggregation="sequence", eps_clip=0.02),
        segments=segments(*lengths),
    )
    found.backward()
    assert theta.grad is not None
    again = theta.detach().clone().requires_grad_()
    terms, start = [], 0
    for length, advantage in zip(lengths, advantages, strict=True):
        part = slice(start, start + length)
        ratio = (again[part] - prox[part]).mean().exp()
        weight = (prox[part] - behav[part]).mean().exp()
        terms.append(-weight * torch.min(ratio * advantage, ratio.clamp(0.98, 1.02) * advantage))
        start += length
    expected = torch.stack(terms).mean()
    expected.backward()
    assert again.grad is not None
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(theta.grad, again.grad, rtol=1e-5, atol=1e-7)
    assert (theta.grad != 0).tolist() == [False] * 3 + [True] * 8


def test_gspo_keeps_advantages_of_tokens_apart():
    """GSPO-token: the ratio is the answer's, the gradient goes to the token that earned it."""
    _, gradient, _ = run(config(loss="gspo"), [2.0, 0.0, 0.0, 0.0])
    assert gradient == pytest.approx([-1.9024588, 0.0, 0.0, 0.0], rel=1e-6)


def test_gspo_caps_whole_answers():
    """w of the first answer is e^0.1 though one of its tokens has e^-0.1."""
    _, gradient, stats = run(config(loss="gspo", behav_imp_weight_cap=1.1), ANSWERS)
    assert gradient[:2] == [0.0, 0.0] and gradient[2] != 0.0
    assert stats["capped_count"] == 2


# --- CISPO, REINFORCE, TIS


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    loss, gradient, stats = run(config(loss="cispo"), TOKENS, denominator=5)
    # -w * clip(u) * A with u clipped to 1.2, 0.8, 0.8, 1.2
    terms = [-3.2396611, 0.7238699, -1.6, 2.9474308]
    assert gradient == pytest.approx([t / 5 for t in terms], rel=1e-6)
    assert loss == pytest.approx(sum(t * theta for t, theta in zip(terms, THETA, strict=True)) / 5, rel=1e-6)
    assert stats["clip_count"] == 4


def test_cispo_within_clip_has_gradient_of_ratio():
    """d(u*A)/dtheta = u*A: inside the range CISPO and PPO agree, whatever their values."""
    wide = {"eps_clip": 1.0, "eps_clip_higher": 4.0}
    _, cispo, stats = run(config(loss="cispo", **wide), TOKENS)
    _, ppo, _ = run(config(loss="ppo", **wide), TOKENS)
    assert cispo == pytest.approx(ppo, rel=1e-6)
    assert stats["clip_count"] == 0


@pytest.mark.parametrize(
    ("decoupled", "terms"),
    [(True, [-2.6997176, 0.9048374, -2.0, 2.4561923]), (False, [-2.0, 1.0, -2.0, 3.0])],  # -w * A; -A
)
def test_reinforce_has_no_ratio(decoupled, terms):
    loss, gradient, stats = run(config(loss="reinforce", use_decoupled_loss=decoupled), TOKENS, denominator=4)
    assert gradient == pytest.approx([t / 4 for t in terms], rel=1e-6)
    assert loss == pytest.approx(sum(t * theta for t, theta in zip(terms, THETA, strict=True)) / 4, rel=1e-6)
    assert stats["clip_count"] == 0
    assert stats["u_sum"] > 0, "the ratio is still reported"


def test_truncated_importance_sampling_caps_the_weight():
    cfg = config(behav_imp_weight_cap=0.85, behav_imp_weight_mode="truncate")
    _, gradient, stats = run(cfg, TOKENS)
    # token 2: w = 1 becomes 0.85; token 3: w = e^-0.2 is below the cap. Tokens 0 and 1 are clipped.
    assert gradient == pytest.approx([0.0, 0.0, -0.85 * 0.6065307 * 2, 0.8187308 * 2.7182818 * 3], rel=1e-6)
    assert stats["capped_count"] == 3
    assert stats["w_max"] == pytest.approx(1.3498588, rel=1e-6), "w is reported as it was before the cap"


@pytest.mark.parametrize("loss", ["gspo", "cispo", "reinforce"])
def test_masked_mode_drops_what_is_beyond_the_cap(loss):
    _, gradient, stats = run(config(loss=loss, behav_imp_weight_cap=0.95), ANSWERS)
    kept = [g != 0.0 for g in gradient]
    # token weights e^0.3, e^-0.1, 1, e^-0.2; those of the answers e^0.1, e^-0.1
    assert kept == ([False, False, True, True] if loss == "gspo" else [False, True, False, True])
    assert stats["capped_count"] == 2


# --- aggregation

PPO_TERMS = [-3.2396611, 0.7238699, -1.2130613, 6.6766228]  # as in test_algorithm_loss, for TOKENS


def ref(answer, *, truncated=False):
    return make_ref("s", answer + 3, 3, 0.0, truncated, 0)


REFS = [ref(3), ref(1), ref(10, truncated=True)]


@pytest.mark.parametrize(
    ("aggregation", "kept", "masked"), [("token", 14.0, 4.0), ("sequence", 3.0, 2.0), ("constant", 300.0, 200.0)]
)
def test_denominators_and_masked_answers(aggregation, kept, masked):
    assert loss_denominator(REFS, config(aggregation=aggregation), 100) == kept
    assert loss_denominator(REFS, config(aggregation=aggregation, truncated_answers="zero_reward"), 100) == kept
    without = config(aggregation=aggregation, truncated_answers="mask")
    assert loss_denominator(REFS, without, 100) == masked
    assert [counts_in_loss(r, without) for r in REFS] == [True, True, False]


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_a_step_without_answers_divides_by_something(aggregation):
    assert loss_denominator([], config(aggregation=aggregation), 100) >= 1
    assert loss_denominator(REFS[2:], config(aggregation=aggregation, truncated_answers="mask"), 100) >= 1


@pytest.mark.parametrize(
    ("aggregation", "expected", "weights"),
    [
        ("token", sum(PPO_TERMS) / 4, [1 / 4] * 4),
        ("sequence", (sum(PPO_TERMS[:3]) / 3 + PPO_TERMS[3]) / 2, [1 / 6, 1 / 6, 1 / 6, 1 / 2]),
        ("constant", sum(PPO_TERMS) / (2 * 50), [1 / 100] * 4),
    ],
)
def test_aggregation(aggregation, expected, weights):
    cfg = config(aggregation=aggregation)
    loss, gradient, stats = run(
        cfg, TOKENS, lengths=(3, 1), denominator=loss_denominator([ref(3), ref(1)], cfg, max_new_tokens=50)
    )
    assert loss == pytest.approx(expected, rel=1e-6)
    # tokens 0 and 1 are clipped; token terms of the others are their own gradient
    assert gradient == pytest.approx([0, 0, PPO_TERMS[2] * weights[2], PPO_TERMS[3] * weights[3]], rel=1e-6)
    assert stats["tokens"] == 4


def test_masked_tokens_leave_sequence_means_and_sequence_ratios():
    mask = torch.tensor([True, False, True, True])
    loss, gradient, stats = run(config(loss="gspo", aggregation="sequence"), ANSWERS, mask=mask)
    # answer 0 is its first token alone: u = e^0.2 above the clip, w = e^0.3
    assert loss == pytest.approx(-1.3498588 * 1.2 * 2 + 3.4855027, abs=1e-5)
    assert gradient == pytest.approx([0.0, 0.0, 3.4855027 / 2, 3.4855027 / 2], rel=1e-6)
    assert stats["tokens"] == 3


def test_a_masked_answer_contributes_nothing():
    mask = torch.tensor([False, False, True, True])
    for loss in ("ppo", "gspo", "cispo", "reinforce"):
        share, gradient, _ = run(config(loss=loss, aggregation="sequence"), ANSWERS, mask=mask)
        assert gradient[:2] == [0.0, 0.0] and math.isfinite(share)


@pytest.mark.parametrize("fields", [{"loss": "gspo"}, {"aggregation": "sequence"}])
def test_what_needs_segments_says_so(fields):
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="needs the episode of each token"):
        actor_loss(x, x, x, x, ALL, 1, config(**fields))
    with pytest.raises(ValueError, match="lengths sum up to 3, but there are 4 tokens"):
        actor_loss(x, x, x, x, ALL, 1, config(**fields), segments=segments(2, 1))


# --- any layout

number = st.floats(-3, 0, width=32)
token = st.tuples(number, number, number, st.floats(-2, 2, width=32), number)
answers = st.lists(st.tuples(st.lists(token, min_size=1, max_size=5), st.booleans()), min_size=1, max_size=6)
policies = st.builds(
    PPOConfig,
    loss=st.sampled_from(["ppo", "gspo", "cispo", "reinforce"]),
    aggregation=st.sampled_from(["token", "sequence", "constant"]),
    use_decoupled_loss=st.booleans(),
    behav_imp_weight_cap=st.sampled_from([0.0, 2.0]),
    behav_imp_weight_mode=st.sampled_from(["mask", "truncate"]),
    entropy_coef=st.sampled_from([0.0, 0.1]),
)


def share(part, cfg):
    rows = [row for tokens, _ in part for row in tokens]
    theta, prox, behav, advantages, ref = (torch.tensor([row[i] for row in rows]) for i in range(5))
    mask = torch.tensor([counted for tokens, counted in part for _ in tokens], dtype=torch.bool)
    loss, stats = actor_loss(
        theta,
        prox,
        behav,
        advantages,
        mask,
        7.0,
        cfg,
        segments=segments(*(len(tokens) for tokens, _ in part)),
        entropy=-ref,
        ref=ref,
        kl_coef=0.2,
    )
    return loss.item(), stats


@settings(max_examples=60, deadline=None)
@given(answers, policies, st.randoms(use_true_random=False))
def test_shares_add_up_whatever_the_micro_batches(rows, cfg, random):
    """Any order of the answers, cut anywhere between them."""
    whole, stats = share(rows, cfg)
    shuffled = list(rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    cut = random.randint(0, len(rows))  # type: ignore[attr-defined]
    parts = [share(part, cfg) for part in (shuffled[:cut], shuffled[cut:])]
    assert sum(loss for loss, _ in parts) == pytest.approx(whole, rel=1e-4, abs=1e-4)
    merged = merge_stats(found for _, found in parts)
    assert merged.keys() == stats.keys()
    for name, value in stats.items():
        assert merged[name].item() == pytest.approx(value.item(), rel=1e-4, abs=1e-4), name


@settings(max_examples=40, deadline=None)
@given(answers, st.sampled_from(["ppo", "gspo"]), st.sampled_from([-2.0, 0.5]))
def test_ratios_ignore_shift_of_all_log_probs(rows, loss, shift):
    cfg = config(loss=loss, aggregation="sequence")
    no_kl = [([(*row[:4], row[0]) for row in tokens], counted) for tokens, counted in rows]  # ref = theta
    moved = [
        (
            [(theta + shift, prox + shift, behav + shift, a, ref + shift) for theta, prox, behav, a, ref in tokens],
            counted,
        )
        for tokens, counted in no_kl
    ]
    assert share(moved, cfg)[0] == pytest.approx(share(no_kl, cfg)[0], rel=1e-3, abs=1e-4)
