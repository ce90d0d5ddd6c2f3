"""The learning rate as a function of the step. The master owns it and sends it with each train call."""

from __future__ import annotations

import math

from realsys.config.schema_train import OptimizerConfig


def learning_rate(cfg: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of train step ``step`` (0 is the first) of ``total_steps``.

    Linear warm-up over ``ceil(warmup_fraction * total_steps)`` steps: the first step has a rate above 0, the
    last one of the warm-up the full rate. Then ``constant``, or ``linear`` / ``cosine`` decay that reaches
    ``min_lr_ratio * lr`` at the last step. Steps beyond ``total_steps`` keep the last rate. Raises
    ValueError if ``step`` or ``total_steps`` is too small.
    """
    if step < 0 or total_steps < 1:
        raise ValueError(f"step {step} of {total_steps} steps: step must be at least 0, total_steps at least 1")
    # Rounded first: 0.07 * 100 is 7.000000000000001, which must give 7 steps, not 8.
    warmup = math.ceil(round(cfg.warmup_fraction * total_steps, 6))
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    if cfg.schedule == "constant":
        return cfg.lr
    decay_steps = total_steps - warmup
    progress = min(1.0, (step - warmup + 1) / decay_steps) if decay_steps > 0 else 1.0
    remaining = 1.0 - progress if cfg.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return cfg.lr * (cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * remaining)
