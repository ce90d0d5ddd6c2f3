"""A trial from its command line to its end: compose, fit, check, plan, prepare; supervise and show it; report.

The same command again continues a trial that was stopped or died (launch/start.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

import grpc
from rich.console import Console
from rich.table import Table

from realsys.cluster.aio import full_disk, run_beside
from realsys.cluster.http_client import attempts
from realsys.cluster.names.etcd_store import EtcdAccess, import_etcd3
from realsys.cluster.network import (
    HOST,
    PORTS,
    bind_problem,
    interfaces,
    is_loopback,
    join_host_port,
    own_addresses,
)
from realsys.cluster.process import RUN_ID, STORE_ADDRESS, read_errors
from realsys.config.allocation import parse_allocation
from realsys.config.backend_rules import backend_rules
from realsys.config.compose import compose, given_fields, quoted
from realsys.config.dataflow import dataflow_of, takes_prompts
from realsys.config.device_memory import GIB
from realsys.config.device_plan import Needs, as_lines, nodes_of, seats_of
from realsys.config.doors import LOSS
from realsys.config.machine import Machine
from realsys.config.memory_check import Place, device_lines, host_line, place_of, smallest_gpu_for_ranks, turns_line
from realsys.config.paths import TrialPaths
from realsys.config.rank_memory import recomputed_of_model
from realsys.config.rules import check, sampling_warnings
from realsys.config.schema import Config
from realsys.config.trial_sizes import batch_tokens, disk_bytes, longest_sequence, model_of, record_bytes, step_bytes
from realsys.errors import ConfigError, NameStoreError, RealsysError, WaitTimeout
from realsys.launch.conclude import conclude, draw, journal_bytes, newest_step
from realsys.launch.fit import fit
from realsys.launch.launchers.contract import Launcher, check_launcher, check_start, make_launcher
from realsys.launch.nodes.coordinator import Terms, open_nodes
from realsys.launch.prepare import (
    Examined,
    Ready,
    check_gpus_are_given,
    disk_warnings,
    examine,
    free_bytes,
    prepare,
    resolve,
)
from realsys.launch.process_plan import (
    ProcessSpec,
    agent_command,
    as_commands,
    as_rows,
    needs_of,
    on_this_machine,
    plan,
)
from realsys.launch.start import rows_of_epoch
from realsys.launch.supervise.failures import no_room
from realsys.launch.supervise.restart_policy import TrialOutcome
from realsys.launch.supervise.stop_request import watch_requests
from realsys.launch.supervise.supervisor import Bounds, Hooks, Say, Supervisor
from realsys.launch.trial_folder import remove_half_written
from realsys.launch.words import resume_command
from realsys.observe.curves import draw_while_running
from realsys.observe.screen.display import View, make_view
from realsys.observe.screen.progress import Monitor, TrialProgress
from realsys.observe.screen.terminal import Terminal, print_trimmed, reported, tell
from realsys.observe.screen.text_figures import size_text
from realsys.observe.step_log import EventKind, EventLog, StepTail
from realsys.observe.trackers.link import Trackers, check_trackers
from realsys.serve import wire
from realsys.serve.settings import ServeSettings, read_settings
from realsys.train.master.session import planned_steps
from realsys.train.master.stopping import STOP_PROGRESS_S
from realsys.train.master.stopping import progress as progress_of_stop
from realsys.weights.host_places import sweep


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of the command line besides the overrides."""

    trial: str | None = None
    config_dir: Path | None = None
    dry_run: bool = False
    plain: bool = False
    session: bool = False  # a script waits for the MasterWorker


@dataclass(frozen=True, slots=True)
class Planned:
    """A checked run. ``chosen``: lines about settings that were left open; ``placement``: on other machines.

    ``serve``: for the clients of a service; None: those in its folder.
    """

    config: Config
    paths: TrialPaths
    machine: Machine
    specs: list[ProcessSpec]
    placement: list[str]
    chosen: list[str]
    serve: ServeSettings | None = None


