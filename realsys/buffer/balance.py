"""Splitting costs into parts of equal sum: DP ranks, minibatches, micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from realsys.config.schema import Config
from realsys.hf.architecture import ModelSizes
from realsys.types import SequenceRef

Costs = Sequence[int] | Sequence[float] | npt.NDArray[Any]
#: Sequences -> what each costs, in any unit.
CostFunction = Callable[[Sequence[SequenceRef]], list[float]]

#: Differencing costs about `parts` times as much as greedy, so it runs only where greedy leaves more imbalance than
#: this and the problem is of the size of a train step.
_GOOD_ENOUGH = 1e-3
_DIFFERENCING_LIMIT = 400_000  # costs * parts


def token_costs(refs: Sequence[SequenceRef]) -> list[float]:
    """Tokens of each sequence: the cost of everything in a transformer but attention."""
    return [float(ref.length) for ref in refs]


def flop_costs(lengths: Sequence[int] | npt.NDArray[Any], linear: float, quadratic: float) -> npt.NDArray[np.float64]:
    """``linear * s + quadratic * s**2`` for each length s: attention counts where answers are long. [n] -> [n]"""
    s = np.asarray(lengths, np.float64)
    return linear * s + quadratic * s * s


def training_flops(sizes: ModelSizes) -> tuple[float, float]:
    """``(a, b)``: one forward and backward pass over a sequence of s tokens takes ``a*s + b*s^2`` FLOPs.

    A matrix of p weights takes 2p FLOPs per token forwards and twice that backwards (gradients of input and of weight):

        a = 6 * (layers * (hidden * (2*heads + 2*kv_heads) * head_dim + 3 * hidden * ffn) + hidden * outputs)

    for query and output (heads), key and value (kv_heads), gate, up and down (ffn), and the head. Causal attention
    meets s^2/2 pairs of tokens in each head; a pair takes 2 * head_dim for its score and as much for its value:

        b = 3 * layers * heads * (2 + 2) * head_dim / 2 = 6 * layers * heads * head_dim

    Left out, because they are small or alike for all sequences: norms, rotation, softmax, embedding, optimizer, and
    that prompt tokens do not pass the head. Activation recomputation makes it 4/3 as much, bar the head; inference
    takes a third.
    """
    attention = sizes.hidden * (2 * sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    weights = sizes.layers * (attention + 3 * sizes.hidden * sizes.ffn) + sizes.hidden * sizes.outputs
    return 6.0 * weights, 6.0 * sizes.layers * sizes.heads * sizes.head_dim


def cost_function(config: Config, sizes: ModelSizes) -> CostFunction:
    """What ``train.balance`` shares out equally among minibatches and ranks: tokens, or the FLOPs of training.

    Each role has its own, with ``read_sizes(settings.model_dir(paths), settings.head)``.
    """
    if config.train.balance == "tokens":
        return token_costs
    linear, quadratic = training_flops(sizes)

    def costs(refs: Sequence[SequenceRef]) -> list[float]:
        found: list[float] = flop_costs([ref.length for ref in refs], linear, quadratic).tolist()
        return found

    return costs


def split_balanced(costs: Costs, parts: int) -> list[list[int]]:
    """Indices of ``costs`` in ``parts`` parts with the largest sum as small as can be.

    The better of greedy (largest first) and Karmarkar-Karp. Indices ascend within a part; with fewer costs than parts
    some are empty. The same costs always give the same split. Raises ValueError on ``parts < 1`` or a negative cost.
    """
    values = _checked(costs, parts)
    greedy = largest_first(values, parts)
    heaviest, bound = heaviest_sum(greedy, values), lower_bound_of_sum(values, parts)
    if heaviest <= bound * (1 + _GOOD_ENOUGH) or len(values) * parts > _DIFFERENCING_LIMIT:
        return greedy
    differencing = karmarkar_karp(values, parts)
    return differencing if heaviest_sum(differencing, values) < heaviest else greedy


def largest_first(costs: Costs, parts: int) -> list[list[int]]:
    """Greedy: from the largest cost down, each to the part with the smallest sum (ties to the first part)."""
    values = _checked(costs, parts)
    order = np.argsort(-np.asarray(values), kind="stable").tolist() if values else []
    heap = [(0.0, part) for part in range(parts)]
    result: list[list[int]] = [[] for _ in range(parts)]
    for index in order:
        total, part = heap[0]
        result[part].append(index)
        heapq.heapreplace(heap, (total + values[index], part))
    return [sorted(part) for part in result]


def karmarkar_karp(costs: Costs, parts: int) -> list[list[int]]:
    """Largest differencing: take the two partial splits with the widest spread, add the heavy end of one to the light
    end of the other, until one split is left.

    A partial split is its sums, heaviest first and less the lightest, each with a linked pair tree of its members.
    """
    values = _checked(costs, parts)
    if not values:
        return [[] for _ in range(parts)]
    heap: list[tuple[float, int, list[tuple[float, Any]]]] = []
    for index, cost in enumerate(values):
        heap.append((-cost, index, [(cost, index), *[(0.0, None)] * (parts - 1)]))
    heapq.heapify(heap)
    ticket = len(values)  # breaks ties between equal spreads, so that members are never compared
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = [(a + b, _join(x, y)) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: -part[0])
        lightest = joined[-1][0]
        joined = [(total - lightest, members) for total, members in joined]
        heapq.heappush(heap, (-joined[0][0], ticket, joined))
        ticket += 1
    return [sorted(_members(tree)) for _, tree in heap[0][2]]


def heaviest_sum(split: Sequence[Sequence[int]], costs: Costs) -> float:
    """The largest sum of a part."""
    return max((sum(float(costs[i]) for i in part) for part in split), default=0.0)


def lower_bound_of_sum(costs: Costs, parts: int) -> float:
    """No split has a smaller largest sum than the mean, or than the largest cost."""
    values = [float(c) for c in costs]
    return max([sum(values) / parts, *values])


def _checked(costs: Costs, parts: int) -> list[float]:
    values = [float(c) for c in costs]
    if parts < 1:
        raise ValueError(f"cannot split into {parts} parts")
    if values and not min(values) >= 0:
        raise ValueError(f"a cost is negative or not a number: {min(values)}")
    return values


def _join(x: Any, y: Any) -> Any:
    if x is None:
        return y
    return x if y is None else (x, y)


def _members(tree: Any) -> list[int]:
    """Leaves of a pair tree; a loop, because the tree may be as deep as there are costs."""
    found: list[int] = []
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack.extend(node)
        elif node is not None:
            found.append(node)
    return found
