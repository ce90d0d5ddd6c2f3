"""Packing sequences into micro-batches: Algorithm 1 step by step, and what every packer owes."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from realsys.algorithm.balance import (
    cost_function,
    heaviest_sum,
    karmarkar_karp,
    largest_first,
    lower_bound_of_sum,
    model_flops,
    split_balanced,
    training_flops,
)
from realsys.algorithm.microbatch import balanced, fewest_sequences, first_fit, pack, pack_equal
from realsys.algorithm.minibatches import plan_minibatches, row_units, sequence_refs
from realsys.config.schema import Config
from realsys.errors import DataError
from realsys.model_files.architecture import ModelSizes
from realsys.types import SampleMeta, SequenceRef
from tests.support.training import packers
from tests.support.training.packers import bimodal, heavy, lognormal, uniform
from tests.support.training.sample_records import make_ref

PACKERS = [fewest_sequences, first_fit, balanced]
CAPACITY = 40
length_lists = st.lists(st.integers(1, CAPACITY), max_size=60)


def sums(batches, lengths):
    return [sum(lengths[i] for i in batch) for batch in batches]


def test_algorithm_1_takes_the_fewest_sequences():
    # 6 | 5: no room -> new | 4: to 5, which could take it first | 3: to 6 | 2: nowhere -> new | 1: [2] has the fewest
    assert fewest_sequences([6, 5, 4, 3, 2, 1], 10) == [[0, 3], [1, 2], [4, 5]]
    # 7 | 3 fits exactly with 7; 2 and 1 then open and fill another
    assert fewest_sequences([7, 3, 2, 1], 10) == [[0, 1], [2, 3]]


def test_algorithm_1_opens_k_min_micro_batches_first():
    assert fewest_sequences([1, 4, 2, 3], 100, 3) == [[1, 0], [3], [2]]


@settings(max_examples=150, deadline=None)
@given(length_lists, st.integers(1, 6))
def test_algorithm_1_holds_at_every_placement(lengths, k_min):
    """Replays the result: each placement must be one the pseudo-code allows."""
    batches = fewest_sequences(lengths, CAPACITY, k_min)
    home = {index: b for b, batch in enumerate(batches) for index in batch}
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    # within equal lengths the packer's own order: as they appear in their micro-batches
    content: list[list[int]] = [[] for _ in batches]
    opened = 0
    for length in sorted(set(lengths), reverse=True):
        run = [i for i in order if lengths[i] == length]
        while run:
            fitting = [b for b in range(opened) if sum(content[b]) + length <= CAPACITY]
            if opened < k_min or not fitting:
                allowed = {opened}
            else:
                fewest = min(len(content[b]) for b in fitting)
                allowed = {b for b in fitting if len(content[b]) == fewest}
            index = next((i for i in run if home[i] in allowed), None)
            assert index is not None, f"no sequence of {length} tokens went to {allowed}: {batches}"
            opened += home[index] == opened
            content[home[index]].append(length)
            run.remove(index)
    assert opened == len(batches)


@pytest.mark.parametrize("packer", PACKERS)
@settings(max_examples=100, deadline=None)
@given(lengths=length_lists, k_min=st.integers(1, 8))
def test_every_packer_partitions_within_capacity(packer, lengths, k_min):
    batches = packer(lengths, CAPACITY, k_min)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(batches), "an empty micro-batch is a forward pass on nothing"
    assert all(total <= CAPACITY for total in sums(batches, lengths))
    assert len(batches) >= packers.lower_bound(lengths, CAPACITY, k_min)
    if k_min == 1:
        # two micro-batches at most half full would have been one
        assert sum(2 * total <= CAPACITY for total in sums(batches, lengths)) <= 1 or packer is balanced


@settings(max_examples=150, deadline=None)
@given(length_lists, st.integers(1, 8))
def test_balanced_is_no_worse_than_first_fit(lengths, k_min):
    reference, found = first_fit(lengths, CAPACITY, k_min), balanced(lengths, CAPACITY, k_min)
    assert len(found) == len(reference)
    assert len(found) == min(len(lengths), max(k_min, len(first_fit(lengths, CAPACITY))))
    assert max(sums(found, lengths), default=0) <= max(CAPACITY, max(sums(reference, lengths), default=0))


def naive_first_fit(lengths):
    """Sums of plain first-fit decreasing."""
    totals: list[int] = []
    for length in sorted(lengths, reverse=True):
        for b, total in enumerate(totals):
            if total + length <= CAPACITY:
                totals[b] += length
                break
        else:
            totals.append(length)
    return totals


@settings(max_examples=150, deadline=None)
@given(length_lists)
def test_first_fit_is_first_fit_decreasing(lengths):
    assert sums(first_fit(lengths, CAPACITY), lengths) == naive_first_fit(lengths)


@pytest.mark.parametrize("packer", PACKERS)
def test_heavy_tail_stays_near_the_lower_bound(packer):
    rng = np.random.default_rng(7)
    lengths = np.clip((300 * (1 + rng.pareto(1.1, 20_000))).astype(np.int64), 1, 28_672)
    batches = packer(lengths, 32_768)
    assert len(batches) <= 1.02 * packers.lower_bound(lengths, 32_768)


def test_balanced_evens_out_what_first_fit_leaves():
    lengths = [10] * 11
    assert sorted(sums(first_fit(lengths, 40), lengths)) == [30, 40, 40]
    assert sorted(sums(balanced([10] * 9, 40), [10] * 9)) == [30, 30, 30]


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, 41, 40], "sequence 1 has 41 tokens.*micro-batch holds 40.*microbatch_tokens"),
        ([3, 1, 0], "sequence 2 has 0 tokens"),
    ],
)
def test_sequence_that_cannot_be_packed_is_named(packer, lengths, message):
    with pytest.raises(DataError, match=message):
        packer(lengths, 40)


@pytest.mark.parametrize("packer", PACKERS)
def test_nothing_to_pack(packer):
    assert packer([], 40, 3) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(length_lists, min_size=1, max_size=4), st.integers(1, 5))
def test_ranks_stay_in_step(ranks, k_min):
    equal = pack_equal(ranks, CAPACITY, k_min)
    counts = {len(batches) for batches in equal}
    assert counts == {max([k_min, *(len(pack(own, CAPACITY)) for own in ranks)])}
    for own, batches in zip(ranks, equal, strict=True):
        assert sorted(i for batch in batches for i in batch) == list(range(len(own)))
        assert all(total <= CAPACITY for total in sums(batches, own))
        assert sum(not batch for batch in batches) == max(0, len(batches) - len(own)), "dummies only for want of work"


def test_balanced_spreads_costs_within_the_capacity():
    """One sequence of 32 costs as much as 18 of 4: by tokens, the micro-batch with it would be the slowest."""
    lengths = [32, *[4] * 24]
    costs = [length + length**2 / 16 for length in lengths]

    def heaviest(batches):
        return max(sum(costs[i] for i in batch) for batch in batches)

    by_tokens, by_cost = balanced(lengths, 80, 2), balanced(lengths, 80, 2, costs)
    assert len(by_cost) == 2 and all(sum(lengths[i] for i in batch) <= 80 for batch in by_cost)
    assert heaviest(by_cost) < 0.9 * heaviest(by_tokens)
    assert heaviest(pack_equal([lengths], 80, 2, [costs])[0]) == heaviest(by_cost)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 6))
def test_costs_change_neither_count_nor_capacity(lengths, k_min):
    costs = [length**2 for length in lengths]
    batches = balanced(lengths, 40, k_min, costs)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in batch) <= 40 for batch in batches)
    assert len(batches) == len(balanced(lengths, 40, k_min))


def test_packers_accept_numpy_and_return_plain_integers():
    batches = pack(np.array([5, 4, 3], np.int32), 8)
    assert all(type(i) is int for batch in batches for i in batch)


@pytest.mark.parametrize("packer", PACKERS)
def test_packing_is_not_quadratic(packer):
    """100,000 sequences in 40,000 micro-batches: a scan over the open ones would be 2e9 comparisons."""
    lengths = np.random.default_rng(3).integers(1, 28_672, 100_000)
    assert len(packer(lengths, 32_768)) <= 1.01 * packers.lower_bound(lengths, 32_768)


@pytest.mark.parametrize("make", [heavy, lognormal, uniform, bimodal])
def test_default_is_the_packer_the_benchmark_would_choose(make):
    """Fewest micro-batches; among those the most even. Recomputed small, so that a new packer has to win it."""
    batches = [make(np.random.default_rng(seed), 128) for seed in range(5)]
    figures = {name: packers.measure(packer, batches, repeat=1) for name, packer in packers.PACKERS.items()}
    safe = {name: row for name, row in figures.items() if row["peak"] <= 1 and name != "same_count"}
    default = next(row for name, row in figures.items() if packers.PACKERS[name] is pack)
    assert default["batches"] == min(row["batches"] for row in safe.values())
    assert default["max/mean"] == min(row["max/mean"] for row in safe.values() if row["batches"] == default["batches"])
    assert all(max(sums(pack(b, packers.CAPACITY), b.tolist())) <= packers.CAPACITY for b in batches)


# ---- Balance and minibatches: pure plans


costs_strategy = st.lists(st.integers(0, 100), max_size=30)


def make_refs(lengths):
    return [make_ref(f"{i:04d}/0", length, 1, 1.0, False, i) for i, length in enumerate(lengths)]


def totals(split, costs):
    return [sum(costs[i] for i in part) for part in split]


def test_differencing_beats_greedy_on_bad_case_for_greedy():
    costs = [8, 7, 6, 5, 4]
    assert sorted(totals(largest_first(costs, 2), costs)) == [13, 17]
    assert sorted(totals(karmarkar_karp(costs, 2), costs)) == [14, 16]
    assert heaviest_sum(split_balanced(costs, 2), costs) == 16


def test_greedy_is_kept_where_it_is_better():
    costs = [20, 17, 16, 7, 5, 4, 3, 2]
    assert heaviest_sum(karmarkar_karp(costs, 3), costs) == 26
    assert heaviest_sum(split_balanced(costs, 3), costs) == heaviest_sum(largest_first(costs, 3), costs) == 25


@settings(max_examples=120, deadline=None)
@given(costs_strategy, st.integers(1, 6))
def test_every_split_is_a_partition_in_ascending_order(costs, parts):
    for split in (largest_first(costs, parts), karmarkar_karp(costs, parts), split_balanced(costs, parts)):
        assert len(split) == parts
        assert sorted(i for part in split for i in part) == list(range(len(costs)))
        assert all(part == sorted(part) for part in split)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_split_is_within_four_thirds_of_the_optimum(costs, parts):
    """Graham's bound for largest-first, against all assignments."""
    optimum = min(
        max(sum(c for c, p in zip(costs, choice, strict=True) if p == part) for part in range(parts))
        for choice in itertools.product(range(parts), repeat=len(costs))
    )
    found = heaviest_sum(split_balanced(costs, parts), costs)
    assert found <= heaviest_sum(largest_first(costs, parts), costs)
    assert lower_bound_of_sum(costs, parts) <= optimum <= found <= optimum * (4 / 3) + 1e-9


