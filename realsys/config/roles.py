"""The settings of one model role, wherever they stand in the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from realsys.config.allocation import ACTOR
from realsys.config.fields import Offload
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.schema_train import LoraConfig, OptimizerConfig, RoleConfig, RolesConfig
from realsys.errors import ConfigError

NO_LORA = LoraConfig()


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """``path`` is empty for a model made on the spot. ``optimizer`` matters only for a role that is trained.

    ``as_actor``: without a directory of its own the role starts with the weights that the actor starts with.
    """

    name: str
    path: str
    head: Literal["lm", "value"]
    offload: Offload
    optimizer: OptimizerConfig
    lora: LoraConfig = NO_LORA
    as_actor: bool = False

    def model_dir(self, paths: TrialPaths) -> Path:
        return Path(self.path) if self.path else paths.model


def role_settings(config: Config, role: str) -> RoleSettings:
    """Raises ConfigError for a role that is not configured."""
    train, path = config.train, config.model.path
    if role == ACTOR:
        return RoleSettings(ACTOR, path, "lm", train.offload, train.optimizer, train.lora)
    known: dict[str, RoleConfig] = {
        "ref": config.roles.ref,
        "critic": config.roles.critic,
        "reward": config.roles.reward,
        **config.roles.custom,
    }
    if role not in known:
        problem = f"is called by the dataflow but not configured; add {role_field(role)}.head=lm|value"
        raise ConfigError("roles", role, problem)
    own = known[role]
    return RoleSettings(role, own.path or path, own.head, own.offload, own.optimizer, as_actor=not own.path)


def role_field(role: str) -> str:
    """Where the settings of a role beside the actor stand in the configuration."""
    return f"roles.{role}" if role in RolesConfig.model_fields else f"roles.custom.{role}"
