"""`realsys simulate`: runs the production state machines of a trial on a virtual clock, and reports measurements."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from realsys.launch.results.simulation_picture import draw_simulation
from realsys.observe.screen.terminal import WorkLine
from realsys.simulate.invariants import Broken
from realsys.simulate.scenarios import plan
from realsys.simulate.simulation import Simulation
from realsys.simulate.summary import results

_BROKEN = 1  # exit code


def simulate(scenario: str, overrides: Sequence[str], out: Path | None, *, as_json: bool = False) -> int:
    """Simulate a scenario, and print its measurements. Returns 1 if an invariant does not hold.

    ``out``: folder for results.json and simulation.png. Raises ConfigError for bad input.
    """
    simulation = Simulation(plan(scenario, overrides))
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
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    else:
        print_results(Console(), found)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
        draw_simulation(found, out / "simulation.png")
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
    for name, text in _lines(found):
        table.add_row(name, text)
    console.print(table)


def _lines(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    grants, waits = found["grants"], found["waits_s"]
    lines = [
        ("trial", f"{found['servers']} servers, {found['workers']} workers, B={found['batch_groups']}, "
         f"n={found['group_size']}, eta={found['eta']}, stale_policy={found['stale_policy']}"),
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
    return lines


def _shares(wasted: Mapping[str, float]) -> str:
    return ", ".join(f"{reason} {share:.2%}" for reason, share in wasted.items()) or "none"
