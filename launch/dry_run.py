"""Prints what `realsys run --dry-run` found: engine, model, batch, steps, memory, disk and processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table

from realsys.config.allocation import parse_allocation
from realsys.config.dataflow import dataflow_of
from realsys.config.memory_check import Place, device_lines, host_line
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.trial_sizes import batch_tokens, disk_bytes, longest_sequence, model_of, record_bytes
from realsys.launch.preflight import free_bytes
from realsys.launch.prepare import Examined
from realsys.launch.process_plan import ProcessSpec, as_commands, as_rows
from realsys.observe.screen.text_figures import size_text
from realsys.train.master.loop import planned_steps


def print_dry_run(
    console: Console,
    config: Config,
    paths: TrialPaths,
    specs: Sequence[ProcessSpec],
    placement: Sequence[str],
    examined: Examined,
    place: Place,
) -> None:
    """Print facts, notes, memory, and the processes: a table and their commands, which can be copied to a shell.

    ``placement``: lines to print instead of table and commands, for a plan of other machines.
    """

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    say(f"{config.experiment}/{config.trial}: {len(specs)} processes, folder {paths.root}")
    for name, text in _facts(config, examined.sizes, place):
        say(f"{name:<10}  {text}")
    for line in [*examined.lines, *device_lines(config, place)]:
        say(line)
    for line in placement:
        say(line)
    if not placement:
        console.print(process_table(specs))
        say("commands:")
        for command in as_commands(specs):
            say(f"  {command}")
    say("dry run: everything is checked; nothing was written or started")


def process_table(specs: Sequence[ProcessSpec]) -> Table:
    """Return a table of the processes. On a narrow terminal the shards that a process holds take several lines."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("process", "holds", "threads", "device", "when it dies"):
        justify: Literal["left", "right"] = "right" if column == "threads" else "left"
        table.add_column(column, no_wrap=column != "holds", overflow="fold", justify=justify)
    for row in as_rows(specs):
        table.add_row(*row)
    return table


def _facts(config: Config, sizes: Mapping[str, int], place: Place) -> Iterator[tuple[str, str]]:
    allocation, flow = parse_allocation(config.allocation), dataflow_of(config)
    servers, width = allocation.inference.data, allocation.inference.tensor
    layout = f"servers: {servers}" + (f" of {width} devices each" if width > 1 else "")
    yield "engine", f"{config.generation.backend}, {layout}, training ranks: {allocation.workers}"
    name = config.model.path or "made on the spot"
    yield "model", f"{_count(model_of(config).parameters)} parameters in {config.model.dtype}, {name}"
    groups, size = config.train.batch_groups, config.rollout.trained_episodes
    episodes = f"{groups} prompts x {size} episodes of at most {longest_sequence(config):,} tokens"
    yield "batch", f"{episodes}: at most {batch_tokens(config):,} tokens"
    ppo = config.train.ppo
    loss = f"loss {ppo.loss}, clip -{ppo.eps_clip:g} +{ppo.eps_clip_higher or ppo.eps_clip:g}"
    advantage = f"advantages: mean of {ppo.advantage.mean}, deviation of {ppo.advantage.std}"
    yield "training", f"{loss}, lr {config.train.optimizer.lr:g}, {ppo.minibatches} minibatches; {advantage}"
    steps, per_epoch = planned_steps(config, sizes["train"]), sizes["train"] / groups
    yield "steps", f"{steps:,}, which are {steps / per_epoch:.2f} epochs; one epoch is {per_epoch:,.1f} steps"
    yield "host", f"memory {host_line(config, place)}"
    records = f", records of the kept steps up to {size_text(record_bytes(config))}" if config.record.keep_steps else ""
    yield "disk", f"about {size_text(disk_bytes(config, flow))}{records}; {size_text(free_bytes(config))} are free"


def _count(number: int) -> str:
    for size, unit in ((10**9, " billion"), (10**6, " million"), (10**3, " thousand")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
