"""Settings of one model role, from the sections of the configuration that hold them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from realsys.config.allocation import ACTOR
from realsys.config.fields import Offload
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.sections.schema_train import LoraConfig, OptimizerConfig, RoleConfig, RolesConfig
from realsys.errors import ConfigError

NO_LORA = LoraConfig()


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """Settings of one model role.

    path       HF directory; empty for the tiny model
    optimizer  used only if the role is trained
    as_actor   True if the role has no ``path`` and starts with the weights that the actor starts with
    """

    name: str
    path: str
    head: Literal["lm", "value"]
    offload: Offload
    optimizer: OptimizerConfig
    lora: LoraConfig = NO_LORA
    as_actor: bool = False

    def model_dir(self, paths: TrialPaths) -> Path:
        return Path(self.path) if self.path else paths.start_model


def role_settings(config: Config, role: str) -> RoleSettings:
    """Return the settings of ``role``. Raises ConfigError for a role that is not configured."""
    train, path = config.train, config.model.path
    if role == ACTOR:
        return RoleSettings(ACTOR, path, "lm", train.offload, train.optimizer, train.lora)
    sections: dict[str, RoleConfig] = {
        "ref": config.roles.ref,
        "critic": config.roles.critic,
        "reward": config.roles.reward,
        **config.roles.custom,
    }
    if role not in sections:
        problem = f"is called by the dataflow but not configured; add {role_field(role)}.head=lm|value"
        raise ConfigError("roles", role, problem)
    own = sections[role]
    return RoleSettings(role, own.path or path, own.head, own.offload, own.optimizer, as_actor=not own.path)


def role_field(role: str) -> str:
    """Return the path of the section that configures a role other than the actor."""
    return f"roles.{role}" if role in RolesConfig.model_fields else f"roles.custom.{role}"
