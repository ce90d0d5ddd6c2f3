"""Plans who works on what in a step: the same minibatches for every role, spread over the data
ranks of its mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from realsys.algorithm.balance import CostFunction, cost_function
from realsys.algorithm.kl import AdaptiveKL
from realsys.algorithm.minibatches import plan_minibatches, rows_left_out
from realsys.algorithm.schedule import learning_rate
from realsys.cluster.topology import Mesh
from realsys.config.allocation import ACTOR
from realsys.config.dataflow import Dataflow, advantages_by_token, role_settings
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.model_files.config_json import read_sizes
from realsys.train.master.executor import CallResult, Minibatches
from realsys.types import SequenceRef


def cost_functions(config: Config, paths: TrialPaths, roles: Sequence[str]) -> dict[str, CostFunction]:
    """Return for each role the cost of its sequences.

    Raises ModelError for a model directory without its sizes.
    """
    settings = {role: role_settings(config, role) for role in roles}
    return {role: cost_function(config, read_sizes(s.model_dir(paths), s.head)) for role, s in settings.items()}


def plan_roles(
    config: Config, meshes: Mapping[str, Mesh], costs: Mapping[str, CostFunction], refs: Sequence[SequenceRef]
) -> dict[str, Minibatches]:
    """Return role -> ``plan[minibatch][data rank]``.

    A call that only infers runs its role's whole plan in one pass. The actor's plan balances the work of
    the rows that it computes. With a reward model the rewards are not known yet, so nothing is left out.
    """
    ppo = config.train.ppo
    left_out: set[str] = set()
    if not ppo.reward_model_weight:
        max_new_tokens = config.generation.sampling.max_new_tokens
        left_out = rows_left_out(refs, ppo, max_new_tokens, by_token=advantages_by_token(config))
    return {
        role: plan_minibatches(
            refs,
            ppo.critic.minibatches if role == "critic" else ppo.minibatches,
            mesh.layout.data,
            costs[role],
            capacity=config.train.microbatch_tokens,
            left_out=left_out if role == ACTOR else (),
        )
        for role, mesh in meshes.items()
    }


# ---- learning rates and the KL coefficient of each call


REFERENCE = "ref_logprobs"  # a call that reads this key weighs the KL to the reference
REFERENCE_KL = "kl_ref_mean"  # statistic of such a call: the KL per completion token, mean


class CallArguments:
    """The arguments of the calls of a step.

    ``lr`` for every call that trains, from its role's schedule over the whole run; ``kl_coef`` for
    every call that reads the reference's log-probs.
    """

    def __init__(self, config: Config, flow: Dataflow, total_steps: int) -> None:
        kl = config.train.ppo.kl
        self._flow = flow
        self._total_steps = total_steps
        self._adaptive = kl.target > 0
        self._optimizers = {role: role_settings(config, role).optimizer for role in flow.trained_roles}
        self._kl = AdaptiveKL(kl.coef, kl.target, kl.horizon)

    def of_step(self, step: int) -> dict[str, dict[str, Any]]:
        """Return call name -> arguments for train step ``step`` (the first is 1)."""
        args: dict[str, dict[str, Any]] = {call.name: {} for call in self._flow.calls}
        for call in self._flow.calls:
            if call.trains:
                # The schedule counts steps from 0, the loop from 1.
                args[call.name]["lr"] = learning_rate(self._optimizers[call.role], step - 1, self._total_steps)
            if REFERENCE in call.inputs:
                args[call.name]["kl_coef"] = self._kl.coef
        return args

    def observe(self, results: Mapping[str, CallResult], episodes: int) -> None:
        """Update the adaptive KL coefficient with the results of a step of ``episodes`` episodes."""
        reported = [r.stats[REFERENCE_KL] for r in results.values() if REFERENCE_KL in r.stats]
        if self._adaptive and reported:
            self._kl.update(reported[0], episodes)

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint: an adaptive coefficient.

        Learning rates follow from the step alone.
        """
        return self._kl.state_dict() if self._adaptive else {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state.

        A fixed coefficient, and one that was fixed when the state was saved, keeps its configured
        value.
        """
        if self._adaptive and state:
            self._kl.load_state_dict(state)
