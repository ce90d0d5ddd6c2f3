"""Stand-ins of torch's variable-length attention: a reference in plain torch, behind the signature of any version."""

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

#: parameters of torch.nn.attention.varlen.varlen_attn behind query ... max_k, by torch version
RECORDED = {
    "2.10": ["is_causal", "return_aux"],
    "2.11": ["return_aux", "scale", "window_size"],
    "2.12": ["return_aux", "scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"],
    "2.13": ["return_aux", "scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"],
    "2.14": ["return_aux", "scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"],
}
POSITIONAL = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]


def recorded(version: str, run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``run`` behind the signature of a torch version: other arguments raise TypeError, as there."""

    def varlen_attn(*args: Any, **kwargs: Any) -> torch.Tensor:
        return run(**signature.bind(*args, **kwargs).arguments)

    parameter = inspect.Parameter
    signature = inspect.Signature(
        [
            *(parameter(name, parameter.POSITIONAL_OR_KEYWORD) for name in POSITIONAL),
            *(parameter(name, parameter.KEYWORD_ONLY, default=None) for name in RECORDED[version]),
        ]
    )
    varlen_attn.__signature__ = signature  # type: ignore[attr-defined]
    return varlen_attn


def reference(
    query: Any, key: Any, value: Any, cu_seq_q: Any, scale: float, window_size: Any, cu_seq_k: Any = None, **_: Any
) -> Any:
    """Causal attention segment by segment; differentiable. The last query of a segment sees all of its keys."""
    assert window_size == (-1, 0)
    repeats = query.shape[1] // key.shape[1]
    outputs = []
    cuts = [
        [range(a, b) for a, b in pairwise(ends.tolist())]
        for ends in (cu_seq_q, cu_seq_q if cu_seq_k is None else cu_seq_k)
    ]
    for own, seen in zip(*cuts, strict=True):
        q = query[own.start : own.stop].transpose(0, 1)
        k, v = (x[seen.start : seen.stop].transpose(0, 1) for x in (key, value))
        scores = q @ k.repeat_interleave(repeats, 0).transpose(1, 2) * scale
        hidden = torch.ones(len(own), len(seen), dtype=torch.bool, device=query.device).triu(1 + len(seen) - len(own))
        outputs.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.repeat_interleave(repeats, 0))
    return torch.cat(outputs, 1).transpose(0, 1)
