"""The built-in backend ``embedded``. It imports torch only to build an engine: the launcher imports this module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from realsys.config.allocation import Allocation
from realsys.config.rules.lengths import longest_sequence
from realsys.config.rules.machine import Machine
from realsys.errors import ConfigError
from realsys.generation.backend import Backend, Change, EngineParts

if TYPE_CHECKING:
    from realsys.generation.embedded.engine import Engine


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
        if machine.trainer_gpus and not self.config.generation.embedded.on_gpu:
            problem = "is slow on GPUs and its KV cache is not paged: set generation=sglang"
            remedy = "generation.embedded.on_gpu=true to use it all the same"
            raise ConfigError("generation.backend", "embedded", f"{problem}, or {remedy}")

    def capacity(self) -> int:
        settings = self.config.generation.embedded
        return settings.max_running + settings.max_queued

    def build(self, parts: EngineParts) -> Engine:
        import torch

        from realsys.generation.embedded.build import build_engine

        config = self.config
        torch.set_num_threads(config.generation.threads)
        engine = build_engine(
            parts.model_path,
            config.generation,
            parts.load,
            context=longest_sequence(config),
            dtype=getattr(torch, config.model.dtype),
            head_dtype=torch.float32 if config.model.head_dtype == "float32" else None,
            interruptible=config.asynchronous.interruptible,
        )
        parts.on_change(Change(0))  # the only change: the engine lives as long as the process
        return engine
