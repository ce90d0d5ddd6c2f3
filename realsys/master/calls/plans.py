"""Plans who works on what in a step: the same minibatches for every role, spread over the data
ranks of its mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from realsys.algorithm.batch.balance import CostFunction, cost_function
from realsys.algorithm.batch.minibatches import plan_minibatches, rows_left_out
from realsys.cluster.topology import Mesh
from realsys.config.allocation import ACTOR
from realsys.config.dataflow import advantages_by_token
from realsys.config.paths import TrialPaths
from realsys.config.roles import role_settings
from realsys.config.schema import Config
from realsys.hf.config import read_sizes
from realsys.master.calls.executor import Minibatches
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
    if not ppo.reward_model.enabled:
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
