"""Repeat a recorded train step from the checkpoint before it, and compare the results bit for bit.

GPUs add in another order in each run, unless ``train.deterministic`` is set. Without it their results are compared
within a tolerance. The ModelWorkers of the trial and a master for them run in a scratch folder: the trial is only read.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import uuid
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from realsys.cluster.files import write_secret
from realsys.cluster.process import read_errors
from realsys.config.device_plan import nodes_of, seats_of
from realsys.config.machine import Machine
from realsys.config.paths import TrialPaths, read_config, write_config
from realsys.config.schema import Config
from realsys.config.schema_cluster import ClusterConfig
from realsys.errors import CheckpointError, RealsysError, RecordError
from realsys.launch.commands.options import add_trial, find_trial, preload_workers
from realsys.launch.nodes.local_executor import open_executor
from realsys.launch.nodes.orders import LOCAL
from realsys.launch.process_plan import TRAINING, ProcessSpec, plan
from realsys.launch.start import changes
from realsys.launch.supervise.failures import first_failure
from realsys.launch.supervise.supervisor import Bounds, Hooks, Supervisor
from realsys.observe.screen.terminal import print_trimmed
from realsys.train import record_files as files
from realsys.train.checkpoint.checkpoint_files import STATE, verify
from realsys.train.master.replay import ReplayJob, ReplayResult, replay_job

_NOT_EQUAL = 1  # exit code
#: relative or absolute: a few units in the last place of bf16, which reach log-probs and statistics
_GPU_TOLERANCE = 0.05
#: sections of the configuration that a train step depends on
_TRAINED_WITH = ("allocation", "model", "train", "roles", "warmup", "rollout", "generation")
#: fields of the cluster that describe the machines of the trial
_OF_THE_MACHINES = (
    *("name_store", "host", "interface"),
    *("launcher", "nodes", "spare_nodes", "gpus_per_node", "cpus_per_node", "memory_gb_per_node"),
    *("cpu_nodes", "cpus_per_cpu_node", "memory_gb_per_cpu_node"),
)
_HEADS = {
    "plan": "plan",
    "call": "calls",
    "score": "scores",
    "array": "arrays",
    "statistic": "stats",
    "parameter": "params",
}


def add_arguments(parser: ArgumentParser) -> None:
    add_trial(parser)
    parser.add_argument("--step", type=int, metavar="N", help="default: the last recorded step")


def run(args: Namespace) -> int:
    """Repeat a step, and those between it and the checkpoint before it.

    Returns 0 if all is equal, else 1. Raises RealsysError for bad input, a damaged file, or a replay that fails.
    """
    preload_workers(args)
    paths = find_trial(args.trial_dir)
    read_config(paths.config)  # the folder may have lost it
    step = last_recorded(paths) if args.step is None else args.step
    # the settings of the step: the trial may have been started again with others
    directory = files.record_of_step(paths.records, step)
    config = files.config_of(directory, files.read_record(directory))
    job = _checked_job(config, paths, step)
    job = msgspec.structs.replace(job, tolerance=tolerance_of(config, Machine.here()))
    console = Console()
    origin = job.checkpoint or "the models as the trial was given them"
    steps = f"step {step}" if len(job.steps) == 1 else f"steps {files.ranges(job.steps)}"
    console.print(f"{config.experiment}/{config.trial}: {steps} again, from {origin}", highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="realsys-replay-") as scratch:
        # processes of this machine, in another folder
        here = ClusterConfig()
        cluster = config.cluster.model_copy(update={field: getattr(here, field) for field in _OF_THE_MACHINES})
        model = config.model.model_copy(update={"path": str(paths.base_model(config))})
        record = config.record.model_copy(update={"keep_steps": len(job.steps)})
        update = {"cluster": cluster, "model": model, "record": record, "recover": "off"}
        result = asyncio.run(_run(config.model_copy(update=update), TrialPaths(Path(scratch)), job))
    equal = f"equal within {job.tolerance:g}" if job.tolerance else "bit-equal"
    kinds = list(dict.fromkeys(kind for step in result.steps for kind in step.compared))
    table = Table("step", "answers", *(_HEADS[kind] for kind in kinds), "seconds", "", box=None)
    for step in result.steps:
        cells = [_cell(step.compared.get(kind, 0), step.unequal.get(kind, 0)) for kind in kinds]
        verdict = f"[green]{equal}[/]" if step.equal else "[red]NOT EQUAL[/]"
        table.add_row(str(step.step), str(step.sequences), *cells, f"{step.seconds:.2f}", verdict)
    print_trimmed(console, table)
    for step in result.steps:
        for number, difference in enumerate(step.first):
            text = f"step {step.step}, {'first difference' if number == 0 else 'then'}: {difference}"
            console.print(text, highlight=False, soft_wrap=True, markup=False)
    return 0 if result.equal else _NOT_EQUAL


def tolerance_of(config: Config, machine: Machine) -> float:
    """Return by how much the numbers of a replay on ``machine`` may differ."""
    return 0.0 if config.train.deterministic or not machine.trainer_gpus else _GPU_TOLERANCE


def last_recorded(paths: TrialPaths) -> int:
    """Return the newest recorded step. Raises RecordError if there is none."""
    steps = files.recorded_steps(paths.records)
    if not steps:
        raise RecordError(f"{paths.records}: no step is recorded: set record.keep_steps above 0 when you train")
    return max(steps)


def _checked_job(config: Config, paths: TrialPaths, step: int) -> ReplayJob:
    """Plan the replay of ``step``, and verify every file that it needs before anything starts. Raises RecordError."""
    try:
        job = replay_job(config, paths, step)
        if job.checkpoint:
            verify(Path(job.checkpoint))
    except CheckpointError as error:
        raise RecordError(f"step {step} cannot be repeated: {error}") from None
    for each in job.steps:
        directory = files.record_of_step(paths.records, each)
        record = files.read_record(directory)
        files.read_arrays(directory, record)
        ours, theirs = (c.model_dump(include=set(_TRAINED_WITH)) for c in (config, files.config_of(directory, record)))
        if different := [f"{each.field}={each.old!r} ({each.new!r})" for each in changes(theirs, ours)]:
            problem = f"was trained with other settings than step {job.step}, and there is no checkpoint between them"
            raise RecordError(f"step {each} {problem}: {', '.join(different[:3])}")
    return job


async def _run(config: Config, paths: TrialPaths, job: ReplayJob) -> ReplayResult:
    for folder in (paths.logs, paths.errors):
        folder.mkdir()
    write_secret(paths.token, secrets.token_urlsafe(32).encode())
    write_config(config, paths.config)
    (paths.root / "replay.json").write_bytes(msgspec.json.encode(job))
    run_id = f"replay-{uuid.uuid4().hex[:8]}"
    machine = Machine.here()
    seats = seats_of(config, machine, nodes_of(config, machine), TRAINING)
    specs = plan(config, paths, seats, run_id, os.environ.get("PYTHONPATH", ""))
    specs = [_master(spec) if spec.kind == "master_worker" else spec for spec in specs]
    cluster = config.cluster
    bounds = Bounds(cluster.stop_timeout_s, stop_progress_s=0.0, max_restarts=0)
    async with open_executor() as node:
        outcome = await Supervisor(specs, bounds, Hooks(say=lambda *_: None), {LOCAL: node}).run()
    if outcome.status == "interrupted":
        interrupted = RealsysError(f"the replay was {outcome.reason}")
        interrupted.exit_code = 128 + (outcome.signal or 0)
        raise interrupted
    if outcome.status == "failed":
        failure = first_failure(outcome, read_errors(paths.errors), paths.logs)
        if failure is None:
            raise RealsysError(f"the replay failed: {outcome.reason}")
        if job.checkpoint and not (Path(job.checkpoint) / STATE).exists():
            raise RecordError(f"{job.checkpoint} was removed by the running trial (checkpoint.keep): try again")
        what = f"the replay failed: {failure.process} (pid {failure.pid}): {failure.problem}"
        if failure.exit_code == RecordError.exit_code:  # bad input: the log adds nothing
            raise RecordError(what)
        raise RealsysError(what + "".join(f"\n  | {line}" for line in failure.log_tail))
    return msgspec.json.decode((paths.root / "result.json").read_bytes(), type=ReplayResult)


def _master(spec: ProcessSpec) -> ProcessSpec:
    master, replay_master = "realsys.workers.master_worker", "realsys.workers.replay_master"
    argv = tuple(replay_master if part == master else part for part in spec.argv)
    return replace(spec, argv=argv, log=spec.log.with_name("replay_master-0.log"))


def _cell(compared: int, unequal: int) -> str:
    return f"{compared - unequal}/{compared}" if unequal else str(compared)
