"""One run of SGLang: its command line and environment.

A server that spans nodes has such a process on each of them. On the first node a supervisor keeps it; on the others
``run_part`` runs it until it ends.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from realsys.config.backend_rules import STATIC_SHARE, command_line_flags
from realsys.config.device_memory import MOST_ADAPTERS
from realsys.errors import GenerationError
from realsys.generation.backend import ONE_NODE, NodeSpan
from realsys.generation.child.contract import EngineApi, EngineLaunch
from realsys.generation.child.process import LOOPBACK, EngineProcess, engine_environment
from realsys.generation.sglang.api import SglangApi
from realsys.weights.inside import INSIDE

CPU_SUPPORT = Path(__file__).with_name("cpu_support")
_INSIDE = Path(__file__).with_name("inside")  # a plugin of SGLang
#: SGLang counts the positions of a request in another way; with these it accepts every request that we accept
_CONTEXT_SLACK = 16
_CPU_TOKENS = 65536  # KV cache of a server on CPU, unless the context is longer


@dataclass(frozen=True, slots=True)
class Launch(EngineLaunch):
    """Settings of one start. ``span``: of the server. ``receives``: it gets weights by group.

    ``adapters``: names of the matrices whose adapters requests may name, and ``adapter_rank`` is theirs.
    """

    api: ClassVar[type[EngineApi]] = SglangApi
    share_option: ClassVar[str] = STATIC_SHARE
    too_little: ClassVar[re.Pattern[str]] = re.compile("not enough memory", re.IGNORECASE)

    fp32_head: bool = False
    span: NodeSpan = ONE_NODE
    receives: bool = False
    adapters: Sequence[str] = ()
    adapter_rank: int = 0

    def share_of(self, share: float, free: float) -> float:
        return share / free  # SGLang takes its option for a share of what is free when it starts

    def command(self, port: int) -> list[str]:
        """Return argv. The user's options replace ours, except the address and the model (checked before)."""
        module = "sglang.launch_server" if self.gpus else "realsys_sglang_cpu.server"
        options = {**self._own_options(), **self.options}
        fixed: dict[str, Any] = {"model-path": str(self.model_path), "host": LOOPBACK, "port": port}
        if self.lent:
            fixed["enable-memory-saver"] = True
        if self.adapters:
            fixed |= {
                "enable-lora": True,
                "max-lora-rank": self.adapter_rank,
                "lora-target-modules": list(self.adapters),
            }
            fixed["max-loras-per-batch"] = MOST_ADAPTERS + 1  # one is for requests without an adapter
            fixed["lora-backend"] = None if self.gpus else "torch_native"
        if self.span.nodes > 1:
            meeting = {"node-rank": self.span.rank, "dist-init-addr": self.span.init_address}
            fixed |= {"nnodes": self.span.nodes, **meeting}
        return [self.python, "-m", module, *command_line_flags({**options, **fixed})]

    def environment(self, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        env = engine_environment(self.threads, inherited) | {
            # /health answers without generating: a paused server is healthy.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            # Log-probs of softmax(logits / temperature), the distribution that is trained on, not of temperature 1.
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # allows _CONTEXT_SLACK; realsys checks the true limit
        }
        path = [_INSIDE, INSIDE] if self.receives else []
        if not self.gpus:
            # The copy of this realsys, even if `make sglang-cpu` installed an older one.
            env |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
            path = [CPU_SUPPORT, *path]
        else:
            # The GPUs of one server may be shared with ranks of the trainer, and have different amounts of free memory.
            env["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
        return env | ({"PYTHONPATH": os.pathsep.join(map(str, path))} if path else {})

    def _own_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "dtype": self.dtype,
            "enable-fp32-lm-head": self.fp32_head,
            "context-length": self.context + _CONTEXT_SLACK,
            "tp-size": self.tensor,
            "random-seed": self.seed,
            "log-level": "warning",
            "skip-tokenizer-init": not self.tokenizer,
            "incremental-streaming-output": True,  # an event has its new tokens, not all of them again
            # Continuations before new prompts. SGLang knows priorities with some policies only.
            "enable-priority-scheduling": (ordered := self.options.get("schedule-policy", "fcfs") in ("fcfs", "lof")),
            "disable-priority-preemption": ordered,
        }
        if not self.gpus:
            options |= {
                "device": "cpu",
                "attention-backend": "torch_native",
                "sampling-backend": "pytorch",
                "disable-overlap-schedule": True,
                "skip-server-warmup": True,
                "sleep-on-idle": True,  # or every idle server keeps a core busy
                "max-running-requests": 64,
                "max-total-tokens": max(_CPU_TOKENS, 2 * (self.context + _CONTEXT_SLACK)),
            }
        return options


# ---- the part of a server on a node other than its first


async def run_part(launch: Launch, on_stop: Callable[[Callable[[], None]], None]) -> None:
    """Run SGLang until it ends, which raises GenerationError, or until the process gets a signal to stop."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_soon() -> None:
        loop.call_soon_threadsafe(stopped.set)

    on_stop(stop_soon)
    child = EngineProcess(launch.sized())
    stopping = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait({child.ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stopped.is_set():
            raise GenerationError(f"SGLang {child.ended.result()}; its last lines: {child.tail()}")
    finally:
        stopping.cancel()
        await child.stop()