def test_split_of_many_costs_is_nearly_even():
    costs = [(i * 7919) % 997 + 1 for i in range(5000)]
    assert heaviest_sum(split_balanced(costs, 8), costs) <= lower_bound_of_sum(costs, 8) * 1.001


@pytest.mark.parametrize(("costs", "parts", "message"), [([1], 0, "0 parts"), ([1, -1], 2, "a cost is -1.0")])
def test_impossible_splits_are_refused(costs, parts, message):
    with pytest.raises(ValueError, match=message):
        split_balanced(costs, parts)
    with pytest.raises(ValueError, match="it must be a number of at least 0"):
        split_balanced([float("nan")], 1)


# ---- minibatches


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(2, 200), max_size=40), st.integers(1, 5), st.integers(1, 4))
def test_each_sequence_has_one_minibatch_and_rank(lengths, n, dp):
    refs = make_refs(lengths)
    plan = plan_minibatches(refs, n, dp)
    assert sorted(r.sample_id for ranks in plan for rank in ranks for r in rank) == [r.sample_id for r in refs]
    assert len(plan) == min(n, len(refs))
    assert all(len(ranks) == dp and any(ranks) for ranks in plan)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 200), min_size=1, max_size=40), st.integers(1, 5))
def test_minibatch_composition_does_not_depend_on_layout(lengths, n):
    refs = make_refs(lengths)
    composed = {
        dp: [sorted(r.sample_id for rank in ranks for r in rank) for ranks in plan_minibatches(refs, n, dp)]
        for dp in (1, 2, 3, 8)
    }
    assert composed[1] == composed[2] == composed[3] == composed[8]


