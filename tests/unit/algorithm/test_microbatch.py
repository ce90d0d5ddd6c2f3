"""Packing sequences into micro-batches: Algorithm 1 step by step, and what every packer owes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.algorithm.microbatch import Packer, balanced, fewest_sequences, first_fit, pack, pack_equal
from realsys.errors import DataError
from tests.support.training import packers
from tests.support.training.lengths import bimodal, heavy, lognormal, uniform

PACKERS = [fewest_sequences, first_fit, balanced]
CAPACITY = 40
length_lists = st.lists(st.integers(1, CAPACITY), max_size=60)


def sums(batches: list[list[int]], lengths: list[int]) -> list[int]:
    return [sum(lengths[i] for i in batch) for batch in batches]


def test_algorithm_1_takes_the_fewest_sequences() -> None:
    # 6 | 5: no room -> new | 4: to 5, which could take it first | 3: to 6 | 2: nowhere -> new | 1: [2] has the fewest
    assert fewest_sequences([6, 5, 4, 3, 2, 1], 10) == [[0, 3], [1, 2], [4, 5]]
    # 7 | 3 fits exactly with 7; 2 and 1 then open and fill another
    assert fewest_sequences([7, 3, 2, 1], 10) == [[0, 1], [2, 3]]


def test_algorithm_1_opens_k_min_micro_batches_first() -> None:
    assert fewest_sequences([1, 4, 2, 3], 100, 3) == [[1, 0], [3], [2]]


@settings(max_examples=150, deadline=None)
@given(length_lists, st.integers(1, 6))
def test_algorithm_1_holds_at_every_placement(lengths: list[int], k_min: int) -> None:
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
def test_every_packer_partitions_within_capacity(packer: Packer, lengths: list[int], k_min: int) -> None:
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
def test_balanced_is_no_worse_than_first_fit(lengths: list[int], k_min: int) -> None:
    reference, found = first_fit(lengths, CAPACITY, k_min), balanced(lengths, CAPACITY, k_min)
    assert len(found) == len(reference)
    assert len(found) == min(len(lengths), max(k_min, len(first_fit(lengths, CAPACITY))))
    assert max(sums(found, lengths), default=0) <= max(CAPACITY, max(sums(reference, lengths), default=0))


def naive_first_fit(lengths: list[int]) -> list[int]:
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
def test_first_fit_is_first_fit_decreasing(lengths: list[int]) -> None:
    assert sums(first_fit(lengths, CAPACITY), lengths) == naive_first_fit(lengths)


@pytest.mark.parametrize("packer", PACKERS)
def test_heavy_tail_stays_near_the_lower_bound(packer: Packer) -> None:
    rng = np.random.default_rng(7)
    lengths = np.clip((300 * (1 + rng.pareto(1.1, 20_000))).astype(np.int64), 1, 28_672)
    batches = packer(lengths, 32_768)
    assert len(batches) <= 1.02 * packers.lower_bound(lengths, 32_768)


def test_balanced_evens_out_what_first_fit_leaves() -> None:
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
def test_sequence_that_cannot_be_packed_is_named(packer: Packer, lengths: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        packer(lengths, 40)


@pytest.mark.parametrize("packer", PACKERS)
def test_nothing_to_pack(packer: Packer) -> None:
    assert packer([], 40, 3) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(length_lists, min_size=1, max_size=4), st.integers(1, 5))
def test_ranks_stay_in_step(ranks: list[list[int]], k_min: int) -> None:
    equal = pack_equal(ranks, CAPACITY, k_min)
    counts = {len(batches) for batches in equal}
    assert counts == {max([k_min, *(len(pack(own, CAPACITY)) for own in ranks)])}
    for own, batches in zip(ranks, equal, strict=True):
        assert sorted(i for batch in batches for i in batch) == list(range(len(own)))
        assert all(total <= CAPACITY for total in sums(batches, own))
        assert sum(not batch for batch in batches) == max(0, len(batches) - len(own)), "dummies only for want of work"


def test_balanced_spreads_costs_within_the_capacity() -> None:
    """One sequence of 32 costs as much as 18 of 4: by tokens, the micro-batch with it would be the slowest."""
    lengths = [32, *[4] * 24]
    costs = [length + length**2 / 16 for length in lengths]

    def heaviest(batches: list[list[int]]) -> float:
        return max(sum(costs[i] for i in batch) for batch in batches)

    by_tokens, by_cost = balanced(lengths, 80, 2), balanced(lengths, 80, 2, costs)
    assert len(by_cost) == 2 and all(sum(lengths[i] for i in batch) <= 80 for batch in by_cost)
    assert heaviest(by_cost) < 0.9 * heaviest(by_tokens)
    assert heaviest(pack_equal([lengths], 80, 2, [costs])[0]) == heaviest(by_cost)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 6))
def test_costs_change_neither_count_nor_capacity(lengths: list[int], k_min: int) -> None:
    costs = [length**2 for length in lengths]
    batches = balanced(lengths, 40, k_min, costs)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in batch) <= 40 for batch in batches)
    assert len(batches) == len(balanced(lengths, 40, k_min))


def test_packers_accept_numpy_and_return_plain_integers() -> None:
    batches = pack(np.array([5, 4, 3], np.int32), 8)
    assert all(type(i) is int for batch in batches for i in batch)


@pytest.mark.parametrize("packer", PACKERS)
def test_packing_is_not_quadratic(packer: Packer) -> None:
    """100,000 sequences in 40,000 micro-batches: a scan over the open ones would be 2e9 comparisons."""
    lengths = np.random.default_rng(3).integers(1, 28_672, 100_000)
    assert len(packer(lengths, 32_768)) <= 1.01 * packers.lower_bound(lengths, 32_768)


@pytest.mark.parametrize("make", [heavy, lognormal, uniform, bimodal])
def test_default_is_the_packer_the_benchmark_would_choose(make: Callable[..., npt.NDArray[np.int64]]) -> None:
    """Fewest micro-batches; among those the most even. Recomputed small, so that a new packer has to win it."""
    batches = [make(np.random.default_rng(seed), 128) for seed in range(5)]
    figures = {name: packers.measure(packer, batches, repeat=1) for name, packer in packers.PACKERS.items()}
    safe = {name: row for name, row in figures.items() if row["peak"] <= 1 and name != "same_count"}
    default = next(row for name, row in figures.items() if packers.PACKERS[name] is pack)
    assert default["batches"] == min(row["batches"] for row in safe.values())
    assert default["max/mean"] == min(row["max/mean"] for row in safe.values() if row["batches"] == default["batches"])
    assert all(max(sums(pack(b, packers.CAPACITY), b.tolist())) <= packers.CAPACITY for b in batches)
