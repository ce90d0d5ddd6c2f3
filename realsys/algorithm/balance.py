"""Split of costs into parts of equal sum: DP ranks, minibatches, micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from realsys.config.schema import Config
from realsys.model_files.architecture import ModelSizes

Costs = Sequence[int] | Sequence[float] | npt.NDArray[Any]
#: Lengths of sequences -> cost of each, in any unit.
CostFunction = Callable[[Sequence[int]], list[float]]

#: Differencing costs about `parts` times as much as greedy. It therefore runs only if greedy leaves more imbalance
#: than this and the problem is not larger than a train step.
_GOOD_ENOUGH = 1e-3
_DIFFERENCING_LIMIT = 400_000  # costs * parts


def token_costs(lengths: Sequence[int]) -> list[float]:
    """Return the tokens of each sequence: the cost of everything in a transformer except attention."""
    return [float(length) for length in lengths]


def flop_costs(lengths: Sequence[int] | npt.NDArray[Any], linear: float, quadratic: float) -> npt.NDArray[np.float64]:
    """Return ``linear * s + quadratic * s**2`` for each length s. The square is the cost of attention. [n] -> [n]"""
    s = np.asarray(lengths, np.float64)
    return linear * s + quadratic * s * s


def training_flops(sizes: ModelSizes) -> tuple[float, float]:
    """Return ``(a, b)``: training on a sequence of s tokens, forwards and backwards, takes ``a*s + b*s^2`` FLOPs.

    A matrix of p weights takes 2p FLOPs per token forwards and twice that backwards (gradients of input and of weight):

        a = 6 * (layers * (hidden * (2*heads + 2*kv_heads) * head_dim + 3 * hidden * ffn) + hidden * outputs)

    for query and output (heads), key and value (kv_heads), gate, up and down (ffn), and the head. Causal attention
    has s^2/2 pairs of tokens in each head; a pair takes 2 * head_dim for its score and the same for its value:

        b = 3 * layers * heads * (2 + 2) * head_dim / 2 = 6 * layers * heads * head_dim

    Norms, rotation, softmax, embedding and optimizer are not counted, because they are small or equal for all
    sequences; nor is it counted that prompt tokens skip the head. Parts that the backward pass computes again
    take 4/3: the head always, layers with activation recomputation. Inference takes a third.
    """
    attention = sizes.hidden * (2 * sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    weights = sizes.layers * (attention + 3 * sizes.hidden * sizes.ffn) + sizes.hidden * sizes.outputs
    return 6.0 * weights, 6.0 * sizes.layers * sizes.heads * sizes.head_dim


def model_flops(
    sizes: ModelSizes,
    lengths: Sequence[int],
    scored: int,
    begins: Sequence[int] = (),
    recomputed: tuple[float, float] = (0.0, 0.0),
) -> float:
    """Return the FLOPs that training on these sequences needs at least: the numerator of the MFU.

    ``begins``: tokens of each that are computed with another one; empty: none. ``recomputed``: shares of the layers and
    of the head whose forward pass is counted twice, for the numerator of the HFU.

    The formula is that of Chowdhery et al. (PaLM, arXiv 2204.02311, appendix B), with causal attention, which has half
    of its pairs, and with the head for ``scored`` tokens only. A forward pass takes a third.
    """
    head, (again, head_again) = 6.0 * sizes.hidden * sizes.outputs, recomputed
    a, b = training_flops(sizes)
    layers = float(flop_costs(lengths, a - head, b).sum() - flop_costs(begins, a - head, b).sum())
    return layers * (1 + again / 3) + head * scored * (1 + head_again / 3)


def cost_function(config: Config, sizes: ModelSizes) -> CostFunction:
    """Return the cost that ``train.balance`` balances over minibatches and ranks: tokens, or FLOPs of training.

    ``sizes`` are those of the role: ``read_sizes(settings.model_dir(paths), settings.head)``.
    """
    if config.train.balance == "tokens":
        return token_costs
    linear, quadratic = training_flops(sizes)

    def costs(lengths: Sequence[int]) -> list[float]:
        flops: list[float] = flop_costs(lengths, linear, quadratic).tolist()
        return flops

    return costs


def split_balanced(costs: Costs, parts: int) -> list[list[int]]:
    """Split the indices of ``costs`` into ``parts`` parts so that the largest sum is small.

    Returns the better result of greedy (largest first) and Karmarkar-Karp. Indices ascend within a part.
    With fewer costs than parts, some parts are empty. The same costs always give the same split. Raises
    ValueError on ``parts < 1`` or a negative cost.
    """
    values = _checked(costs, parts)
    greedy = largest_first(values, parts)
    heaviest, bound = heaviest_sum(greedy, values), lower_bound_of_sum(values, parts)
    if heaviest <= bound * (1 + _GOOD_ENOUGH) or len(values) * parts > _DIFFERENCING_LIMIT:
        return greedy
    differencing = karmarkar_karp(values, parts)
    return differencing if heaviest_sum(differencing, values) < heaviest else greedy


def largest_first(costs: Costs, parts: int) -> list[list[int]]:
    """Split greedily: each cost, from the largest down, to the part with the smallest sum (ties: the first)."""
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
    """Split by largest differencing (Karmarkar and Karp, 1982).

    Takes the two partial splits with the widest spread and adds the heavy end of one to the light end of
    the other, until one split is left. A partial split is a list of sums, heaviest first, with the
    lightest sum subtracted from all; each has a linked pair tree of its members.
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
    """Return the largest sum of a part."""
    return max((sum(float(costs[i]) for i in part) for part in split), default=0.0)


def lower_bound_of_sum(costs: Costs, parts: int) -> float:
    """Return a lower bound of ``heaviest_sum``: the mean of the parts, or the largest cost."""
    values = [float(c) for c in costs]
    return max([sum(values) / parts, *values])


def _checked(costs: Costs, parts: int) -> list[float]:
    values = [float(c) for c in costs]
    if parts < 1:
        raise ValueError(f"cannot split into {parts} parts: must be at least 1")
    if values and not min(values) >= 0:
        raise ValueError(f"a cost is {min(values)}: it must be a number of at least 0")
    return values


def _join(x: Any, y: Any) -> Any:
    if x is None:
        return y
    return x if y is None else (x, y)


def _members(tree: Any) -> list[int]:
    """Return the leaves of a pair tree."""
    members: list[int] = []
    stack = [tree]  # no recursion: the tree may be as deep as the number of costs
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack.extend(node)
        elif node is not None:
            members.append(node)
    return members
