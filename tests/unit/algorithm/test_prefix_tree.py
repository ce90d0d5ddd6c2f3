"""Trees of rows that begin alike: found from tokens, made from metadata, and worth their cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.algorithm.balance import model_flops, token_costs
from realsys.algorithm.minibatches import plan_minibatches
from realsys.algorithm.prefix_tree import MOST_BEGINNINGS, row_tree, shared_beginnings, tree_cost, tree_units, unit_size
from realsys.model_files.architecture import ModelSizes
from realsys.types import SequenceRef

SIZES = ModelSizes(hidden=8, layers=2, heads=4, kv_heads=2, head_dim=2, ffn=12, outputs=100)


@dataclass
class Rows:
    """Rows of several groups, with the metadata that their DP head gives them."""

    refs: list[SequenceRef]
    tokens: list[np.ndarray]


def made(groups: Sequence[Sequence[Sequence[int]]]) -> Rows:
    refs, every = [], []
    for group, rows in enumerate(groups):
        tokens = [np.array(row, np.int32) for row in rows]
        for row, (own, shared) in enumerate(zip(tokens, shared_beginnings(tokens), strict=True)):
            name = f"{group}/{row}"
            refs.append(SequenceRef(name, len(own), 1, 0.0, False, group, len(refs), 1, shared=shared))
        every += tokens
    return Rows(refs, every)


def conversations(seed: int, groups: int = 3, rows: int = 8) -> Rows:
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


def test_drawing_of_the_module() -> None:
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
def test_tree_of_any_rows_has_their_tokens_once(seed: int, rng: random.Random) -> None:
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


def test_long_conversation_has_bounded_metadata() -> None:
    """Each turn is a row, which begins with the one before it."""
    rows = made([[list(range(k + 2)) for k in range(2000)]])
    assert max(len(ref.shared) for ref in rows.refs) == MOST_BEGINNINGS
    assert rows.refs[-1].shared[:3] == [(0, 2), (1, 3), (2, 4)]


def test_short_common_beginning_does_not_pay() -> None:
    """All prompts of a model begin with the same token."""
    rows = made([[[1, *[k] * 40] for k in range(2, 10)]])
    assert row_tree(rows.refs).tokens == sum(ref.length for ref in rows.refs)
    assert tree_units([[ref] for ref in rows.refs]) == [[ref] for ref in rows.refs]


def test_rows_of_a_group_join_up_to_the_capacity() -> None:
    rows = made([[[1] * 60 + [k] * 10 for k in range(2, 10)]])
    units = [[ref] for ref in rows.refs]
    assert [len(unit) for unit in tree_units(units)] == [8]
    joined = tree_units(units, 150)
    assert [len(unit) for unit in joined] == [4, 4] and all(unit_size(unit) <= 150 for unit in joined)
    assert unit_size(joined[0]) == 60 + 4 * 10 + 4 * 9  # the keys of each row count an eighth


def test_beginnings_cost_once() -> None:
    rows = made([[[1] * 60 + [k] * 10 for k in range(2, 10)]])
    assert tree_cost(rows.refs, token_costs) == 60 + 8 * 10
    tree = row_tree(rows.refs)
    counted = model_flops(SIZES, [s.end for s in tree.segments], 0, [s.begin for s in tree.segments])
    plain = model_flops(SIZES, [70] * 8, 0)
    assert counted == pytest.approx(plain - 7 * model_flops(SIZES, [60], 0))


@pytest.mark.parametrize("dp", [1, 2])
def test_groups_that_share_stay_whole(dp: int) -> None:
    rows = made([[[g] * 60 + [k] * 10 for k in range(8)] for g in range(100, 132)])
    plan = plan_minibatches(rows.refs, 4, dp, token_costs, capacity=1000)
    sizes = [len(part) for minibatch in plan for part in minibatch]
    assert sizes == [256 // 4 // dp] * 4 * dp
    for minibatch in plan:
        for part in minibatch:
            assert all(sum(ref.group == group for ref in part) == 8 for group in {ref.group for ref in part})


def test_few_groups_are_divided() -> None:
    """Balance comes first."""
    rows = made([[[1] * 60 + [k] * 10 for k in range(8)]])
    assert [len(part) for [part] in plan_minibatches(rows.refs, 4, 1, token_costs)] == [2] * 4
