"""What the master decides for each call of a step: learning rates, and the coefficient of the KL to the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realsys.algorithm.kl import AdaptiveKL
from realsys.algorithm.schedule import learning_rate
from realsys.config.dataflow import Dataflow
from realsys.config.roles import role_settings
from realsys.config.schema import Config
from realsys.master.calls.executor import CallResult

REFERENCE = "ref_logprobs"  # a call that reads it weighs the KL to the reference
REFERENCE_KL = "kl_ref_mean"  # the statistic in which such a call reports its mean per answer token


class CallArguments:
    """``lr`` for every call that trains, by its role's schedule over the whole run; ``kl_coef`` where a KL counts."""

    def __init__(self, config: Config, flow: Dataflow, total_steps: int) -> None:
        kl = config.train.ppo.kl
        self._flow, self._total_steps, self._adaptive = flow, total_steps, kl.adaptive
        self._optimizers = {role: role_settings(config, role).optimizer for role in flow.trained_roles}
        self._kl = AdaptiveKL(kl.coef, kl.target, kl.horizon)

    def of_step(self, step: int) -> dict[str, dict[str, Any]]:
        """Call name -> arguments, for train step ``step`` (the first is 1)."""
        args: dict[str, dict[str, Any]] = {call.name: {} for call in self._flow.calls}
        for call in self._flow.calls:
            if call.trains:
                args[call.name]["lr"] = learning_rate(self._optimizers[call.role], step - 1, self._total_steps)
            if REFERENCE in call.inputs:
                args[call.name]["kl_coef"] = self._kl.coef
        return args

    def observe(self, results: Mapping[str, CallResult], answers: int) -> None:
        """What the calls of a step of ``answers`` sequences reported; an adaptive coefficient follows the KL."""
        reported = [r.stats[REFERENCE_KL] for r in results.values() if REFERENCE_KL in r.stats]
        if self._adaptive and reported:
            self._kl.update(reported[0], answers)

    def state_dict(self) -> dict[str, float]:
        """What of it a checkpoint keeps: a coefficient that adapts. Learning rates follow from the step alone."""
        return self._kl.state_dict() if self._adaptive else {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """A fixed coefficient stays what the configuration says; so does the start of one that did not adapt before."""
        if self._adaptive and state:
            self._kl.load_state_dict(state)
