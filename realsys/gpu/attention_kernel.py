"""Variable-length attention on CUDA: the call of torch's kernel, chosen once by the kernel's signature.

torch 2.11 and 2.12 differ. In 2.11 the kernel takes grouped query heads as they are and has no ``enable_gqa``; from
2.12 on it refuses them without ``enable_gqa``. A kernel without ``window_size`` or ``scale`` (torch 2.10) cannot
compute causal attention as it is called here, and is refused by name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

from realsys.errors import DeviceError

log = logging.getLogger(__name__)

#: query [t, heads, d], key and value [t, kv_heads, d], ends int32 [segments + 1], longest segment, scale -> like query
AttentionKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float], torch.Tensor]

_NEEDED = frozenset({"scale", "window_size"})
_CAUSAL = (-1, 0)
_WIDTH_STEP = 8  # the kernel's backward pass needs heads whose width is a multiple of it
_HOPPER = 9  # major compute capability of the only devices that FlashAttention 3 supports
_FA3, _FA3_MODULE = "FA3", "flash_attn_interface"
_RESTORE = "restore_flash_attention_impl"


def choose_kernel(varlen_attn: Callable[..., Any], version: str = torch.__version__) -> AttentionKernel:
    """Return causal attention within segments by ``varlen_attn``. Raises DeviceError if its signature does not fit."""
    parameters = inspect.signature(varlen_attn).parameters
    if missing := sorted(_NEEDED - parameters.keys()):
        problem = f"varlen_attn of torch {version} has no parameter {' and no '.join(missing)}"
        raise DeviceError(f"{problem}: install torch 2.11, 2.12 or 2.13")
    names_gqa = "enable_gqa" in parameters

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, longest: int, scale: float
    ) -> torch.Tensor:
        grouped = {"enable_gqa": query.shape[1] != key.shape[1]} if names_gqa else {}
        width = query.shape[-1]
        missing = -width % _WIDTH_STEP
        if missing:  # zeros add nothing to a score, and the values' zeros are cut off again
            query, key, value = (torch.nn.functional.pad(each, (0, missing)) for each in (query, key, value))
        arguments = (query, key, value, ends, ends, longest, longest)
        out = varlen_attn(*arguments, scale=scale, window_size=_CAUSAL, **grouped)
        assert isinstance(out, torch.Tensor)
        return out[..., :width] if missing else out  # the backward pass of a slice costs a copy

    return attend


@functools.cache
def attention_kernel() -> AttentionKernel:
    """Return the kernel of the installed torch. Raises DeviceError if it has none that fits."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        problem = f"torch {torch.__version__} has no torch.nn.attention.varlen.varlen_attn"
        raise DeviceError(f"{problem}: install torch 2.11, 2.12 or 2.13") from None
    kernel = choose_kernel(varlen_attn)
    fast = activate_flash_attention_3(lambda: _try(kernel))
    log.info("attention kernel: varlen_attn of torch %s%s", torch.__version__, ", FlashAttention 3" if fast else "")
    return kernel


def activate_flash_attention_3(trial: Callable[[], None]) -> bool:
    """Let torch's kernel run FlashAttention 3 if this GPU and the installation have it. Return True if it does.

    ``trial`` computes something with it. If it raises, torch's own implementation is put back. With deterministic
    algorithms that one stays, because its backward pass has them.
    """
    if torch.are_deterministic_algorithms_enabled():
        return False
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != _HOPPER:
        return False
    attention = importlib.import_module("torch.nn.attention")
    # An older torch knows other implementations only, or none, and may be unable to put its own back.
    known: list[str] = getattr(attention, "list_flash_attention_impls", list)()
    if _FA3 not in known or not hasattr(attention, _RESTORE) or importlib.util.find_spec(_FA3_MODULE) is None:
        return False
    try:
        attention.activate_flash_attention_impl(_FA3)
        trial()
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        # Such as a wheel for another torch or another CUDA. Torch's own implementation computes the same.
        log.warning("FlashAttention 3 is installed but does not run, torch's own kernel is used instead: %s", error)
        getattr(attention, _RESTORE)()
        return False
    return True


def _try(kernel: AttentionKernel) -> None:
    """Compute one small segment and its gradients on the current GPU."""
    query, key, value = (
        torch.ones(8, heads, 64, dtype=torch.bfloat16, device="cuda").requires_grad_() for heads in (2, 1, 1)
    )
    ends = torch.tensor([0, 8], dtype=torch.int32, device="cuda")
    torch.autograd.grad(kernel(query, key, value, ends, 8, 0.125).sum(), (query, key, value))
    torch.cuda.synchronize()