def test_minibatches_and_ranks_are_balanced_in_tokens():
    lengths = [20 + (i * 37) % 170 for i in range(512)]
    plan = plan_minibatches(make_refs(lengths), 4, 2)
    minibatches = [sum(r.length for rank in ranks for r in rank) for ranks in plan]
    assert max(minibatches) <= 1.01 * min(minibatches)
    for ranks in plan:
        tokens = [sum(r.length for r in rank) for rank in ranks]
        assert max(tokens) <= 1.01 * min(tokens)


def test_plan_of_nothing_and_of_no_ranks():
    assert plan_minibatches([], 4, 2) == []
    with pytest.raises(ValueError, match="0 ranks"):
        plan_minibatches(make_refs([3]), 4, 0)


def test_refs_number_the_groups_of_the_batch():
    def meta(ticket, k):
        return SampleMeta(f"{ticket}/{k}", ticket, 0, 9 + k, 5 + k, 5.0, k == 1, 3, 3, owner=2, episode=k)

    refs = sequence_refs([[meta("t7", 0), meta("t7", 1)], [meta("t9", 0)]])
    assert [(r.sample_id, r.group, r.length, r.loss_tokens, r.truncated) for r in refs] == [
        ("t7/0", 0, 9, 5, False),
        ("t7/1", 0, 10, 6, True),
        ("t9/0", 1, 9, 5, False),
    ]


