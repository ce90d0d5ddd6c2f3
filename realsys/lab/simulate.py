"""Run manager, ledger, routing and buffer of a trial on a virtual clock, with cost models for servers and trainer.

Print throughput, waste and waits, and check all invariants.
"""

from __future__ import annotations

import logging
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from realsys.algorithm.token_losses import ks_distance
from realsys.lab.simulation.clock import spread
from realsys.lab.simulation.scenarios import plan
from realsys.lab.simulation.simulation import Broken, Simulation
from realsys.launch.commands.options import add_json, hours
from realsys.observe.screen.terminal import WorkLine, print_trimmed

_BROKEN = 1  # exit code


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("scenario", metavar="SCENARIO", help="lognormal, pareto, faults or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="field.path=value; costs begin with sim.")
    parser.add_argument("--hours", type=hours, metavar="H", help="same as sim.steps=0 sim.hours=H")
    parser.add_argument("--seed", type=int, metavar="N", help="same as seed=N")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write results.json and simulation.png here")
    add_json(parser, "print the measurements as JSON")


def run(args: Namespace) -> int:
    """Simulate a scenario, and print its measurements. Returns 1 if an invariant does not hold.

    Raises ConfigError for bad input.
    """
    duration = [] if args.hours is None else ["sim.steps=0", f"sim.hours={args.hours}"]
    seed = [] if args.seed is None else [f"seed={args.seed}"]
    simulation = Simulation(plan(args.scenario, [*args.overrides, *duration, *seed]))
    began, line = time.perf_counter(), WorkLine("simulate")
    logging.disable(logging.WARNING)  # the machines warn of each fault; here faults are the normal case
    try:
        simulation.run(lambda so_far: _show(line, so_far))
    except Broken as broken:
        print(f"realsys: {broken}", file=sys.stderr)
        return _BROKEN
    finally:
        line.clear()
        logging.disable(logging.NOTSET)
    found = results(simulation, time.perf_counter() - began)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    else:
        print_results(Console(), found)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
        draw_simulation(found, args.out / "simulation.png")
    return 0


def _show(line: WorkLine, simulation: Simulation) -> None:
    hours, steps, sim = simulation.clock.now / 3600, simulation.trainer.logged, simulation.sim
    limits = [(steps, sim.steps), (hours, sim.hours)]  # the first that is reached ends the simulation
    done, total = max((limit for limit in limits if limit[1]), key=lambda limit: limit[0] / limit[1], default=(0, 1))
    of_steps, of_hours = (f" of {limit:g}" if limit else "" for limit in (sim.steps, sim.hours))
    line.show(done, total, f"{steps}{of_steps} steps, {hours:.1f}{of_hours} h")


def print_results(console: Console, found: Mapping[str, Any]) -> None:
    """Print one line per measurement."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    grants, waits = found["grants"], found["waits_s"]
    lines = [
        ("trial", f"{found['servers']} servers, {found['workers']} workers, B={found['batch_groups']}, "
         f"n={found['group_size']}, max_staleness={found['max_staleness']}, stale_policy={found['stale_policy']}"),
        ("simulated", f"{found['hours']:.1f} h, {found['steps']} steps, {found['tickets']} tickets, "
         f"{found['events']} events in {found['wall_s']:.1f} s"),
        ("throughput", f"{found['steps_per_h']:.1f} steps/h, {found['trained_tokens_per_s']:,.0f} trained tokens/s "
         f"of {found['sampled_tokens_per_s']:,.0f} sampled"),
        ("trainer busy", f"{found['trainer_busy']:.1%}"),
        ("wasted", f"{found['wasted_total']:.2%} of the sampled tokens: {_shares(found['wasted'])}"),
        ("length bias", f"KS distance {found['ks']:.3f}"),
        ("staleness", "  ".join(f"{lag}: {rows}" for lag, rows in found["staleness"].items())),
        ("issued again", f"{found['prompts_issued_again']} prompts for staleness, one {found['most_issues']} times, "
         f"{found['issued_too_often']} more than 3 times"),
        ("grants", f"{grants['min']} to {grants['max']:.0f} per worker, mean {grants['mean']:.1f}, "
         f"at most {grants['largest']} in one reply"),
        ("servers", f"routable {found['routable']:.1%} of the time, {found['quarantines']} quarantines"),
        ("largest load", ", ".join(f"{ratio:.2f} x mean {what}" for what, ratio in found["largest_load"].items())),
    ]  # fmt: skip
    if found["ended_by"]:
        lines.insert(2, ("ended by", found["ended_by"]))
    for what, wait in waits.items():
        numbers = f"mean {wait['mean']:.1f}, median {wait['p50']:.1f}, 95 % {wait['p95']:.1f}, max {wait['max']:.1f}"
        lines.append((f"{what} wait", f"{numbers} s"))
    if found["faults"]:
        lines.append(("faults", ", ".join(f"{kind} {count}" for kind, count in sorted(found["faults"].items()))))
    for name, text in lines:
        table.add_row(name, text)
    print_trimmed(console, table)


def _shares(wasted: Mapping[str, float]) -> str:
    return ", ".join(f"{reason} {share:.2%}" for reason, share in wasted.items()) or "none"


# ---- results of a simulation as plain numbers, for JSON, terminal and picture


WARM_UP = 0.1  # share of the steps that throughput leaves out: at first all groups start together
MANY_ISSUES = 3  # times that a prompt may be issued for staleness


def results(simulation: Simulation, wall_s: float) -> dict[str, Any]:
    """Return the measurements of a simulation that has run.

    Shares of tokens are of all sampled train tokens. ``ks``: distance between the lengths of the trained completions
    and those of all granted ones. ``largest_load``: of the most loaded server, over the mean; both averaged over time.
    """
    plan, account, clock = simulation.plan, simulation.account, simulation.clock
    config, seconds = plan.config, max(simulation.clock.now, 1e-9)
    sampled = max(1, account.sampled - account.evaluated)
    open_tokens = sum(group.tokens for group in simulation.open)
    issues = [1 + drops for drops in account.stale_issues.values()]
    grants = [account.grants[name] for name in [f"rollout_worker/{index}" for index in range(config.rollout.workers)]]
    return {
        "command": plan.command(),
        "scenario": plan.scenario,
        "seed": config.seed,
        "servers": simulation.servers,
        "workers": config.rollout.workers,
        "batch_groups": config.train.batch_groups,
        "group_size": config.rollout.group_size,
        "max_staleness": config.asynchronous.max_staleness,
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


def _steps_per_h(steps: list[dict[str, float]]) -> float:
    """Return train steps per hour after the warm-up."""
    steady = steps[int(WARM_UP * len(steps)) :]
    if len(steady) < 2:
        return 0.0
    return 3600 * (len(steady) - 1) / max(1e-9, steady[-1]["time"] - steady[0]["time"])


# ---- picture of a simulation


_LINE, _BAR = "#1f5fa8", "#9dc3e6"


def draw_simulation(found: Mapping[str, Any], path: Path) -> None:
    """Draw wait per step, staleness, wasted tokens and waiting times of ``realsys.lab.simulate``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    wait, staleness, wasted, waits = axes.flat
    hours = [point["time"] / 3600 for point in found["curve"]]
    wait.plot(hours, [point["wait"] for point in found["curve"]], color=_LINE)
    wait.set_title("Wait for a batch (s) over hours")
    staleness.bar([int(lag) for lag in found["staleness"]], list(found["staleness"].values()), color=_BAR)
    staleness.set_title("Trained rows by staleness (versions)")
    shares = found["wasted"] or {"nothing": 0.0}
    wasted.barh(list(shares), [100 * share for share in shares.values()], color=_BAR)
    wasted.set_title("Wasted tokens (% of the sampled ones)")
    names = list(found["waits_s"])
    waits.bar(names, [found["waits_s"][name]["mean"] for name in names], color=_BAR, label="mean")
    waits.plot(names, [found["waits_s"][name]["p95"] for name in names], "o", color=_LINE, label="95 %")
    waits.legend(frameon=False, fontsize=9)
    waits.set_title("Waiting times (s)")
    for axis in axes.flat:
        axis.grid(True, color="#e6e6e6", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{found['scenario']}: {found['servers']} servers, {found['workers']} workers", fontsize=12)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