def plan_run(overrides: Sequence[str], options: RunOptions) -> Planned:
    """Compose, fit, check and plan a run. Writes nothing. Raises RealsysError for bad input."""
    given = [*overrides, *([] if options.trial is None else [f"trial={quoted(options.trial)}"])]
    config = resolve(compose(given, config_dir=options.config_dir), now=datetime.now())
    check_script(config, waits=options.session)
    planned = plan_of(config, given_fields(given, config_dir=options.config_dir))
    return replace(planned, chosen=[*planned.chosen, *_unread(config, overrides)])


@contextlib.contextmanager
def errors_name(what: str) -> Iterator[None]:
    """Put ``what`` behind the message of an error."""
    try:
        yield
    except RealsysError as error:
        error.args = (f"{error} ({what})",)
        raise


def check_script(config: Config, *, waits: bool) -> None:
    """Refuse a run that would wait for a script which nobody runs. Raises ConfigError."""
    if config.train.loop == "session" and not waits:
        problem = "is set by realsys.Session: run your script again, or set train.loop=train"
        raise ConfigError("train.loop", "session", problem)


def _unread(config: Config, overrides: Sequence[str]) -> Iterator[str]:
    """Yield a warning for each override of what only a made model, or made data, has."""
    kind = config.data.kind
    unread = {
        "model.tiny.": "model.path names the model" if config.model.path else "",
        "data.arith.": f"data.kind={kind} makes no rows" if kind != "arith" else "",
    }
    for field in (text.lstrip("+").partition("=")[0] for text in overrides):
        for section, why in unread.items():
            if why and field.startswith(section):
                yield f"warning: {field} is not read: {why}"


def plan_of(config: Config, named: Collection[str]) -> Planned:
    """Fit, check and plan a composed run. ``named``: fields that the user has set. Raises RealsysError."""
    machine = Machine.here()
    config, chosen = fit(config, named, machine)
    chosen = [*chosen, *check_gpus_are_given(config, named)]
    check(config, machine)
    os.environ[PORTS] = config.cluster.ports  # ports for the socket to which the agents connect
    check_launcher(config)
    check_trackers(config)
    chosen = [*chosen, *sampling_warnings(config.generation.sampling)]
    if config.train.ppo.loss not in LOSS.builtin:
        from realsys.algorithm.loss import try_loss  # imports torch, which takes seconds

        try_loss(config.train.ppo)
    paths = TrialPaths.of(config)
    return Planned(config, paths, machine, *_planned(config, paths, machine), chosen)


def show_plan(planned: Planned) -> None:
    """Make every check of a start and print the plan: a dry run. Raises RealsysError."""
    config = planned.config
    elsewhere = config.cluster.nodes > 0
    served(planned)
    examined = examine(config, planned.paths, other_disk=elsewhere)
    place = place_of(config, parse_allocation(config.allocation), backend_rules(config), planned.machine)
    examined = replace(
        examined, lines=[*planned.chosen, *examined.lines, *(disk_warnings(config, planned.paths) if elsewhere else ())]
    )
    specs = planned.specs if elsewhere else on_this_machine(planned.specs, planned.machine)
    print_dry_run(Terminal(), config, planned.paths, specs, planned.placement, examined, place)


def run_planned(planned: Planned, *, dry_run: bool, plain: bool, again: str = "") -> int:
    """Run a planned trial, or show its plan. Returns the exit code. Raises RealsysError for bad input.

    ``again``: the command that continues it, if it is not the one of the trial alone.
    """
    config, paths, specs = planned.config, planned.paths, planned.specs
    if dry_run:
        show_plan(planned)
        return 0
    check_start(config)
    console = Terminal()
    say = functools.partial(console.print, highlight=False, soft_wrap=True, markup=False)
    host_of_launcher(config)  # before anything is written
    serve = served(planned)
    console.print(f"trial [bold]{config.experiment}/{config.trial}[/] in {paths.root}", highlight=False, soft_wrap=True)
    for line in planned.chosen:
        say(line)
    with prepare(config, say, serve) as ready:
        started = time.time()
        view = make_view(console, config, paths, plain=plain)
        outcome = asyncio.run(supervise(config, ready, specs, view))
        if outcome.refused:
            raise outcome.refused
        with reported("remove half-written files"):
            remove_half_written(paths)
        sweep()  # a server that was killed leaves its copy of the weights in /dev/shm
        again = again or resume_command(paths.root, plain=plain, session=config.train.loop == "session")
        code, summary = conclude(config, paths, outcome, started, again)
    draw(config, paths, summary["steps"])
    return code


