"""Real engine on the meta device, in place of a GPU: counts what a rank would compute, hold, send and wait for there.

A tensor of this device has a shape and a lifetime, but no data, so a layer of 7B runs in milliseconds. Collectives do
nothing. The attention is that of CUDA, whose operator keeps the same tensors here. torch's norm on CUDA keeps its input
and one number per row; elsewhere it is several operators that keep more, so ``_Norm`` replaces it. In the same way
``_replace_head`` replaces what the head does otherwise on a GPU: products in fp32, and kernels without temporaries.
"""

import functools
import importlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from realsys.cluster.topology import whole_mesh
from realsys.config.allocation import ACTOR, ParallelLayout
from realsys.config.dataflow import role_settings
from realsys.config.schema import Config
from realsys.model_calls import MfcRequest
from realsys.model_files.architecture import HfModel
from realsys.train.megatron import device as megatron_device
from realsys.train.megatron.device import Device, seed_megatron
from realsys.train.worker.data_manager import Array, DataManager
from realsys.train.worker.packing import MicroBatch
from tests.support.training.train_ranks import run_ranks

META = torch.device("meta")


@dataclass(frozen=True)
class Measured:
    """Bytes: parameters and gradient buffer; peaks of training and of inference beyond them."""

    static: int
    training: int
    inference: int


@dataclass
class Counted:
    """What a rank did.

    flops  of matrix products and attention
    waits  of the host for the device, by operator
    sent   bytes that collectives reduce or gather, by operator
    """

    flops: float = 0.0
    waits: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)


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


#: operators whose result has a size or a value that the host must read from the device first
_READ = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_consecutive", "unique_dim"}


