"""Names and settings of the losses of the Tinker protocol (``realsys.algorithm.client_losses``). No torch."""

from __future__ import annotations

from collections.abc import Mapping

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
#: loss -> its settings and their defaults
CONFIGS: Mapping[str, Mapping[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {LOW: 0.8, HIGH: 1.2},
    "cispo": {LOW: 0.0, HIGH: 4.0},
    "dro": {"beta": 0.05},
    "gspo": {LOW: 0.8, HIGH: 1.2},
}


def problem_of(name: str, config: Mapping[str, float]) -> str:
    """Return why there is no loss ``name`` with these settings; "" if there is one."""
    if name not in CONFIGS:
        return f"unknown loss {name!r}: use one of {', '.join(CONFIGS)}"
    if unknown := config.keys() - CONFIGS[name].keys():
        known = ", ".join(CONFIGS[name]) or "none"
        return f"loss {name} has no setting {', '.join(sorted(unknown))}: it has {known}"
    return ""
