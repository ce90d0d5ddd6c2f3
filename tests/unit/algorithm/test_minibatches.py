"""Balance and minibatches: pure plans."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.algorithm.balance import (
    flop_costs,
    heaviest_sum,
    karmarkar_karp,
    largest_first,
    lower_bound_of_sum,
    split_balanced,
)
from realsys.algorithm.minibatches import plan_minibatches, row_units, sequence_refs
from realsys.types import SampleMeta, SequenceRef
from tests.support.training.sample_records import make_ref

costs_strategy = st.lists(st.integers(0, 100), max_size=30)


def make_refs(lengths: list[int]) -> list[SequenceRef]:
    return [make_ref(f"{i:04d}/0", length, 1, 1.0, False, i) for i, length in enumerate(lengths)]


def totals(split: list[list[int]], costs: list[int]) -> list[int]:
    return [sum(costs[i] for i in part) for part in split]


def test_differencing_beats_greedy_on_bad_case_for_greedy() -> None:
    costs = [8, 7, 6, 5, 4]
    assert sorted(totals(largest_first(costs, 2), costs)) == [13, 17]
    assert sorted(totals(karmarkar_karp(costs, 2), costs)) == [14, 16]
    assert heaviest_sum(split_balanced(costs, 2), costs) == 16


def test_greedy_is_kept_where_it_is_better() -> None:
    costs = [20, 17, 16, 7, 5, 4, 3, 2]
    assert heaviest_sum(karmarkar_karp(costs, 3), costs) == 26
    assert heaviest_sum(split_balanced(costs, 3), costs) == heaviest_sum(largest_first(costs, 3), costs) == 25


@settings(max_examples=120, deadline=None)
@given(costs_strategy, st.integers(1, 6))
def test_every_split_is_a_partition_in_ascending_order(costs: list[int], parts: int) -> None:
    for split in (largest_first(costs, parts), karmarkar_karp(costs, parts), split_balanced(costs, parts)):
        assert len(split) == parts
        assert sorted(i for part in split for i in part) == list(range(len(costs)))
        assert all(part == sorted(part) for part in split)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_split_is_within_four_thirds_of_the_optimum(costs: list[int], parts: int) -> None:
    """Graham's bound for largest-first, against all assignments."""
    optimum = min(
        max(sum(c for c, p in zip(costs, choice, strict=True) if p == part) for part in range(parts))
        for choice in itertools.product(range(parts), repeat=len(costs))
    )
    found = heaviest_sum(split_balanced(costs, parts), costs)
    assert found <= heaviest_sum(largest_first(costs, parts), costs)
    assert lower_bound_of_sum(costs, parts) <= optimum <= found <= optimum * (4 / 3) + 1e-9


def test_split_of_many_costs_is_nearly_even() -> None:
    costs = [(i * 7919) % 997 + 1 for i in range(5000)]
    assert heaviest_sum(split_balanced(costs, 8), costs) <= lower_bound_of_sum(costs, 8) * 1.001


@pytest.mark.parametrize(("costs", "parts", "message"), [([1], 0, "0 parts"), ([1, -1], 2, "a cost is -1.0")])
def test_impossible_splits_are_refused(costs: list[int], parts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_balanced(costs, parts)
    with pytest.raises(ValueError, match="it must be a number of at least 0"):
        split_balanced([float("nan")], 1)


def test_flop_cost_is_linear_plus_quadratic() -> None:
    assert flop_costs([1, 10], 2.0, 0.5).tolist() == [2.5, 70.0]


# ---- minibatches


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(2, 200), max_size=40), st.integers(1, 5), st.integers(1, 4))
def test_each_sequence_has_one_minibatch_and_rank(lengths: list[int], n: int, dp: int) -> None:
    refs = make_refs(lengths)
    plan = plan_minibatches(refs, n, dp)
    assert sorted(r.sample_id for ranks in plan for rank in ranks for r in rank) == [r.sample_id for r in refs]
    assert len(plan) == min(n, len(refs))
    assert all(len(ranks) == dp and any(ranks) for ranks in plan)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 200), min_size=1, max_size=40), st.integers(1, 5))