def served(planned: Planned) -> ServeSettings | None:
    """Return the settings of a service that can start: its port is free, and the package tinker is installed.

    None if the run is none. Raises ConfigError.
    """
    config = planned.config
    if not config.is_service:
        return None
    serve = planned.serve or read_settings(planned.paths.serve)
    wire.messages()
    if not config.cluster.nodes and (problem := bind_problem(config.cluster.host, serve.port)):
        remedy = "choose another one, or 0 for any: realsys serve --port"
        raise ConfigError("port", serve.port, f"cannot be bound on {config.cluster.host}: {problem}: {remedy}")
    return serve


def _planned(config: Config, paths: TrialPaths, machine: Machine) -> tuple[list[ProcessSpec], list[str]]:
    """Return the processes, and their placement as text if the trial has agents."""
    nodes = nodes_of(config, machine)
    seats = seats_of(config, machine, nodes)
    run_id = f"{config.experiment}-{config.trial}-{uuid.uuid4().hex[:8]}"
    specs = plan(config, paths, seats, run_id, os.environ.get("PYTHONPATH", ""))
    cluster = config.cluster
    if not cluster.nodes:
        return specs, []
    lines = as_lines(nodes, seats)
    if cluster.machines > 1 and not cluster.interface and is_loopback(cluster.host):
        remedy = f"set cluster.interface, or {HOST} on each node"
        lines.append(f"warning: other nodes cannot reach cluster.host={cluster.host}: {remedy}")
    if cluster.gpus_per_node and not cluster.gpu_memory_gb:
        lines.append("warning: the memory of the GPUs is checked only when they join: set cluster.gpu_memory_gb")
    return specs, lines


def host_of_launcher(config: Config) -> str:
    """Return the address on which the launcher hears its agents. Raises ConfigError if they cannot reach it."""
    cluster = config.cluster
    return own_addresses(cluster, os.environ, interfaces())[0] if cluster.nodes else cluster.host


def _terms(config: Config, launcher: Launcher) -> Terms:
    cluster = config.cluster
    agents, first = (cluster.host, cluster.interface, cluster.machines), launcher.own_machine()
    return Terms(host_of_launcher(config), cluster.lease_s, launcher.join_timeout_s(), agents, launcher.problem, first)


def _bounds(config: Config, launcher: Launcher) -> Bounds:
    cluster = config.cluster
    return Bounds(
        cluster.stop_timeout_s,
        STOP_PROGRESS_S,
        cluster.max_restarts,
        min_share=cluster.min_workers_share,
        join_s=launcher.join_timeout_s(),
        log_bytes=int(cluster.log_mb * 2**20),
    )


def _hooks(config: Config, paths: TrialPaths, launcher: Launcher, say: Say, finished: Callable[[], bool]) -> Hooks:
    need, store = step_bytes(config, dataflow_of(config)), config.cluster.name_store.root
    # of this machine; of others only the trial's own disk is seen, which they share
    others = [*([Path(store)] if store else []), Path(tempfile.gettempdir()), Path("/dev/shm")]
    hooks = Hooks(
        say=say,
        launch=lambda: launcher.start(agent_command(paths, os.environ.get("PYTHONPATH", "")), say),
        errors=lambda: read_errors(paths.errors),
        checkpoint=lambda: newest_step(paths),
        finished=finished,
        outside=lambda: full_disk(paths.root),
        no_room=lambda: no_room(paths.root, need, others),
        stopping=lambda: progress_of_stop(paths),
        name_store_ready=lambda spec, host: _own_store_answers(config, paths, spec, host),
    )
    if config.is_service:
        # A call that ends the trainer is repeated twice and then refused, so each death until then is progress.
        goes_on = "with the calls that its clients wait for"
        hooks = replace(hooks, checkpoint=lambda: journal_bytes(paths), goes_on=lambda _: goes_on)
    return hooks