def test_refs_number_episodes_and_know_last_row():
    def meta(ticket, episode, row):
        place = {"episode": episode, "row": row, "episode_tokens": 7}
        name = f"{ticket}/{episode}.{row}"
        return SampleMeta(name, ticket, 0, 9, 5, 5.0, False, 3, 3, owner=2, row_truncated=row == 1, **place)  # type: ignore[arg-type]

    refs = sequence_refs([[meta("t7", 0, 0), meta("t7", 0, 1), meta("t7", 2, 0)], [meta("t9", 0, 0)]])
    assert [(r.group, r.episode, r.last) for r in refs] == [(0, 0, False), (0, 0, True), (0, 1, True), (1, 2, True)]
    assert [r.row_truncated for r in refs] == [False, True, False, False]
    assert {r.episode_tokens for r in refs} == {7}


def episode_refs(rows):
    """Rows of these lengths, by episode."""
    return [
        SequenceRef(f"{k:03d}.{r}", length, length - 1, 1.0, False, k, k, sum(lengths) - len(lengths))
        for k, lengths in enumerate(rows)
        for r, length in enumerate(lengths)
    ]


def test_units_hold_neighbouring_rows_up_to_the_capacity():
    refs = episode_refs([[4, 4, 4], [10], [6, 5, 1]])
    assert [[ref.length for ref in unit] for unit in row_units(refs, 10)] == [[4, 4], [4], [10], [6], [5, 1]]
    assert [[ref.length for ref in unit] for unit in row_units(refs, 0)] == [[4, 4, 4], [10], [6, 5, 1]]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(2, 60), min_size=1, max_size=5), min_size=1, max_size=20),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_rows_of_an_episode_share_minibatch_and_rank(rows, n, dp):
    refs, capacity = episode_refs(rows), 100
    plan = plan_minibatches(refs, n, dp, capacity=capacity)
    assert sorted(r.sample_id for ranks in plan for rank in ranks for r in rank) == [r.sample_id for r in refs]
    minibatches: dict[int, set[int]] = {}
    ranks_of: dict[int, set[int]] = {}
    for m, ranks in enumerate(plan):
        for d, rank in enumerate(ranks):
            for ref in rank:
                minibatches.setdefault(ref.episode, set()).add(m)
                ranks_of.setdefault(ref.episode, set()).add(d)
    assert all(len(found) == 1 for found in minibatches.values())
    whole = [k for k, lengths in enumerate(rows) if sum(lengths) <= capacity]
    assert all(len(ranks_of[k]) == 1 for k in whole)


@pytest.mark.parametrize("ranks", [8, 64])
def test_work_is_balanced_without_what_is_left_out(ranks):
    """Half of the groups have no advantage. A plan with them gives the slowest of 64 ranks 1.6 times the mean."""
    rng = np.random.default_rng(3)
    refs = make_refs(np.minimum(rng.lognormal(8.0, 1.0, 8192), 32_000).astype(int).tolist())
    left_out = {ref.sample_id for ref in refs if rng.random() < 0.5}
    plan = plan_minibatches(refs, 4, ranks, left_out=left_out)
    assert Counter(ref.sample_id for part in plan for rank in part for ref in rank) == Counter(
        ref.sample_id for ref in refs
    )
    work = [sum(r.length for part in plan for r in part[d] if r.sample_id not in left_out) for d in range(ranks)]
    assert max(work) < 1.02 * sum(work) / ranks
    denominators = [sum(ref.loss_tokens for rank in part for ref in rank) for part in plan]
    assert max(denominators) < 1.1 * min(denominators), "minibatches must keep equal weights"


