"""Runs a case: injects its faults one after the other, waits for each recovery, then checks the trial.

    train ──> step b: the master holds ──> gate ──> fault fires ──> three further steps ──> ... ──> end ──> checks
                                             └── next row: b += STEPS, once the last one has been recovered from

The MasterWorker may not begin step b before gate k is open, and gate k opens only when row k - 1 is over: so no row
depends on how fast a machine is. Every wait has a bound and an error that names it.
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from realsys.config.backend_rules import SGLANG
from tests.chaos import checks, outside
from tests.chaos.kept_agents import Agents
from tests.chaos.live import ChaosRun, Ended, Interrupted
from tests.chaos.schedule.rows import JOB, Case, Needs, Row
from tests.support.faults.plan import Fault, environment
from tests.support.jobs.jobs import command, running
from tests.support.processes.ports import lasting_ports

STEPS = 6  # train steps that a row has
#: steps after which the victim must be back: eta is 1, so at most two batches were buffered
PROOF = 3
FIRE_S, RECOVER_S, END_S = 90.0, 240.0, 120.0


@dataclass
class RowResult:
    """One line of the table."""

    case: str
    fault: str
    phase: str
    outcome: str = "not reached"
    recovery_s: float | None = None  # time from the fault until PROOF further steps were trained
    reissued: int | None = None
    lost: int | None = None
    twice: int | None = None

    @property
    def good(self) -> bool:
        skipped = self.outcome.startswith("skipped") and os.environ.get("REALSYS_NO_SKIPS") != "1"
        return (skipped or self.outcome.startswith(("survived", "ended: "))) and not self.lost and not self.twice


@dataclass
class CaseResult:
    name: str
    rows: list[RowResult]
    seconds: float = 0.0
    rejudged: int = 0  # trained completions that were judged again
    problems: list[str] = field(default_factory=list)
    report: str = ""  # all logs, if something is wrong

    @property
    def good(self) -> bool:
        return not self.problems and all(row.good for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "report"}


def run_case(case: Case, folder: Path, stop: threading.Event | None = None) -> CaseResult:
    """Run a case from start to checks. Its files stay in ``folder`` only if something was wrong.

    Raises Interrupted soon after ``stop`` is set; nothing is left then.
    """
    result = CaseResult(case.title, [RowResult(case.title, row.fault, row.phase) for row in case.rows])
    if missing := _missing(case.needs):
        for row in result.rows:
            row.outcome = f"skipped: needs {missing}"
        return result
    began = time.monotonic()
    folder.mkdir(parents=True)
    try:
        _Drive(case, folder, result, stop or threading.Event()).run()
    except Interrupted:
        shutil.rmtree(folder)
        raise
    result.seconds = time.monotonic() - began
    if result.good:
        shutil.rmtree(folder)
    return result


def _missing(needs: Needs) -> str:
    """Return the requirement that this machine lacks, or ""."""
    here = {
        "": True,
        "root": os.geteuid() == 0,
        "etcd": shutil.which("etcd") is not None,
        "sglang": (SGLANG.venv / "bin" / "python").exists(),
    }
    return "" if here[needs] else needs


class _Drive:
    """One case under way."""

    def __init__(self, case: Case, folder: Path, result: CaseResult, stop: threading.Event) -> None:
        self._case, self._folder, self._result, self._stop = case, folder, result, stop
        self._faults, self._tmp, self._fileroot = folder / "faults", folder / "tmp", folder / "runs"
        for path in (self._faults, self._tmp):
            path.mkdir()

    def run(self) -> None:
        """Raises Interrupted; no process is left then, and nothing is mounted."""
        case, result = self._case, self._result
        root = self._fileroot / "arith" / case.name
        before = checks.shared_memory() if case.needs == "sglang" else None
        env = self._environment()
        with contextlib.ExitStack() as disk, running(root, self._command(), env) as live:
            agents = Agents(root, case.agents, self._folder, env, spares=case.spares > 0)
            disk.callback(agents.kill)
            run = ChaosRun(live, self._faults, agents, self._stop)
            try:
                if case.needs == "root":
                    run.until(live.job.paths.config.exists, "the trial's folder", FIRE_S)
                    disk.enter_context(outside.small_disk(root / "weights"))
                    (self._faults / "mounted").touch()
                self._inject_all(run)
                run.until_end(END_S)
            except Ended as error:
                result.problems += [] if case.ends else [f"the run ended while waiting for {error}"]
                run.until_end(END_S)
            except Interrupted:
                run.end_now()
                raise
            except Exception as error:  # a boundary: reported by this case, and the other cases still run
                result.problems.append(f"{type(error).__name__}: {error}")
            if live.process.poll() is None:
                live.process.terminate()
                live.process.wait(END_S)
            result.problems += agents.end()
            try:
                self._judge(run, before)
            except Exception as error:  # the same: a run that never began has no files, for example
                result.problems.append(f"cannot be checked: {type(error).__name__}: {error}")
            if not result.good:
                result.report = live.job.report() + agents.report()

    def _command(self) -> list[str]:
        case, total = self._case, 1 + STEPS * len(self._case.rows)
        own = [f"train.total_steps={total}", f"fileroot={self._fileroot}", f"trial={case.name}"]
        if case.needs == "etcd":
            own.append(f"cluster.name_store.address=127.0.0.1:{lasting_ports(1)[0]}")
        return command(*JOB, *own, *case.settings)

    def _environment(self) -> Mapping[str, str]:
        faults = [fault for number, row in enumerate(self._case.rows) for fault in self._armed(number, row)]
        return {**environment(faults, self._faults), "TMPDIR": str(self._tmp)}

    def _armed(self, number: int, row: Row) -> list[Fault]:
        """The hold before the row's first step, its faults, and a hold that keeps steps for the proof.

        A fault of an agent or launcher fires by the clock: without the second hold a fast run has used up the row's
        steps by then, and stands before the next row's hold. Any other fault fires by the steps, and the hold could keep
        it from that: what a step publishes may become complete during the next ones.
        """
        gate = f"go-{number}"
        at = 2 + STEPS * number
        hold = Fault(f"hold-{number}", "master_worker/0", "master.batch", "hold", at=at, until=gate)
        seen = Fault(_seen(number), "master_worker/0", "master.batch", "hold", at=at + 3, until=_seen(number))
        disk = Fault("mount", "model_worker/0", "weights.write", "hold", until="mounted")
        by_clock = (
            row.act is not None or row.said or any(fault.worker.startswith("node_agent/") for fault in row.faults)
        )
        faults = [seen] if by_clock else []
        for part, fault in enumerate(row.faults):
            faults.append(msgspec.structs.replace(fault, name=f"{number}-{part}", gate=gate))
            if row.in_order:
                gate = _marker(number, part)
        if row.waits:
            last = _marker(number, len(row.faults) - 1)
            faults.append(
                Fault(f"wait-{number}", row.waits, "rollout.running", "hold", gate=f"go-{number}", until=last)
            )
        return [*([disk] if self._case.needs == "root" else []), hold, *faults]

    def _inject_all(self, run: ChaosRun) -> None:
        reissued = 0
        for number, (row, result) in enumerate(zip(self._case.rows, self._result.rows, strict=True)):
            first = 2 + STEPS * number
            run.until_step(first - 1, RECOVER_S)
            run.see_addresses()
            run.note_pids()
            result.outcome = "did not fire"
            lengths = run.output_lengths()
            run.open_gate(number)
            fired = self._fire(run, number, row, result)
            for pattern in row.said:
                run.until(lambda p=pattern, n=lengths: run.has_said(p, n), f"a line with {pattern!r}", FIRE_S)
            before = run.steps()
            (self._faults / _seen(number)).touch()
            result.outcome = "did not recover"
            run.until_step(before + PROOF, RECOVER_S)
            result.recovery_s = round(time.time() - fired, 2)
            result.outcome = "survived"
            total = checks.reissued(run.live.job.paths)
            result.reissued, reissued = total - reissued, total

    def _fire(self, run: ChaosRun, number: int, row: Row, result: RowResult) -> float:
        """Unix seconds at which the row's first fault fired, once all have."""
        began = time.time()
        if row.act is not None:
            row.act(run)
        for part in range(len(row.faults)):
            marker = self._faults / _marker(number, part)
            run.until(marker.exists, f"{row.fault} at {row.phase} (row {number}) to fire", FIRE_S)
            began = marker.stat().st_mtime if part == 0 else began
        return began

    def _judge(self, run: ChaosRun, shared_memory: set[str] | None) -> None:
        """Check the invariants of every run."""
        case, result = self._case, self._result
        job = run.live.job
        cause = checks.cause_of(job)
        if case.ends:
            (row,) = result.rows
            ended = checks.named_end(job, case.ends)
            row.outcome = f"ended: {cause}" if ended else f"exit {job.returncode}: {cause or 'no cause given'}"
        elif job.returncode != 0:
            result.problems.append(f"exit {job.returncode}: {cause or 'no cause given'}")
        ledger = checks.ledger(job.paths)
        result.problems += ledger.problems
        for row in result.rows:
            row.lost, row.twice = ledger.lost, ledger.twice
            if row.reissued is None:
                row.reissued = ledger.reissued
        result.rejudged, changed = checks.rejudge(job.paths)
        result.problems += changed[:5]
        if not case.ends and not result.rejudged:
            result.problems.append("no answer is on record: nothing could be judged again")
        for row in case.rows:
            if row.logged and not checks.logged(job.paths, row.logged):
                result.problems.append(f"{row.fault} at {row.phase}: no log has {row.logged!r}: was it harmless?")
        result.problems += checks.leftovers(run, self._tmp, shared_memory)


def _seen(number: int) -> str:
    """Return the name of the gate that opens when a row's faults have fired and what it waits for was said."""
    return f"seen-{number}"


def _marker(number: int, part: int) -> str:
    """Return the name of the marker of a row's part."""
    return f"fired-{number}-{part}"