async def supervise(config: Config, ready: Ready, specs: Sequence[ProcessSpec], view: View) -> TrialOutcome:
    """Start the processes of the plan, show them, and return the outcome when the supervisor has ended."""
    paths = ready.paths
    progress, tail = TrialProgress(), StepTail(paths.steps)
    progress.add(tail.records())  # earlier runs of this trial count, and are not shown again
    troubles: list[Exception] = []
    launcher = make_launcher(config, paths)
    events = EventLog(paths.events)
    events.add("start", f"{len(specs)} processes")

    def noted(text: str) -> None:
        events.add("note", text)
        view.note(text)

    monitor = Monitor(config, paths, progress, view, tail, noted)

    def say(text: str = "", kind: EventKind = "note", process: str = "") -> None:
        if text:
            events.add(kind, text, process)
        try:
            monitor.read_steps()  # events in their order
            if text:
                view.note(text)
        except Exception as exc:  # the display or its terminal failed: the run continues without them
            troubles.append(exc)

    def finished() -> bool:
        say()
        return progress.phase == "done"

    hooks = _hooks(config, paths, launcher, say, finished)
    bounds = _bounds(config, launcher)
    terms = _terms(config, launcher)
    outcome, trouble = TrialOutcome("failed", "the display could not be opened"), None
    with reported("show the run"), view:
        watching = asyncio.create_task(monitor.run())
        try:
            # The process of the trackers starts first, so that it is no child of the nodes.
            nodes_of_run = open_nodes(node_needs(config, specs), paths, terms, inherit=[ready.lock.fd])
            async with Trackers(config, paths, say) as trackers, nodes_of_run as nodes:
                supervisor = Supervisor(specs, bounds, hooks, nodes)
                asked = functools.partial(_stop_asked, supervisor, say)
                watched = run_beside(supervisor.run(), watch_requests(paths.stop_request, asked))
                drawing = draw_while_running(paths, config.telemetry.curves_every_s)
                outcome = await run_beside(watched, drawing)
                trackers.status = outcome.status
        finally:
            await _stop(launcher)
            watching.cancel()
            [trouble] = await asyncio.gather(watching, return_exceptions=True)
            say()
            events.add("stop", f"{outcome.status}: {outcome.reason}")
    for exc in [exc for exc in (trouble, *troubles) if isinstance(exc, Exception)][:1]:
        tell(f"realsys: the display stopped working: {type(exc).__name__}: {exc}")
    return outcome


def node_needs(config: Config, specs: Sequence[ProcessSpec]) -> dict[str, Needs]:
    """Return what each node must have. GPUs of unknown size must hold the largest training rank. Raises ModelError."""
    cluster = config.cluster
    is_unknown = cluster.gpus_per_node > 0 and not cluster.gpu_memory_gb
    rank_gpu = smallest_gpu_for_ranks(config) if is_unknown else 0
    return needs_of(specs, int(cluster.gpu_memory_gb * GIB), rank_gpu)


def _stop_asked(supervisor: Supervisor, say: Callable[[str], None], user: str) -> None:
    say(f"{user} asks for a stop (realsys stop)")
    supervisor.interrupt(signal.SIGTERM)


async def _stop(launcher: Launcher) -> None:
    try:
        await launcher.stop()
    except Exception as exc:  # it may be code of the user; the run is over, and must be reported
        tell(f"realsys: the launcher did not stop: {type(exc).__name__}: {exc}")


async def _own_store_answers(config: Config, paths: TrialPaths, spec: ProcessSpec, host: str) -> None:
    """Wait until the run's own etcd answers. ``host``: address of its node. Raises WaitTimeout."""
    address = config.cluster.name_store.address
    if at := spec.addresses.get(STORE_ADDRESS):
        address = join_host_port(host, at.port)
    # Imported here: grpc takes time to load and is needed for etcd only.
    from realsys.cluster.names.etcd_store import EtcdAccess

    access = EtcdAccess.by_one_file(paths.etcd_certificate)
    await etcd_answers(address, access, spec.env[RUN_ID], config.cluster.connect_timeout_s)
    if at:
        paths.store_address.write_text(address, "utf-8")