def test_each_minibatch_has_rows_to_compute():
    refs = make_refs([10] * 12)
    left_out = {ref.sample_id for ref in refs[2:]}
    plan = plan_minibatches(refs, 4, 2, left_out=left_out)
    assert len(plan) == 2
    assert all(any(ref.sample_id not in left_out for rank in part for ref in rank) for part in plan)
    assert len(plan_minibatches(refs, 4, 2, left_out={ref.sample_id for ref in refs})) == 1


# ---- What a sequence costs: sizes of a model, the formula by hand and as torch counts it, and plans that use it


SIZES = ModelSizes(hidden=8, layers=2, heads=4, kv_heads=2, head_dim=2, ffn=12, outputs=20)
HF = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "vocab_size": 20,
}
BY_TOKENS, BY_FLOPS = (Config.model_validate({"train": {"balance": kind}}) for kind in ("tokens", "flops"))


def lengths_of(plan):
    return [[sorted(ref.length for ref in part) for part in minibatch] for minibatch in plan]


def test_flops_of_a_small_model_by_hand():
    # A layer: q and o 8x8, k and v 8x4, three of 8x12: 64 + 64 + 32 + 32 + 288 = 480 weights. Head: 8x20 = 160.
    # Two layers and the head: 1120 weights, 2 FLOPs each forwards and 4 backwards.
    # A pair of tokens: (2 * 2 + 2 * 2) FLOPs in each of 4 heads of 2 layers = 64; times 3; half the pairs are met.
    assert training_flops(SIZES) == (6720.0, 96.0)


def test_model_flops_have_the_head_for_scored_tokens_only():
    # The head takes 6 * 160 = 960 FLOPs per token; 13 - 4 tokens skip it.
    assert model_flops(SIZES, [10, 3], scored=4) == 6720 * 13 + 96 * (100 + 9) - 960 * 9


def test_recomputed_layers_add_a_forward_pass():
    """Without the head, whose 4 tokens take 960 FLOPs each."""
    layers = model_flops(SIZES, [10, 3], scored=4) - 960 * 4
    assert model_flops(SIZES, [10, 3], scored=4, recomputed=(0.5, 1.0)) == layers * (1 + 0.5 / 3) + 960 * 4 * 4 / 3


def test_flops_are_those_that_torch_counts():
    model = Qwen2ForCausalLM(
        Qwen2Config(**HF, attn_implementation="eager", tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)
    )
    linear, quadratic = training_flops(SIZES)
    for tokens in (7, 32):
        with FlopCounterMode(display=False) as counter:
            model(torch.ones(1, tokens, dtype=torch.int64)).logits.sum().backward()
        angles = 2 * tokens  # positions x frequencies as a product of matrices, head_dim / 2 wide, forwards only
        # Eager attention computes all pairs, not only the causal half.
        assert counter.get_total_flops() - angles == linear * tokens + 2 * quadratic * tokens**2


def test_a_value_head_has_one_output():
    # As above, with a head of 8x1 weights: 960 + 8 = 968.
    value = ModelSizes(hidden=8, layers=2, heads=4, kv_heads=2, head_dim=2, ffn=12, outputs=1)
    assert training_flops(value) == (5808.0, 96.0)


def test_cost_is_what_the_configuration_balances():
    refs = [10, 100]
    assert cost_function(BY_TOKENS, SIZES)(refs) == [10.0, 100.0]
    assert cost_function(BY_FLOPS, SIZES)(refs) == [67_200.0 + 9_600.0, 672_000.0 + 960_000.0]
    assert cost_function(BY_FLOPS, SIZES)([]) == []


def test_long_sequence_costs_more_than_its_tokens():
    """One long sequence is as much work as many short ones with more tokens together."""
    # One of 100 tokens: 1,632,000 FLOPs. One of 20: 134,400 + 38,400 = 172,800, so ten of them: 1,728,000.
    refs = make_refs([20] * 10 + [100])
    by_flops = plan_minibatches(refs, 1, 2, cost_function(BY_FLOPS, SIZES))
    assert sorted(lengths_of(by_flops)[0]) == [[20] * 10, [100]]
    by_tokens = plan_minibatches(refs, 1, 2, cost_function(BY_TOKENS, SIZES))
    assert sorted(sum(part) for part in lengths_of(by_tokens)[0]) == [140, 160]
    # The split into minibatches balances the same.
    assert sorted(part for [part] in lengths_of(plan_minibatches(refs, 2, 1, cost_function(BY_FLOPS, SIZES)))) == [
        [20] * 10,
        [100],
    ]
