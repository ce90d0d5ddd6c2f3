"""Settings that bind the manager's decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from realsys.config.schema import Config
from realsys.config.sections.schema_sampling import CurriculumConfig
from realsys.manager.ledger.order import Curriculum
from realsys.manager.routing.fan_out import FanOut
from realsys.manager.routing.health import BlameRules
from realsys.manager.routing.holds import HoldRules
from realsys.manager.routing.servers import Pace


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    """The part of the configuration that the manager decides by."""

    batch_groups: int
    eta: int
    group_size: int  # episodes that start for a ticket
    max_attempts: int
    seed: int
    split_sizes: dict[str, int]  # prompts per split; "train" is required
    total_epochs: int = 0
    total_steps: int = 0  # grants end at total_steps * batch_groups; 0: no limit
    lease_s: float = 3600.0
    routing: str = "sticky"
    kv_reuse_versions: int = 0
    interruptible: bool = True
    pace: Pace = field(default_factory=Pace)
    blame: BlameRules = field(default_factory=BlameRules)
    fan_out: FanOut = field(default_factory=FanOut)
    stale_policy: str = "train"
    trains: bool = True  # False: no train ticket is granted
    max_reissues: int = 2  # reissues that a ticket may have because its group was too old
    curriculum: Curriculum | None = None
    holds: HoldRules = field(default_factory=HoldRules)

    @classmethod
    def of(cls, config: Config, split_sizes: dict[str, int]) -> ManagerSettings:
        """Take the settings from the configuration. ``split_sizes``: prompts per split."""
        manager = config.manager
        rolling = manager.weight_update_mode == "rolling"
        return cls(
            batch_groups=config.train.batch_groups,
            eta=config.asynchronous.max_head_offpolicyness,
            group_size=config.rollout.sampled_episodes,
            max_attempts=config.rollout.max_attempts,
            seed=config.seed,
            # Without training there may be no prompt to train on, and the order of the prompts needs one.
            split_sizes=split_sizes | {"train": max(1, split_sizes["train"])} if config.evaluate_only else split_sizes,
            total_epochs=config.train.total_epochs,
            total_steps=config.train.total_steps,
            trains=not config.evaluate_only,
            stale_policy=config.asynchronous.stale_policy,
            max_reissues=config.asynchronous.max_reissues,
            curriculum=_curriculum(config.data.curriculum),
            lease_s=manager.rollout_lease_s,
            routing=manager.routing,
            kv_reuse_versions=config.asynchronous.kv_reuse_versions,
            interruptible=config.asynchronous.interruptible,
            pace=Pace(manager.rolling_fraction, manager.rolling_retry_timeout_s) if rolling else Pace(),
            blame=BlameRules(manager.blame_window_s, manager.blame_reporters, manager.blame_wrong_reports),
            fan_out=FanOut(config.weights.storage_readers),
            holds=HoldRules(config.evaluation.hold_share, config.evaluation.hold_s),
        )


def _curriculum(config: CurriculumConfig) -> Curriculum | None:
    if not config.enabled:
        return None
    return Curriculum(round(1000 * config.min), round(1000 * config.max), config.floor)
