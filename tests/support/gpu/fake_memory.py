"""Real engine on tensors without memory: counts what forward and backward pass would take on a GPU.

Fake tensors have shapes and lifetimes, but no data, so a layer of 7B runs in milliseconds. Collectives do nothing. The
attention is that of CUDA, whose operator keeps the same tensors here. torch's norm on CUDA keeps its input and one
number per row; on a CPU it is several operators that keep more, so ``_Norm`` replaces it. In the same way
``_replace_head`` replaces what the head does otherwise on a GPU: products in fp32, and kernels without temporaries.
"""

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from realsys.cluster.topology import whole_mesh
from realsys.config.allocation import ACTOR, ParallelLayout
from realsys.config.dataflow import role_settings
from realsys.config.schema import Config
from realsys.model_files.architecture import HfModel
from realsys.train.megatron.device import Device
from realsys.train.worker.packing import MicroBatch
from tests.support.training.train_ranks import run_ranks


@dataclass(frozen=True)
class Measured:
    """Bytes: parameters and gradient buffer; peaks of training and of inference beyond them."""

    static: int
    training: int
    inference: int


class LiveBytes(TorchDispatchMode):
    """Counter of the bytes of all live storages. Collectives do nothing, unless ``communicates``."""

    def __init__(self, *, communicates: bool = False) -> None:
        super().__init__()
        self._communicates = communicates
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and not self._communicates:
            return args[0], FakeWork().boxed()
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        return out

    def restart(self) -> int:
        """Begin a new peak. Returns the bytes that are live now."""
        self.peak = self.now
        return self.now

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight, torch.empty(*x.shape[:-1], 1))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), None


def measure(model: HfModel, layout: ParallelLayout, config: Config, tokens: int) -> Measured:
    """Run a micro-batch of four sequences with gradients and one without, as the actor on rank 0 of ``layout`` (p1)."""
    body = functools.partial(_measure, model, layout, config, tokens)
    measured: Measured = run_ranks(1, body, config, joined=False)[0]
    return measured


def _measure(
    model: HfModel, layout: ParallelLayout, config: Config, tokens: int, rank: int, device: Device
) -> Measured:
    from realsys.train.megatron import heads, layers, train_engine
    from realsys.train.megatron.mesh import form_meshes

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.world_size)
    device = Device(device.device, "fake")
    groups = form_meshes({ACTOR: whole_mesh(layout)}, 0, config.cluster, device)[ACTOR]
    apply: Callable[..., torch.Tensor] = _Norm.apply
    layers.rms_norm = apply
    _replace_head(heads)
    train_engine.pack_segments = functools.partial(_with_kernel, train_engine.pack_segments)
    replaced: dict[str, Any] = {
        "read_model": lambda *_: model,
        "build_model": functools.partial(_stays, train_engine.build_model),
    }
    for name, value in replaced.items():
        setattr(train_engine, name, value)
    train_engine.ShardMap.load = lambda *_: None  # type: ignore[assignment,method-assign]
    engine = train_engine.MegatronEngine(config, role_settings(config, ACTOR), groups, device)
    live = LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        engine.load(Path())
        engine.ddp_model.finish_grad_sync = lambda *_, **__: None
        static, peaks = live.restart(), []
        batch = _batch(tokens)
        for run in (lambda: engine.accumulate([batch], _loss), lambda: engine.logprobs([batch])):
            live.restart()
            run()
            peaks.append(live.peak - static)
    return Measured(static, peaks[0], peaks[1])


class _Kernel:
    """Stand-in of a compiled function, which makes its result only."""

    def __init__(self, made: Callable[..., torch.Tensor]) -> None:
        self._made = made

    def on(self, device: torch.device) -> Callable[..., torch.Tensor]:
        return self._made


def _replace_head(heads: Any) -> None:
    heads._logits = lambda hidden, weight, how: torch.empty(len(hidden), len(weight))
    heads._add_product = lambda total, a, b: None
    heads.sums_kernel = _Kernel(lambda logits, temperature, entropy: torch.empty(2 + entropy, len(logits)))
    heads.logit_gradient_kernel = _Kernel(lambda logits, dtype, *_: torch.empty_like(logits, dtype=dtype))


def _with_kernel(pack_segments: Any, *args: Any, **how: Any) -> Any:
    return pack_segments(*args, **(how | {"kernel": True}))


def _stays(build_model: Any, *args: Any) -> Any:
    """Build a model that ignores ``to``: fake parameters cannot be moved."""
    module = build_model(*args)
    module.to = lambda *_: module
    return module


def _batch(tokens: int) -> MicroBatch:
    zeros = torch.zeros(tokens, dtype=torch.int64)
    return MicroBatch([], [tokens // 4] * 4, torch.arange(tokens), zeros, zeros)


def _loss(batch: MicroBatch, outputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    share = -outputs.logprobs.sum()
    return share, {"loss": share.detach()}
