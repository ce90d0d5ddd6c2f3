"""Warnings about sampling settings that bias training."""

from __future__ import annotations

from collections.abc import Iterator

from realsys.config.schema import SamplingConfig

#: settings that change which token is drawn but not its recorded log-prob -> values that switch them off
_NOT_IN_LOGPROBS: dict[str, tuple[float, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_new_tokens": (0,),
}


def sampling_warnings(sampling: SamplingConfig) -> Iterator[str]:
    """Yield a line if completions are drawn from another distribution than the one of the recorded log-probs."""
    changed = [
        f"{name}={value:g}" for name, off in _NOT_IN_LOGPROBS.items() if (value := getattr(sampling, name)) not in off
    ]
    if changed:
        yield (
            f"warning: generation.sampling.{', '.join(changed)}: completions are drawn from a changed distribution, "
            "but trained as if from softmax(logits / temperature): switch it off for training (docs/generation.md)"
        )
