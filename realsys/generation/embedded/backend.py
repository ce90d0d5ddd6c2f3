"""The built-in backend ``embedded``. It imports torch only to build an engine: the launcher imports this module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from realsys.config.allocation import Allocation
from realsys.config.device_memory import row_bytes
from realsys.config.doors import AGENT
from realsys.config.machine import Machine
from realsys.config.trial_sizes import longest_sequence, model_of
from realsys.errors import ConfigError
from realsys.generation.backend import Backend, Change, EngineParts, GenerationEngine


class EmbeddedBackend(Backend):
    """Rules and factory of the embedded engine."""

    capacity_field = "generation.embedded.max_queued"

    def check(self, allocation: Allocation) -> None:
        """Refuse a model split over devices, and a context that cannot hold the longest sequence."""
        super().check(allocation)
        context = self.config.generation.embedded.context_length
        longest = longest_sequence(self.config)
        if 0 < context < longest:
            prompt = self.config.data.max_prompt_tokens
            completion = self.config.generation.sampling.max_new_tokens
            parts = f"data.max_prompt_tokens {prompt} + max_new_tokens {completion}"
            if longest != prompt + completion:
                parts = f"the longest row of rollout.agent {self.config.rollout.agent}"
            raise ConfigError("generation.embedded.context_length", context, f"must hold {parts} = {longest}")

    def check_machine(self, machine: Machine) -> None:
        """Refuse GPUs unless the user allows this engine on them: it is many times slower there than SGLang."""
        if machine.trainer_gpus and not self.config.model.small_on_gpu:
            problem = "is slow on GPUs and its KV cache is not paged: set generation=sglang"
            remedy = "model.small_on_gpu=true to use it all the same"
            raise ConfigError("generation.backend", "embedded", f"{problem}, or {remedy}")

    def capacity(self) -> int:
        settings = self.config.generation.embedded
        return settings.max_running + settings.max_queued

    def running(self, cached: Callable[[], int]) -> int:
        return self.config.generation.embedded.max_running

    def adapters(self) -> str:
        return ""

    def sleeps(self, *, on_gpu: bool) -> bool:
        return True

    def holding(self, episodes: int, spare: Callable[[], int]) -> dict[str, Any]:
        """Choose a row of the cache for each episode, because its next turn needs its keys."""
        waiting = episodes - self.config.generation.embedded.max_running
        if waiting <= 0 or not self.retains():
            return {}
        rows = min(waiting, spare() // row_bytes(self.config, model_of(self.config)))
        return {"generation.embedded.cache_rows": rows} if rows else {}

    def retains(self) -> bool:
        """Return True if a later request may use the keys of an ended completion: its next turn, or its next piece."""
        rollout = self.config.rollout
        # An agent of another interpreter cannot be imported here. It may have several turns.
        one_turn = not rollout.agent_python and getattr(AGENT.load(rollout.agent), "one_turn", False)
        return not one_turn or self.config.generation.sampling.new_tokens_per_chunk > 0

    def build(self, parts: EngineParts) -> GenerationEngine:
        import torch

        from realsys.generation.embedded.adapters import AdapterEngines
        from realsys.generation.embedded.engine import build_engine
        from realsys.generation.embedded.prefix_cache import KvPolicy

        config, updates = self.config, self.config.asynchronous
        torch.set_num_threads(config.cluster.threads)
        engine = build_engine(
            parts.model_path,
            config.generation,
            parts.load,
            context=longest_sequence(config),
            dtype=getattr(torch, config.model.dtype),
            head_dtype=torch.float32 if config.model.head_dtype == "float32" else None,
            interruptible=updates.interruptible,
            kv=KvPolicy(updates.kv_on_update == "keep", updates.kv_reuse_versions, self.retains()),
        )
        parts.on_change(Change(0))  # the only change: the engine lives as long as the process
        return engine if parts.read is None else AdapterEngines(engine, parts.read)
