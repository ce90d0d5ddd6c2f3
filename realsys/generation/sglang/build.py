"""From the configuration to an engine over SGLang. No torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from realsys.config.allocation import parse_allocation
from realsys.config.machine import Machine
from realsys.config.schema import Config
from realsys.config.sglang import interpreter, options
from realsys.generation.architecture import read_architecture
from realsys.generation.backend import Change
from realsys.generation.limits import Limits
from realsys.generation.sglang.arguments import Launch
from realsys.generation.sglang.engine import Settings, SglangEngine
from realsys.generation.sglang.update import Materialise
from realsys.generation.stop_strings import read_tokenizer


def build_sglang_engine(
    model_path: Path,
    config: Config,
    materialise: Materialise,
    on_change: Callable[[Change], None],
    *,
    index: int = 0,
) -> SglangEngine:
    """Everything but the start of SGLang. ``index`` of the server: each draws random numbers of its own.

    Raises ModelError for a model that this system cannot train.
    """
    generation, arch = config.generation, read_architecture(model_path)
    given, tokenizer = options(generation.sglang), read_tokenizer(model_path)
    context = int(given.pop("context-length", 0)) or config.data.max_prompt_tokens + generation.sampling.max_new_tokens
    launch = Launch(
        python=interpreter(generation.sglang),
        model_path=model_path,
        dtype=config.model.dtype,
        context=context,
        tensor=parse_allocation(config.allocation).inference.tensor,
        seed=config.seed + index,
        threads=generation.threads,
        gpus=bool(Machine.here().gpus),
        options=given,
    )
    limits = Limits(
        vocabulary=arch.vocab_size,
        eos=arch.eos,
        context=context,
        answers=generation.sglang.max_answers,
        tokenizer=tokenizer is not None,
        model_path=str(model_path),
    )
    settings = Settings(
        start_timeout_s=generation.sglang.start_timeout_s,
        max_restarts=generation.sglang.max_restarts,
        request_timeout_s=generation.request_timeout_s,
        load_timeout_s=config.manager.update_timeout_s,
        silence_timeout_s=generation.sglang.silence_timeout_s,
        drain=not config.asynchronous.interruptible,
    )
    return SglangEngine(launch, limits, arch.tensor_shapes(), materialise, settings, on_change, tokenizer)
