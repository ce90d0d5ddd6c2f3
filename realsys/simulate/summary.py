"""Results of a simulation as plain numbers, for JSON, terminal and picture."""

from __future__ import annotations

from typing import Any

from realsys.algorithm.batch.token_losses import ks_distance
from realsys.simulate.account import spread
from realsys.simulate.simulation import Simulation

WARM_UP = 0.1  # share of the steps that throughput leaves out: at first all groups start together
MANY_ISSUES = 3  # times that a prompt may be issued for staleness


def results(simulation: Simulation, wall_s: float) -> dict[str, Any]:
    """Return the measurements of a simulation that has run.

    Shares of tokens are of all sampled train tokens. ``ks``: distance between the lengths of the trained completions
    and those of all granted ones. ``largest_load``: of the most loaded server, over the mean; both averaged over time.
    """
    plan, account, clock = simulation.plan, simulation.account, simulation.clock
    config, sim, seconds = plan.config, plan.sim, max(simulation.clock.now, 1e-9)
    sampled = max(1, account.sampled - account.evaluated)
    open_tokens = sum(group.tokens for group in simulation.open)
    issues = [1 + drops for drops in account.stale_issues.values()]
    grants = [account.grants[name] for name in _workers(config.rollout.workers)]
    return {
        "command": plan.command(),
        "scenario": plan.scenario,
        "seed": config.seed,
        "servers": sim.server.count,
        "workers": config.rollout.workers,
        "batch_groups": config.train.batch_groups,
        "group_size": config.rollout.group_size,
        "eta": config.asynchronous.max_head_offpolicyness,
        "stale_policy": config.asynchronous.stale_policy,
        "hours": seconds / 3600,
        "steps": simulation.trainer.logged,
        "ended_by": simulation.trainer.used_up,
        "events": clock.events,
        "wall_s": wall_s,
        "tickets": len(simulation.manager.state.ledger.columns),
        "sampled_tokens_per_s": sampled / seconds,
        "trained_tokens_per_s": sum(account.trained.values()) / seconds,
        "steps_per_h": _steps_per_h(account.steps),
        "trainer_busy": account.busy_s / seconds,
        "wasted": {reason: tokens / sampled for reason, tokens in account.wasted.most_common()},
        "wasted_total": sum(account.wasted.values()) / sampled,
        "open": open_tokens / sampled,
        "ks": ks_distance(account.drawn, account.in_loss),
        "staleness": {str(lag): account.staleness[lag] for lag in sorted(account.staleness)},
        "prompts_issued_again": len(issues),
        "most_issues": max(issues, default=1),
        "issued_too_often": sum(issue > MANY_ISSUES for issue in issues),
        "waits_s": {what: spread(values) for what, values in sorted(account.waits.items())},
        "grants": spread([float(count) for count in grants]) | {"min": min(grants), "largest": account.largest_grant},
        "largest_load": {what: largest / max(mean, 1e-9) for what, (largest, mean) in account.loads.items()},
        "quarantines": account.quarantines,
        "routable": account.routable_s / max(account.served_s, 1e-9),
        "faults": dict(account.faults),
        "curve": account.steps[:: max(1, len(account.steps) // 500)],
    }


def _workers(count: int) -> list[str]:
    return [f"rollout_worker/{index}" for index in range(count)]


def _steps_per_h(steps: list[dict[str, float]]) -> float:
    """Return train steps per hour after the warm-up."""
    steady = steps[int(WARM_UP * len(steps)) :]
    if len(steady) < 2:
        return 0.0
    return 3600 * (len(steady) - 1) / max(1e-9, steady[-1]["time"] - steady[0]["time"])