class Counting(TorchDispatchMode):
    """Counter of FLOPs, waits and bytes sent. A number that the host reads is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counted()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func.namespace == "c10d":
            # The largest argument is what all ranks have together: the input of a reduction, the result of a gather.
            self.counted.sent[name] += max(map(_bytes, args))
            work = FakeWork().boxed()
            return (args[0], work) if len(func._schema.returns) > 1 else work
        if waited := self._waits(name, args, kwargs, tensors):
            self.counted.waits[waited] += 1
        if name == "_local_scalar_dense" and args[0].is_meta:
            return 1.0
        if name in ("copy_", "_to_copy") and waited.endswith("host"):
            return torch.ones(args[-1].shape, dtype=kwargs.get("dtype") or args[-1].dtype)
        self.counted.flops += _flops(name, args)
        return func(*args, **kwargs)

    @staticmethod
    def _waits(name: str, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> str:
        if not any(each.is_meta for each in tensors) and kwargs.get("device") != META:
            return ""
        if name in _READ:
            return name
        if name == "index" and any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]):
            return name
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            return name
        if name == "copy_" and args[0].device != args[1].device:
            return f"copy to {'device' if args[0].is_meta else 'host'}"
        if name == "_to_copy" and kwargs.get("device", args[0].device) != args[0].device:
            # Without pinned memory the host waits in either direction.
            return f"copy to {'host' if args[0].is_meta else 'device'}"
        return ""


def _bytes(argument: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor))


def _flops(name: str, args: Any) -> float:
    """Return the FLOPs of an operator. Attention: causal, over segments of one length; backward twice the forward."""
    if name in ("mm", "bmm"):
        return 2.0 * args[0].numel() * args[1].shape[-1]
    if name in ("addmm", "addmm_"):
        return 2.0 * args[1].numel() * args[2].shape[-1]
    if name.startswith("_varlen_attn"):
        is_backward = "backward" in name
        query, longest = (args[1], args[8]) if is_backward else (args[0], args[5])
        return (2 if is_backward else 1) * 2.0 * query.numel() * longest
    return 0.0


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), None


class _Kernel:
    """Stand-in of a compiled function, which makes its result only."""

    def __init__(self, made: Callable[..., torch.Tensor]) -> None:
        self._made = made

    def on(self, device: torch.device) -> Callable[..., torch.Tensor]:
        return self._made


def _replace_head(heads: Any) -> None:
    heads._logits = lambda hidden, weight, how: torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    heads._add_product = lambda total, a, b: total.addmm_(a, b)
    heads.sums_kernel = _Kernel(lambda logits, temperature, entropy: logits.new_empty(2 + entropy, len(logits)))
    heads.logit_gradient_kernel = _Kernel(lambda logits, dtype, *_: torch.empty_like(logits, dtype=dtype))


@contextmanager
def _rank_of(layout: ParallelLayout, config: Config, model: HfModel | None, host: Device) -> Iterator[Any]:
    """Prepare this process, and yield the mesh and the device of rank 0 of ``layout`` (p1)."""
    from realsys.algorithm import loss_tokens
    from realsys.train.megatron import heads, layers, train_engine
    from realsys.train.megatron.mesh import MeshGroups, form_meshes
    from realsys.train.worker import critic, packing, supervised

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.world_size)
    dist.all_gather_object = _gather_alike
    types = megatron_device._CUDA_TYPE_OF
    types |= {name.replace("torch.", "torch.meta."): cuda for name, cuda in types.items()}
    device = Device(META, "fake")
    groups = form_meshes({ACTOR: whole_mesh(layout)}, 0, config.cluster, device)[ACTOR]
    apply: Callable[..., torch.Tensor] = _Norm.apply
    layers.rms_norm = apply
    _replace_head(heads)
    replaced: dict[str, Any] = {
        "pack_segments": functools.partial(_with_kernel, train_engine.pack_segments),
        "build_model": functools.partial(_on_meta, train_engine.build_model),
        "seed_megatron": lambda _, seed: seed_megatron(host, seed),
    }
    if model is not None:
        replaced["read_model"] = lambda *_: model
    for name, value in replaced.items():
        setattr(train_engine, name, value)
    for module in (
        packing,
        critic,
        supervised,
        layers,
        loss_tokens,
    ):  # from pinned memory the host does not wait for a copy
        module.on_device = lambda tensor, device: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    # The fused step knows this device, too.
    importlib.import_module("torch.optim.adam")._device_dtype_check_for_fused = lambda *_, **__: None
    reduced = MeshGroups.any_rank
    # What it reads after the reduction would be 1, which is a flag.
    MeshGroups.any_rank = lambda self, flag, device: reduced(self, flag, device) and flag  # type: ignore[method-assign]
    train_engine.ShardMap.load = lambda *_: None  # type: ignore[assignment,method-assign]
    torch.cuda.current_device = lambda: META  # type: ignore[assignment,return-value]
    yield groups, device


def measure(model: HfModel, layout: ParallelLayout, config: Config, tokens: int) -> Measured:
    """Run a micro-batch of four sequences with gradients and one without, as the actor on rank 0 of ``layout`` (p1)."""
    body = functools.partial(_measure, model, layout, config, tokens)
    measured: Measured = run_ranks(1, body, config, joined=False)[0]
    return measured


def _measure(model: HfModel, layout: ParallelLayout, config: Config, tokens: int, rank: int, host: Device) -> Measured:
    from realsys.train.megatron.train_engine import MegatronEngine

    live = LiveBytes()
    with _rank_of(layout, config, model, host) as (groups, device), live:
        engine = MegatronEngine(config, role_settings(config, ACTOR), groups, device)
        engine.load(Path())
        engine.ddp_model.finish_grad_sync = lambda *_, **__: None
        static, peaks = live.restart(), []
        batch = _batch(tokens)
        for run in (lambda: engine.accumulate([batch], _loss), lambda: engine.logprobs([batch])):
            live.restart()
            run()
            peaks.append(live.peak - static)
    return Measured(static, peaks[0], peaks[1])


def count_call(
    directory: Path, layout: ParallelLayout, config: Config, request: MfcRequest, samples: dict[str, dict[str, Array]]
) -> tuple[Counted, int]:
    """Run a call of a role with the model of ``directory`` on rank 0 of ``layout`` (p1). Returns its counts, and the
    bytes that this rank would publish.
    """
    body = functools.partial(_count_call, directory, layout, config, request, samples)
    counted: tuple[Counted, int] = run_ranks(1, body, config, joined=False)[0]
    return counted


def _count_call(
    directory: Path,
    layout: ParallelLayout,
    config: Config,
    request: MfcRequest,
    samples: dict[str, dict[str, Array]],
    rank: int,
    host: Device,
) -> tuple[Counted, int]:
    from realsys.train.worker.call_handlers import find_handler
    from realsys.train.worker.call_service import make_role

    with _rank_of(layout, config, None, host) as (groups, device):
        data = DataManager(0)
        for name, arrays in samples.items():
            data.put(name, arrays)
        role = make_role(config, request.role, directory, groups, data, device, trainable=True)
        role.engine.use_optimizer("train", role.settings.optimizer)
        with Counting() as mode:
            find_handler(request.handler).run(role, request)
        published = sum(tensor.nbytes for _, tensor in role.engine.export())
    return mode.counted, published


def _gather_alike(gathered: list[Any], own: Any, group: Any = None) -> None:
    gathered[:] = [own] * len(gathered)


def _with_kernel(pack_segments: Any, *args: Any, **how: Any) -> Any:
    return pack_segments(*args, **(how | {"kernel": True}))


def _on_meta(build_model: Any, *args: Any) -> Any:
    with META:
        return build_model(*args)


def _batch(tokens: int) -> MicroBatch:
    zeros = torch.zeros(tokens, dtype=torch.int64, device=META)
    return MicroBatch([], [tokens // 4] * 4, torch.arange(tokens, device=META), zeros, zeros)


def _loss(batch: MicroBatch, outputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    share = -outputs.logprobs.sum()
    return share, {"loss": share.detach()}