# ---- `realsys run --dry-run`: engine, model, batch, steps, memory, disk and processes


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
        print_trimmed(console, process_table(specs))
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
    engine = f"{config.generation.backend}, {layout}" if servers else "none"
    yield "engine", f"{engine}, training ranks: {allocation.workers}"
    if turns := turns_line(config, place):
        yield "turns", turns
    name = config.model.path or "made on the spot"
    yield "model", f"{_count(model_of(config).parameters)} parameters in {config.model.dtype}, {name}"
    groups, size = config.train.batch_groups, config.rollout.trained_episodes
    episodes = f"{groups} prompts x {size} episodes of at most {longest_sequence(config):,} tokens"
    ppo = config.train.ppo
    loss = f"loss {ppo.loss}, clip -{ppo.eps_clip:g} +{ppo.eps_clip_higher or ppo.eps_clip:g}"
    advantage = f"; advantages: mean of {ppo.advantage.mean}, deviation of {ppo.advantage.std}"
    rows = rows_of_epoch(config, sizes)
    if not takes_prompts(config):
        loss, advantage = ppo.algorithm, ""
        episodes = f"{groups} {flow.rows} of at most {longest_sequence(config):,} tokens"
    if config.is_service:
        yield (
            "clients",
            f"rows of at most {longest_sequence(config):,} tokens, adapters of rank {config.train.lora.rank}",
        )
    else:
        yield "batch", f"{episodes}: at most {batch_tokens(config):,} tokens"
        yield "training", f"{loss}, lr {config.train.optimizer.lr:g}, {ppo.minibatches} minibatches{advantage}"
        yield "steps", epochs_text(planned_steps(config, rows), rows / groups)
    layers = model_of(config).layers
    again = recomputed_of_model(config.train.recompute, layers, allocation.actor.pipeline)
    yield "recompute", f"{again} of {layers} layers in the backward pass"
    yield "host", f"memory {host_line(config, place)}"
    records = f", records of the kept steps up to {size_text(record_bytes(config))}" if config.record.keep_steps else ""
    yield "disk", f"about {size_text(disk_bytes(config, flow))}{records}; {size_text(free_bytes(config))} are free"


def epochs_text(steps: int, steps_of_epoch: float) -> str:
    """Return the steps of a run as text, with the number of epochs. Data may have less than one batch."""
    epochs, of_epoch = (f"{n:,.0f}" if n >= 100 else f"{n:.2g}" for n in (steps / steps_of_epoch, steps_of_epoch))
    return f"{steps:,}, which are {epochs} epochs; one epoch is {of_epoch} steps"


def _count(number: int) -> str:
    for size, unit in ((10**9, " billion"), (10**6, " million"), (10**3, " thousand")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


# ---- the etcd that a run starts for itself (``realsys.workers.name_store``), seen from here


_PERIOD_S = 0.05
_ATTEMPT_S = 2.0


async def etcd_answers(address: str, access: EtcdAccess, member: str, timeout_s: float) -> None:
    """Return when etcd at ``address`` lists ``member``, which takes a leader. Raises WaitTimeout.

    The etcd of another run may have taken the port. It is not used.
    """
    problem = ""
    async for _ in attempts(timeout_s, _PERIOD_S, _PERIOD_S):
        problem = await asyncio.to_thread(_problem, address, access, member, min(_ATTEMPT_S, timeout_s))
        if not problem:
            return
    limit = f"{timeout_s:g} s (cluster.connect_timeout_s)"
    raise WaitTimeout(f"etcd at {address} did not answer within {limit}: {problem}")


def _problem(address: str, access: EtcdAccess, member: str, timeout_s: float) -> str:
    """Return why etcd at ``address`` cannot be used yet; "" if it lists ``member``."""
    rpc = import_etcd3().etcdrpc
    try:
        with access.channel(address) as channel:
            members = rpc.ClusterStub(channel).MemberList(rpc.MemberListRequest(), timeout=timeout_s).members
    except grpc.RpcError as error:
        return str(error.details())
    except NameStoreError as error:
        return str(error)
    names = [each.name for each in members]
    return "" if member in names else f"it is the etcd of another run ({', '.join(names)})"
