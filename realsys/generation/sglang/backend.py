"""The built-in backend ``sglang``: from the configuration to an engine over SGLang. No torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from realsys.config.allocation import Allocation, parse_allocation
from realsys.config.backend_rules import (
    SGLANG,
    SGLANG_OURS,
    STATIC_SHARE,
    ServerSizes,
    check_options,
    check_sglang_sampling,
    sglang_options,
    sglang_server_sizes,
)
from realsys.config.machine import Machine, NodeDevices
from realsys.config.schema import Config
from realsys.config.schema_train import LoraConfig
from realsys.config.trial_sizes import longest_sequence, model_of
from realsys.generation.backend import (
    ONE_NODE,
    Backend,
    Change,
    EngineParts,
    Materialise,
    NodeSpan,
    PartParts,
    WriteAdapters,
)
from realsys.generation.child.engine import (
    MAX_ANSWERS,
    MAX_RESTARTS,
    ChildEngine,
    build_child_engine,
    needs_tokenizer,
    tokenizer_of,
)
from realsys.generation.sglang.process import Launch, run_part

#: share of a GPU that SGLang's weights and cache have by default; CUDA graphs and activations have the rest
_DEFAULT_SHARE = 0.88
#: SGLang pads matrices to such a size on a CPU, but not their adapters
_CPU_PADDING = 32
#: parts of the fused matrices
_PARTS = {"qkv": ("q", "k", "v"), "proj": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
_CPU_BYTES = 2560 << 20  # SGLang's processes, of one server on a CPU with a small model


class SglangBackend(Backend):
    """Rules of SGLang. It has its own interpreter and torch, so it may use GPUs that the trainer cannot."""

    own_torch = True
    fused_copies = 0  # it loads the files

    def check(self, allocation: Allocation) -> None:
        """Refuse options that realsys sets, and sampling that changes the log-probs."""
        check_options("generation.sglang.args", self.config.generation.sglang.args, SGLANG_OURS)
        check_sglang_sampling(self.config.generation.sampling)

    def check_machine(self, machine: Machine) -> None:
        """Refuse an interpreter that cannot run."""
        SGLANG.check(self.config.generation.sglang.python, gpus=bool(machine.gpus))

    def capacity(self) -> int:
        return MAX_ANSWERS

    def running(self, cached: Callable[[], int]) -> int:
        given = sglang_options(self.config.generation.sglang).get("max-running-requests", MAX_ANSWERS)
        return min(given, cached()) if isinstance(given, int) else cached()

    def start_timeout_s(self) -> float:
        return self.config.generation.sglang.start_timeout_s

    def sleeps(self, *, on_gpu: bool) -> bool:
        return on_gpu  # on a CPU it keeps its memory

    def sizes(self, allocation: Allocation) -> ServerSizes:
        return sglang_server_sizes(self.config.generation.sglang, allocation.inference.tensor)

    def memory_bytes(self, node: NodeDevices) -> int:
        return 0 if node.gpus else _CPU_BYTES

    def gpu_share(self) -> float:
        given = sglang_options(self.config.generation.sglang).get(STATIC_SHARE, _DEFAULT_SHARE)
        return float(given) if isinstance(given, int | float) else _DEFAULT_SHARE

    def sharing(self, share: float) -> dict[str, Any]:
        """Bound weights and cache, unless the user does. SGLang would otherwise take nearly all of the GPU."""
        args = self.config.generation.sglang.args
        if STATIC_SHARE in sglang_options(self.config.generation.sglang):
            return {}
        return {"generation.sglang.args": {**args, STATIC_SHARE: share}}

    def adapters(self) -> str:
        padded = _CPU_PADDING * self.sizes(parse_allocation(self.config.allocation)).tensor
        if not Machine.here().gpus and model_of(self.config).ffn % padded:
            return f"on a CPU, SGLang has adapters only for an intermediate size that is a multiple of {padded}"
        return ""

    def grammars(self) -> bool:
        """True if SGLang has what its grammars need, and no update makes a completion continue as a new request."""
        generation, given = self.config.generation, sglang_options(self.config.generation.sglang)
        return (
            needs_tokenizer(generation.sampling, given)
            and given.get("grammar-backend", "xgrammar") == "xgrammar"
            and self.config.asynchronous.kv_on_update == "recompute"
        )

    def build(self, parts: EngineParts) -> ChildEngine:
        engine = build_sglang_engine(
            parts.model_path,
            self.config,
            parts.materialise,
            parts.on_change,
            index=parts.index,
            span=parts.span,
            write_adapters=parts.write_adapters,
        )
        parts.on_stop(engine.abandon_start)
        return engine

    def run_part(self, parts: PartParts) -> None:
        tokenizer = _tokenizer(parts.model_path, self.config)
        launch = _launch(parts.model_path, self.config, parts.index, parts.span, tokenizer)
        asyncio.run(run_part(launch, parts.on_stop))


def build_sglang_engine(
    model_path: Path,
    config: Config,
    materialise: Materialise,
    on_change: Callable[[Change], None],
    *,
    index: int = 0,
    span: NodeSpan = ONE_NODE,
    write_adapters: WriteAdapters | None = None,
) -> ChildEngine:
    """Make an engine that is not started yet. ``index`` is the server's: each draws other random numbers.

    Raises ModelError for a model that realsys cannot train.
    """
    tokenizer, settings = _tokenizer(model_path, config), config.generation.sglang
    launch = _launch(model_path, config, index, span, tokenizer)
    return build_child_engine(
        launch,
        config,
        materialise,
        on_change,
        context=launch.context,
        tokenizer=tokenizer,
        timeouts=(settings.start_timeout_s, settings.silence_timeout_s),
        grammars=SglangBackend(config).grammars(),
        # A server that spans nodes starts again on all of them, which only the launcher can do.
        max_restarts=MAX_RESTARTS if span.nodes == 1 else 0,
        write_adapters=write_adapters if launch.adapters else None,
    )


def _matrices(lora: LoraConfig) -> list[str]:
    """Return SGLang's names of the matrices that have adapters."""
    return [f"{part}_proj" for target in lora.targets for part in _PARTS[target]]


def _tokenizer(model_path: Path, config: Config) -> Tokenizer | None:
    return tokenizer_of(model_path, config.generation.sampling, sglang_options(config.generation.sglang))


def _launch(model_path: Path, config: Config, index: int, span: NodeSpan, tokenizer: Tokenizer | None) -> Launch:
    generation, given = config.generation, sglang_options(config.generation.sglang)
    allocation = parse_allocation(config.allocation)
    gpus = bool(Machine.here().gpus)
    context = int(given.pop("context-length", 0)) or longest_sequence(config)
    return Launch(
        python=SGLANG.interpreter(generation.sglang.python, gpus=gpus),
        model_path=model_path,
        dtype=config.model.dtype,
        fp32_head=config.model.head_dtype == "float32",
        context=context,
        tensor=allocation.inference.tensor,
        seed=config.seed + index,
        threads=config.cluster.threads,
        gpus=gpus,
        options=given,
        tokenizer=tokenizer is not None,
        span=span,
        shared=config.cluster.share_gpus or allocation.is_lent(index),
        lent=allocation.is_lent(index),
        receives=config.weights.transport == "group",
        adapters=_matrices(config.train.lora) if config.is_service and config.train.lora.rank else (),
        adapter_rank=config.train.lora.rank,
    )
