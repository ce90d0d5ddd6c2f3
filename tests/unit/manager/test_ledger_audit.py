"""`realsys audit`: clean for a file that a manager wrote; its errors for damaged and missing files."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from realsys.config.paths import TrialPaths
from realsys.launch.cli import main
from realsys.launch.commands.audit import audit_trial
from realsys.manager.audit import CLAIMS
from realsys.manager.decisions import ManagerState
from realsys.manager.ledger.events import (
    Granted,
    Opened,
    Resumed,
    RolledBack,
    Snapshot,
    Trained,
)
from realsys.manager.ledger.journal import Journal
from realsys.manager.ledger.prompt_order import permutation
from tests.support.ledger.ledger_lives import B, index, life, write
from tests.support.ledger.manager_states import SETTINGS


def test_a_whole_life_is_clean_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = life()
    paths = write(tmp_path, run.state.outbox, run.steps)
    report = audit_trial(paths)
    assert report.ok and not any(check.skipped for check in report.checks), report.checks
    assert [check.name for check in report.checks] == list(CLAIMS)
    assert report.states == run.state.ledger.counts.by_state()
    assert report.states == {"running": 0, "finished": 0, "waiting": 0, "claimed": 0, "trained": 4, "dropped": 2}
    assert report.attempts == run.state.ledger.counts.attempts == 10
    assert report.dropped_by_reason == {"success_rate": 1, "rejected too easy": 1}
    assert report.reissued_by_cause == {"failed": 1, "worker lost": 1, "rolled back": 2}
    assert report.histogram == {"0": 3, "1": 1} and report.steps == 2
    assert [(start.version, start.reissued) for start in report.starts] == [(-1, 0), (1, 2)]
    assert main(["audit", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "FAILED" not in text and "rolled back 2" in text and "to version 1: 2 re-issued" in text
    assert main(["audit", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["states"] == report.states


def test_damaged_record_fails_and_torn_one_is_reported(tmp_path: Path) -> None:
    run = life()
    paths = write(tmp_path, run.state.outbox, run.steps)
    content = paths.ledger.read_bytes()
    paths.ledger.write_bytes(content + b'0badc0de {"type":"gr')
    report = audit_trial(paths)
    assert report.ok and report.torn_bytes == 20
    lines = content.splitlines(keepends=True)
    lines[4] = lines[4].replace(b"granted", b"grunted")
    paths.ledger.write_bytes(b"".join(lines))
    report = audit_trial(paths)
    assert not report.ok and "line 5 is damaged" in report.checks[0].problems[0]


def test_step_log_with_other_tickets_fails(tmp_path: Path) -> None:
    run = life()
    steps = json.loads(json.dumps(run.steps))
    steps[0]["tickets"] = "0,0"
    paths = write(tmp_path, run.state.outbox, steps)
    problems = audit_trial(paths).checks[list(CLAIMS).index("steps")].problems
    assert problems == [
        "step 1: the step log names 1 tickets twice",
        "step 1: not in the step log: ticket 0000000001",
    ]


def test_last_step_may_be_missing_from_log(tmp_path: Path) -> None:
    """The trainer reports to the manager first: only the newest step, or one with a checkpoint, may be missing."""
    run = life()
    without = [[s for s in run.steps if (s["kind"], s["step"]) != ("train", step)] for step in (1, 2)]
    for steps in without:
        assert audit_trial(write(tmp_path, run.state.outbox, steps)).ok
    back = index(run.state.outbox, RolledBack, last=True)
    until = run.state.outbox[:back]
    assert not audit_trial(write(tmp_path, until, [s for s in without[0] if s["kind"] == "train"][:1])).ok


def test_audit_of_compacted_journal_counts_everything(tmp_path: Path) -> None:
    run = life()
    whole = audit_trial(write(tmp_path, run.state.outbox, run.steps))
    replayed = ManagerState(SETTINGS)
    replayed.restore_from(run.state.outbox)
    snapshot: Snapshot = replayed.snapshot(9.0)
    paths = write(tmp_path, [snapshot], run.steps)
    report = audit_trial(paths)
    assert report.ok and report.compacted == len(run.state.outbox)
    for name in ("records", "states", "attempts", "dropped_by_reason", "reissued_by_cause", "histogram", "steps"):
        assert getattr(report, name) == getattr(whole, name), name
    events = [snapshot, Trained(3, 3, ["0000000000"], 0.0, [2], B)]
    report = audit_trial(write(tmp_path, events, run.steps))
    assert report.checks[list(CLAIMS).index("trained")].problems == [
        "line 2: ticket 0000000000 trained at version 1 and again at 3"
    ]


def test_what_a_resumed_trial_inherited_counts_for_admission(tmp_path: Path) -> None:
    opened = Opened(10, 1, 2, 1, "drop", 4, 0.0)
    prompt = int(permutation(1, 4, 10)[4])
    pending = Granted("0000000000", 0, 5, -1, "w", "1", 20, 2.0)
    new = Granted("0000000001", 0, prompt, 44, "w", "1", 20, 2.0)
    report = audit_trial(write(tmp_path, [Resumed("/c", 20, 40, 44, [5], 1.0), opened, pending, new], []))
    assert report.ok and (report.inherited, report.granted) == (40, 2), report.checks
    early = msgspec.structs.replace(new, version=18)
    report = audit_trial(write(tmp_path, [Resumed("/c", 20, 40, 44, [5], 1.0), opened, pending, early], []))
    assert "granted as number 42, beyond 40 at version 18" in report.checks[7].problems[0]


def test_folder_without_trial_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "TRIAL_DIR" in error and "not the folder of a trial" in error
    assert not list(tmp_path.iterdir()), "it reads only"


def test_audit_runs_while_manager_has_ledger_open(tmp_path: Path) -> None:
    run = life()
    paths = TrialPaths(tmp_path)
    with Journal(paths.ledger) as journal:
        journal.append(run.state.outbox)
        report = audit_trial(paths)
    assert report.ok and report.granted == 6
    assert report.checks[list(CLAIMS).index("steps")].skipped == "no step log with tickets"
