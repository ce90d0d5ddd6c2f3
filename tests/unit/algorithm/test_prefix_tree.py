"""Trees of rows that begin alike: found from tokens, made from metadata, and worth their cost."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.algorithm.balance import model_flops, token_costs
from realsys.algorithm.loss import actor_loss
from realsys.algorithm.loss_tokens import Segments
from realsys.algorithm.minibatches import plan_minibatches
from realsys.algorithm.prefix_tree import MOST_BEGINNINGS, row_tree, shared_beginnings, tree_cost, tree_units, unit_size
from realsys.config.schema_train import PPOConfig
from realsys.model_files.architecture import ModelSizes
from realsys.types import SequenceRef

SIZES = ModelSizes(hidden=8, layers=2, heads=4, kv_heads=2, head_dim=2, ffn=12, outputs=100)


@dataclass
class Rows:
    """Rows of several groups, with the metadata that their DP head gives them."""

    refs: list[SequenceRef]
    tokens: list[np.ndarray]


def made(groups):
    refs, every = [], []
    for group, rows in enumerate(groups):
        tokens = [np.array(row, np.int32) for row in rows]
        for row, (own, shared) in enumerate(zip(tokens, shared_beginnings(tokens), strict=True)):
            name = f"{group}/{row}"
            refs.append(SequenceRef(name, len(own), 1, 0.0, False, group, len(refs), 1, shared=shared))
        every += tokens
    return Rows(refs, every)


def conversations(seed, groups=3, rows=8):
    """Rows that branch at random places, few of them at once, from one prompt per group."""
    rng = random.Random(seed)
    every: list[list[list[int]]] = []
    for _ in range(groups):
        own = [[rng.randrange(3) for _ in range(rng.randrange(1, 40))]]
        while len(own) < rows:
            start = rng.choice(own)
            own.append(start[: rng.randrange(1, len(start) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(6))])
        every.append(own)
    return made(every)


def test_drawing_of_the_module():
    rows = made([[[7, 7, 7, 7, 1, 1, 1], [7, 7, 7, 7, 2, 3, 3, 3], [7, 7, 7, 7, 2]]])
    assert [ref.shared for ref in rows.refs] == [[(0, 4)], [(0, 4), (1, 5)], [(0, 4), (1, 5)]]
    tree = row_tree(rows.refs)
    assert [[tree.segments[k][1:3] for k in chain] for chain in tree.chains] == [
        [(0, 4), (4, 7)],
        [(0, 4), (4, 5), (5, 8)],
        [(0, 4), (4, 5)],
    ]
    assert tree.tokens == 4 + 3 + 1 + 3 and [len(each.parents) for each in tree.segments] == [0, 2, 1, 1]


@settings(max_examples=200)
@given(st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_tree_of_any_rows_has_their_tokens_once(seed, rng):
    rows = conversations(seed)
    chosen = rng.sample(range(len(rows.refs)), rng.randrange(1, len(rows.refs) + 1))
    refs = [rows.refs[k] for k in chosen]
    tree = row_tree(refs)
    for row, chain in zip(chosen, tree.chains, strict=True):
        parts = [rows.tokens[chosen[s.row]][s.begin : s.end] for s in (tree.segments[k] for k in chain)]
        assert np.concatenate(parts).tolist() == rows.tokens[row].tolist()
        for place, number in enumerate(chain):
            assert tree.segments[number].parents == chain[:place]
    assert all(segment.size for segment in tree.segments)
    plain = sum(ref.length for ref in refs)
    assert tree.tokens <= plain
    for group in {ref.group for ref in refs}:
        own = [ref for ref in refs if ref.group == group]
        beginnings = {rows.tokens[chosen[k]][:n].tobytes() for k, ref in enumerate(refs) if ref in own
                      for n in range(1, ref.length + 1)}  # fmt: skip
        assert row_tree(own).tokens in (len(beginnings), sum(ref.length for ref in own))
        assert unit_size(own) >= len(beginnings)


def test_long_conversation_has_bounded_metadata():
    """Each turn is a row, which begins with the one before it."""
    rows = made([[list(range(k + 2)) for k in range(2000)]])
    assert max(len(ref.shared) for ref in rows.refs) == MOST_BEGINNINGS
    assert rows.refs[-1].shared[:3] == [(0, 2), (1, 3), (2, 4)]


def test_short_common_beginning_does_not_pay():
    """All prompts of a model begin with the same token."""
    rows = made([[[1, *[k] * 40] for k in range(2, 10)]])
    assert row_tree(rows.refs).tokens == sum(ref.length for ref in rows.refs)
    assert tree_units([[ref] for ref in rows.refs]) == [[ref] for ref in rows.refs]


def test_rows_of_a_group_join_up_to_the_capacity():
    rows = made([[[1] * 60 + [k] * 10 for k in range(2, 10)]])
    units = [[ref] for ref in rows.refs]
    assert [len(unit) for unit in tree_units(units)] == [8]
    joined = tree_units(units, 150)
    assert [len(unit) for unit in joined] == [4, 4] and all(unit_size(unit) <= 150 for unit in joined)
    assert unit_size(joined[0]) == 60 + 4 * 10 + 4 * 9  # the keys of each row count an eighth


def test_beginnings_cost_once():
    rows = made([[[1] * 60 + [k] * 10 for k in range(2, 10)]])
    assert tree_cost(rows.refs, token_costs) == 60 + 8 * 10
    tree = row_tree(rows.refs)
    counted = model_flops(SIZES, [s.end for s in tree.segments], 0, [s.begin for s in tree.segments])
    plain = model_flops(SIZES, [70] * 8, 0)
    assert counted == pytest.approx(plain - 7 * model_flops(SIZES, [60], 0))


@pytest.mark.parametrize("dp", [1, 2])
def test_groups_that_share_stay_whole(dp):
    rows = made([[[g] * 60 + [k] * 10 for k in range(8)] for g in range(100, 132)])
    plan = plan_minibatches(rows.refs, 4, dp, token_costs, capacity=1000)
    sizes = [len(part) for minibatch in plan for part in minibatch]
    assert sizes == [256 // 4 // dp] * 4 * dp
    for minibatch in plan:
        for part in minibatch:
            assert all(sum(ref.group == group for ref in part) == 8 for group in {ref.group for ref in part})


def test_few_groups_are_divided():
    """Balance comes first."""
    rows = made([[[1] * 60 + [k] * 10 for k in range(8)]])
    assert [len(part) for [part] in plan_minibatches(rows.refs, 4, 1, token_costs)] == [2] * 4


# ---- Episodes of several rows: ratios and weights over masks with holes, by hand


# Three rows of 1, 2 and 1 tokens; the first and the last are one episode, with advantage 2. The middle one has -1.
# log u = 0.2, -0.5, -0.5, 1.0 and log w = 0.3, -0.1, 0, -0.2
THETA = [-1.0, -2.0, -2.0, -0.5]
PROX = [-1.2, -1.5, -1.5, -1.5]
BEHAV = [-1.5, -1.4, -1.5, -1.3]
ADVANTAGES = [2.0, -1.0, -1.0, 2.0]
LENGTHS = [1, 2, 1]
EPISODES = [7, 3, 7]
GSPO = PPOConfig(loss="gspo", aggregation="sequence", eps_clip=1.0)  # u up to 2: the clip holds no token here
# Episode 7: log u = (0.2 + 1.0) / 2, log w = (0.3 - 0.2) / 2, so -e^0.65 * 2. Episode 3: e^(-0.5 - 0.05).
SEVEN = -3.8310817
THREE = 0.5769498


def segments(episode_tokens=None):
    tokens = None if episode_tokens is None else torch.tensor(episode_tokens)
    return Segments(torch.tensor(LENGTHS), torch.tensor(EPISODES), tokens)


def run(cfg, rows, mask=(True,) * 4, part=slice(None)):
    theta = torch.tensor(THETA)[part].requires_grad_()
    others = (torch.tensor(column)[part] for column in (PROX, BEHAV, ADVANTAGES))
    loss, stats = actor_loss(theta, *others, torch.tensor(mask)[part], 2.0, cfg, segments=rows)
    loss.backward()
    return loss.item(), theta.grad.tolist(), {name: value.item() for name, value in stats.items()}


def test_two_rows_of_one_episode_share_one_ratio():
    loss, gradient, stats = run(GSPO, segments())
    # Each token weighs 1 / 2: both episodes have two tokens.
    assert loss == pytest.approx((SEVEN + THREE) / 2, rel=1e-6)
    assert gradient == pytest.approx([SEVEN / 4, THREE / 4, THREE / 4, SEVEN / 4], rel=1e-6)
    assert stats["u_sum"] == pytest.approx(2 * 1.8221188 + 2 * 0.6065307, rel=1e-6)
    assert stats["w_sum"] == pytest.approx(2 * 1.0512711 + 2 * 0.9512294, rel=1e-6)


def test_mask_with_holes_leaves_ratio_and_count():
    """Token 1 is no loss token: episode 3 is token 2 alone, with log u = -0.5 and log w = 0."""
    loss, gradient, stats = run(GSPO, segments(), [True, False, True, True])
    assert loss == pytest.approx((SEVEN + 0.6065307) / 2, rel=1e-6)
    assert gradient == pytest.approx([SEVEN / 4, 0.0, 0.6065307 / 2, SEVEN / 4], rel=1e-6)
    assert stats["tokens"] == 3


def test_masked_row_leaves_its_episode():
    """The last row is masked: episode 7 is token 0 alone, with log u = 0.2 and log w = 0.3."""
    loss, gradient, _ = run(GSPO, segments(), [True, True, True, False])
    assert loss == pytest.approx((-2 * 1.6487213 + THREE) / 2, rel=1e-6)
    assert gradient[3] == 0.0


def test_episode_tokens_count_rows_elsewhere():
    """Episode 7 has ten loss tokens, eight of them in other micro-batches. Its ratio is that of the two here."""
    loss, gradient, _ = run(GSPO, segments([10.0, 2.0, 10.0]))
    assert loss == pytest.approx((2 * SEVEN / 10 + THREE) / 2, rel=1e-6)
    assert gradient == pytest.approx([SEVEN / 20, THREE / 4, THREE / 4, SEVEN / 20], rel=1e-6)


# Clipped at 1.2 and 0.8: -e^0.3 * 1.2 * 2, e^-0.1 * 0.8, 0.8, -e^-0.2 * 1.2 * 2
PPO_TERMS = [-3.2396611, 0.7238699, 0.8, -1.9649538]


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [("token", [1.0] * 4), ("sequence", [1 / 10, 1 / 2, 1 / 2, 1 / 10]), ("constant", [1.0] * 4)],
)
def test_only_sequence_aggregation_divides_by_episode_tokens(aggregation, weights):
    cfg = PPOConfig.model_validate({"aggregation": aggregation})
    loss, _, _ = run(cfg, segments([10.0, 2.0, 10.0]))
    assert loss == pytest.approx(sum(t * w for t, w in zip(PPO_TERMS, weights, strict=True)) / 2, rel=1e-6)


def test_episode_split_over_micro_batches_adds_up():
    """Mask with a hole: episode 7 has two tokens, episode 3 one. Rows 0 and 1 are apart from row 2."""
    cfg, mask = PPOConfig(aggregation="sequence"), [True, False, True, True]
    whole, gradient, _ = run(cfg, segments(), mask)
    first = Segments(torch.tensor([1, 2]), torch.tensor([7, 3]), torch.tensor([2.0, 1.0]))
    last = Segments(torch.tensor([1]), torch.tensor([7]), torch.tensor([2.0]))
    shares = [run(cfg, first, mask, slice(0, 3)), run(cfg, last, mask, slice(3, 4))]
    assert whole == pytest.approx((PPO_TERMS[0] / 2 + PPO_TERMS[2] + PPO_TERMS[3] / 2) / 2, rel=1e-6)
    assert sum(loss for loss, _, _ in shares) == pytest.approx(whole, rel=1e-6)
    assert [g for _, part, _ in shares for g in part] == gradient


def test_rows_are_episodes_by_default_bit_for_bit():
    generator = torch.Generator().manual_seed(2)
    lengths = torch.tensor([5, 0, 300, 1, 17])
    x = torch.randn(323, generator=generator)
    mask = torch.rand(323, generator=generator) > 0.3
    plain = Segments(lengths)
    named = Segments(lengths, torch.tensor([4, 9, 0, 2, 1]))
    assert torch.equal(plain.means(x, mask), named.means(x, mask))
    assert torch.equal(plain.counted(mask), named.counted(mask))


def test_mean_of_episode_is_mean_of_its_tokens():
    generator = torch.Generator().manual_seed(3)
    lengths, episodes = torch.tensor([4, 2, 0, 7, 1, 3]), torch.tensor([5, 1, 5, 5, 1, 2])
    x = torch.randn(17, generator=generator)
    mask = torch.rand(17, generator=generator) > 0.4
    mask[4] = mask[13] = True  # both rows of episode 1 count
    mask[14:] = False  # episode 2 has no counted token
    rows = Segments(lengths, episodes)
    means, counts = rows.means(x, mask), rows.counted(mask)
    of_token = episodes.repeat_interleave(lengths)
    for episode in (5, 1):
        here = of_token == episode
        kept = x[here & mask].double()
        assert torch.equal(counts[here], torch.full_like(counts[here], len(kept)))
        torch.testing.assert_close(means[here], kept.mean().float().expand(int(here.sum())))
    assert means[14:].tolist() == [0.0] * 3 and counts[14:].tolist() == [0.0] * 3


def test_empty_micro_batch_has_no_loss():
    empty = torch.zeros(0, dtype=torch.int64)
    x = torch.zeros(0, requires_grad=True)
    rows = Segments(empty, empty, torch.zeros(0))
    loss, stats = actor_loss(x, x, x, x, torch.zeros(0, dtype=torch.bool), 2.0, GSPO, segments=rows)
    assert (loss.item(), stats["tokens"].item()) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (Segments(torch.tensor([3])), "lengths sum up to 3, but there are 4 tokens"),
        (Segments(torch.tensor([3]), None, torch.tensor([5.0])), "lengths sum up to 3, but there are 4 tokens"),
        (Segments(torch.tensor([3, 1]), torch.tensor([0])), r"episodes has shape \[1\], lengths has \[2\]"),
        (Segments(torch.tensor([3, 1]), None, torch.tensor([4.0])), r"episode_tokens has shape \[1\], lengths has"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows, problem):
    with pytest.raises(ValueError, match=problem):
        run(PPOConfig(aggregation="sequence"), rows)
