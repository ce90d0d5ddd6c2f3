"""Memory that is not pinned, because no device copies from it: torch refuses to pin any without a GPU.

SGLang pins the indices and weights of adapters wherever it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def install() -> None:
    import torch

    setattr(torch.Tensor, "pin_memory", lambda self, *_, **__: self)  # noqa: B010
    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, _unpinned(getattr(torch, name)))


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def unpinned(*args: Any, pin_memory: bool = False, **others: Any) -> Any:
        return make(*args, **others)

    return unpinned