def test_minibatch_composition_does_not_depend_on_layout(lengths: list[int], n: int) -> None:
    refs = make_refs(lengths)
    composed = {
        dp: [sorted(r.sample_id for rank in ranks for r in rank) for ranks in plan_minibatches(refs, n, dp)]
        for dp in (1, 2, 3, 8)
    }
    assert composed[1] == composed[2] == composed[3] == composed[8]


def test_minibatches_and_ranks_are_balanced_in_tokens() -> None:
    lengths = [20 + (i * 37) % 170 for i in range(512)]
    plan = plan_minibatches(make_refs(lengths), 4, 2)
    minibatches = [sum(r.length for rank in ranks for r in rank) for ranks in plan]
    assert max(minibatches) <= 1.01 * min(minibatches)
    for ranks in plan:
        tokens = [sum(r.length for r in rank) for rank in ranks]
        assert max(tokens) <= 1.01 * min(tokens)


def test_plan_of_nothing_and_of_no_ranks() -> None:
    assert plan_minibatches([], 4, 2) == []
    with pytest.raises(ValueError, match="0 ranks"):
        plan_minibatches(make_refs([3]), 4, 0)


def test_refs_number_the_groups_of_the_batch() -> None:
    def meta(ticket: str, k: int) -> SampleMeta:
        return SampleMeta(f"{ticket}/{k}", ticket, 0, 9 + k, 5 + k, 5.0, k == 1, 3, 3, owner=2, episode=k)

    refs = sequence_refs([[meta("t7", 0), meta("t7", 1)], [meta("t9", 0)]])
    assert [(r.sample_id, r.group, r.length, r.loss_tokens, r.truncated) for r in refs] == [
        ("t7/0", 0, 9, 5, False),
        ("t7/1", 0, 10, 6, True),
        ("t9/0", 1, 9, 5, False),
    ]


def test_refs_number_episodes_and_know_last_row() -> None:
    def meta(ticket: str, episode: int, row: int) -> SampleMeta:
        place = {"episode": episode, "row": row, "episode_tokens": 7}
        name = f"{ticket}/{episode}.{row}"
        return SampleMeta(name, ticket, 0, 9, 5, 5.0, False, 3, 3, owner=2, row_truncated=row == 1, **place)  # type: ignore[arg-type]

    refs = sequence_refs([[meta("t7", 0, 0), meta("t7", 0, 1), meta("t7", 2, 0)], [meta("t9", 0, 0)]])
    assert [(r.group, r.episode, r.last) for r in refs] == [(0, 0, False), (0, 0, True), (0, 1, True), (1, 2, True)]
    assert [r.row_truncated for r in refs] == [False, True, False, False]
    assert {r.episode_tokens for r in refs} == {7}


def episode_refs(rows: list[list[int]]) -> list[SequenceRef]:
    """Rows of these lengths, by episode."""
    return [
        SequenceRef(f"{k:03d}.{r}", length, length - 1, 1.0, False, k, k, sum(lengths) - len(lengths))
        for k, lengths in enumerate(rows)
        for r, length in enumerate(lengths)
    ]


def test_units_hold_neighbouring_rows_up_to_the_capacity() -> None:
    refs = episode_refs([[4, 4, 4], [10], [6, 5, 1]])
    assert [[ref.length for ref in unit] for unit in row_units(refs, 10)] == [[4, 4], [4], [10], [6], [5, 1]]
    assert [[ref.length for ref in unit] for unit in row_units(refs, 0)] == [[4, 4, 4], [10], [6, 5, 1]]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(2, 60), min_size=1, max_size=5), min_size=1, max_size=20),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_rows_of_an_episode_share_minibatch_and_rank(rows: list[list[int]], n: int, dp: int) -> None:
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
def test_work_is_balanced_without_what_is_left_out(ranks: int) -> None:
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


def test_each_minibatch_has_rows_to_compute() -> None:
    refs = make_refs([10] * 12)
    left_out = {ref.sample_id for ref in refs[2:]}
    plan = plan_minibatches(refs, 4, 2, left_out=left_out)
    assert len(plan) == 2
    assert all(any(ref.sample_id not in left_out for rank in part for ref in rank) for part in plan)
    assert len(plan_minibatches(refs, 4, 2, left_out={ref.sample_id for ref in refs})) == 1
