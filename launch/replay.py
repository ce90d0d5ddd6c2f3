"""`realsys replay`: a recorded step again, from the checkpoint before it, compared bit for bit.

The ModelWorkers of the trial and a master for them run in a scratch folder: the trial is only read.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from launch.failures import first_failure
from launch.plan import ProcessSpec, plan
from launch.supervisor import Supervisor
from realsys.cluster.failure import read_errors
from realsys.config.dump import read_config, write_config
from realsys.config.machine import Machine
from realsys.config.paths import TrialPaths
from realsys.config.schema import ClusterConfig, Config
from realsys.errors import RealsysError, RecordError
from realsys.master.replay import ReplayJob, ReplayResult, replay_job
from realsys.train import record_files as files

_NOT_EQUAL = 1  # exit code
_HEADS = {
    "plan": "plan",
    "call": "calls",
    "score": "scores",
    "array": "arrays",
    "statistic": "stats",
    "parameter": "params",
}


def replay(trial_dir: Path, step: int | None) -> int:
    """Repeat ``step`` (the last recorded one by default), and those between it and the checkpoint before it.

    Returns 0 if all is bit-equal, else 1. Raises RealsysError for bad input, for a damaged record, for a replay that
    fails.
    """
    paths = TrialPaths(trial_dir.resolve())
    config = read_config(paths.config)
    step = last_recorded(paths) if step is None else step
    job = replay_job(config, paths, step)
    _check_records(paths, job)
    console = Console()
    origin = job.checkpoint or "the models as the trial was given them"
    steps = f"step {step}" if len(job.steps) == 1 else f"steps {files.ranges(job.steps)}"
    console.print(f"{config.experiment}/{config.trial}: {steps} again, from {origin}", highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="realsys-replay-") as scratch:
        result = asyncio.run(_run(scratch_config(config, paths, job), TrialPaths(Path(scratch)), job))
    _print(console, result)
    return 0 if result.equal else _NOT_EQUAL


def last_recorded(paths: TrialPaths) -> int:
    """Raises RecordError when no step is."""
    steps = files.recorded_steps(paths.records)
    if not steps:
        raise RecordError(f"{paths.records}: no step is recorded (record.samples)")
    return max(steps)


def _check_records(paths: TrialPaths, job: ReplayJob) -> None:
    """Before anything is started. Raises RecordError."""
    for step in job.steps:
        directory = files.record_of_step(paths.records, step)
        files.read_arrays(directory, files.read_record(directory))


def scratch_config(config: Config, paths: TrialPaths, job: ReplayJob) -> Config:
    """The trial's configuration, for processes of this machine in another folder."""
    here = ClusterConfig()
    cluster = config.cluster.model_copy(update={"name_store": here.name_store, "host": here.host})
    model = config.model.model_copy(update={"path": config.model.path or str(paths.model)})
    record = config.record.model_copy(update={"keep_steps": len(job.steps)})
    update = {"cluster": cluster, "model": model, "record": record, "recover": "off"}
    return config.model_copy(update=update)


async def _run(config: Config, paths: TrialPaths, job: ReplayJob) -> ReplayResult:
    for folder in (paths.logs, paths.errors):
        folder.mkdir()
    write_config(config, paths.config)
    (paths.root / "replay.json").write_bytes(msgspec.json.encode(job))
    run_id = f"replay-{uuid.uuid4().hex[:8]}"
    specs = processes(plan(config, paths, Machine.here(), run_id, os.environ.get("PYTHONPATH", "")))
    cluster = config.cluster
    supervisor = Supervisor(
        specs, stop_timeout_s=cluster.stop_timeout_s, master_stop_s=0.0, max_restarts=0, say=lambda text: None
    )
    outcome = await supervisor.run()
    if outcome.status == "interrupted":
        raise RealsysError(f"the replay was {outcome.reason}")
    if outcome.status == "failed":
        failure = first_failure(outcome, read_errors(paths.errors), paths.logs)
        if failure is None:
            raise RealsysError(f"the replay failed: {outcome.reason}")
        tail = "".join(f"\n  | {line}" for line in failure.log_tail)
        raise RealsysError(f"the replay failed: {failure.process} (pid {failure.pid}): {failure.problem}{tail}")
    return msgspec.json.decode((paths.root / "result.json").read_bytes(), type=ReplayResult)


def processes(specs: Sequence[ProcessSpec]) -> list[ProcessSpec]:
    """Of a trial's processes those of the training side, under a replay's master."""
    side = [spec for spec in specs if spec.on_training_side]
    return [_master(spec) if spec.kind == "master_worker" else spec for spec in side]


def _master(spec: ProcessSpec) -> ProcessSpec:
    argv = tuple("workers.replay_master" if part == "workers.master_worker" else part for part in spec.argv)
    return replace(spec, argv=argv, log=spec.log.with_name("replay_master-0.log"))


def _print(console: Console, result: ReplayResult) -> None:
    kinds = list(dict.fromkeys(kind for step in result.steps for kind in step.compared))
    table = Table("step", "answers", *(_HEADS[kind] for kind in kinds), "seconds", "", box=None)
    for step in result.steps:
        cells = [_cell(step.compared.get(kind, 0), step.unequal.get(kind, 0)) for kind in kinds]
        verdict = "[green]bit-equal[/]" if step.equal else "[red]NOT EQUAL[/]"
        table.add_row(str(step.step), str(step.sequences), *cells, f"{step.seconds:.2f}", verdict)
    console.print(table)
    for step in result.steps:
        for number, difference in enumerate(step.first):
            text = f"step {step.step}, {'first difference' if number == 0 else 'then'}: {difference}"
            console.print(text, highlight=False, soft_wrap=True, markup=False)


def _cell(compared: int, unequal: int) -> str:
    return f"{compared - unequal}/{compared}" if unequal else str(compared)
