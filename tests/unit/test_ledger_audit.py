"""`realsys audit`: clean on what a manager wrote, and each check fails on a journal that was tampered with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from launch.audit import audit_trial
from launch.cli import main
from realsys.admission.audit import CLAIMS
from realsys.admission.events import (
    Dropped,
    Event,
    Finished,
    Granted,
    Opened,
    Reissued,
    Resumed,
    RolledBack,
    Snapshot,
    Trained,
)
from realsys.admission.journal import Journal, encode_record
from realsys.admission.manager import ManagerState
from realsys.admission.messages import AllocateRequest, FinishRequest, RollBackRequest, TrainedRequest
from realsys.admission.order import permutation
from realsys.config.paths import TrialPaths
from realsys.types import PublishedVersion, Ticket
from tests.manager_states import ANSWER, SETTINGS, address, update

A, B = (f"{number:019d}" for number in (1, 2))
Change = Callable[[list[Event]], None]


class Run:
    """A trial as manager and trainer write it, without either of their processes."""

    def __init__(self) -> None:
        self.state, self.steps, self.now = ManagerState(SETTINGS), [], 0.0  # type: ignore[var-annotated]
        self.state.open(self.now)
        self.state.observe_servers([address(0)])

    def start(self, version: int, incarnation: str) -> None:
        self.incarnation = incarnation
        self.state.roll_back(RollBackRequest(version, version, incarnation, "/c"), self.now)
        if version >= 0:
            self.steps.append({"kind": "recovered", "step": version, "incarnation": incarnation})
        self.publish(max(0, version))

    def publish(self, version: int) -> None:
        assert self.state.publish(PublishedVersion(version, self.incarnation, f"/v{version}", version))
        update(self.state, 0)

    def grant(self, count: int) -> list[Ticket]:
        self.now += 1
        granted = self.state.allocate(AllocateRequest("w", count), self.now).tickets
        assert len(granted) == count
        return granted

    def finish(self, ticket: Ticket, outcome: str = "accepted", reason: str = "") -> None:
        request = FinishRequest(ticket.ticket_id, ticket.attempt, "w", outcome, reason, [ANSWER])  # type: ignore[arg-type]
        assert self.state.finish(request, self.now).known

    def train(self, step: int, batch: list[Ticket], oldest: list[int]) -> None:
        ids = [ticket.ticket_id for ticket in batch]
        request = TrainedRequest(step, step, ids, incarnation=self.incarnation, oldest=oldest)
        self.state.trained(request, self.now)
        self.steps.append({"kind": "train", "step": step, "tickets": ids})
        self.publish(step)

    def drop(self, ticket: Ticket, reason: str) -> None:
        request = TrainedRequest(0, 0, dropped=[(ticket.ticket_id, reason)], incarnation=self.incarnation)
        self.state.trained(request, self.now)


def life() -> Run:
    """Two steps, a stale drop, a lost and a failed attempt, a roll-back to version 1 and step 2 once more."""
    run = Run()
    run.start(-1, A)
    first, second, third, fourth = run.grant(4)
    for ticket in (first, second, third):
        run.finish(ticket)
    run.train(1, [first, second], [0, 0])
    run.finish(fourth, "failed", "verifier died: 9")
    [fourth] = run.grant(1)
    run.state.outbox += run.state.ledger.lose(lambda t: t.ticket_id == fourth.ticket_id, "worker lost", run.now)
    fourth, fifth = run.grant(2)
    run.drop(third, "stale")
    run.finish(fourth)
    run.finish(fifth)
    run.train(2, [fourth, fifth], [1, 1])
    run.start(1, B)
    again = run.grant(2)
    for ticket in again:
        run.finish(ticket)
    run.train(2, again, [1, 0])
    [given_back] = run.grant(1)
    run.finish(given_back, "rejected", "too easy")
    return run


def write(folder: Path, events: list[Event], steps: list[dict[str, object]]) -> TrialPaths:
    paths = TrialPaths(folder)
    paths.ledger.write_bytes(b"".join(map(encode_record, events)))
    paths.steps.write_text("".join(json.dumps(step) + "\n" for step in steps))
    return paths


def index(events: list[Event], kind: type, last: bool = False) -> int:
    found = [i for i, event in enumerate(events) if isinstance(event, kind)]
    return found[-1 if last else 0]


def test_a_whole_life_is_clean_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = life()
    paths = write(tmp_path, run.state.outbox, run.steps)
    report = audit_trial(paths)
    assert report.ok and not any(check.skipped for check in report.checks), report.checks
    assert [check.name for check in report.checks] == list(CLAIMS)
    assert report.states == run.state.ledger.counts.by_state()
    assert report.states == {"running": 0, "finished": 0, "waiting": 0, "trained": 4, "dropped": 2}
    assert report.attempts == run.state.ledger.counts.attempts == 10
    assert report.dropped_by_reason == {"stale": 1, "rejected too easy": 1}
    assert report.reissued_by_cause == {"failed": 1, "worker lost": 1, "rolled back": 2}
    assert report.histogram == {"0": 3, "1": 1} and report.steps == 2
    assert [(start.version, start.reissued) for start in report.starts] == [(-1, 0), (1, 2)]
    assert main(["audit", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "FAILED" not in text and "rolled back 2" in text and "to version 1: 2 re-issued" in text
    assert main(["audit", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["states"] == report.states


def twice_trained(events: list[Event]) -> None:
    i = index(events, Trained)
    events.insert(i + 1, msgspec.structs.replace(events[i], version=2, step=2))


def trained_after_drop(events: list[Event]) -> None:
    dropped = events[index(events, Dropped)]
    i = index(events, Trained, last=True)
    events[i] = msgspec.structs.replace(events[i], tickets=[dropped.ticket_id, events[i].tickets[1]])


def finished_twice(events: list[Event]) -> None:
    i = index(events, Finished, last=True)
    events.append(events[i])


def too_old(events: list[Event]) -> None:
    i = index(events, Trained, last=True)
    events[i] = msgspec.structs.replace(events[i], version=4, step=4)


def grant_lost(events: list[Event]) -> None:
    del events[index(events, Granted) + 1]


def grant_twice(events: list[Event]) -> None:
    i = index(events, Granted)
    events.insert(i + 1, events[i])


def another_prompt(events: list[Event]) -> None:
    i = index(events, Granted)
    events[i] = msgspec.structs.replace(events[i], prompt_index=(events[i].prompt_index + 1) % 10)


def prompt_twice(events: list[Event]) -> None:
    """A further ticket for a prompt position that had one."""
    first = events[index(events, Granted)]
    assert isinstance(first, Granted)
    events.append(msgspec.structs.replace(first, ticket_id="0000000006", version=2))


def given_back_twice(events: list[Event]) -> None:
    last = events[index(events, Granted, last=True)]
    events.append(msgspec.structs.replace(last, ticket_id="0000000006"))


def beyond_the_bound(events: list[Event]) -> None:
    i = index(events, Granted) + 2
    events[i] = msgspec.structs.replace(events[i], version=-1)


def smaller_eta(events: list[Event]) -> None:
    events[0] = msgspec.structs.replace(events[0], eta=0)


def dead_training(events: list[Event]) -> None:
    i = index(events, Trained, last=True)
    events[i] = msgspec.structs.replace(events[i], incarnation=A)


def version_missed(events: list[Event]) -> None:
    del events[index(events, Trained)]


def roll_back_by_an_older_one(events: list[Event]) -> None:
    i = index(events, RolledBack, last=True)
    events[i] = msgspec.structs.replace(events[i], incarnation="0")


def from_the_future(events: list[Event]) -> None:
    i = index(events, Trained)
    events[i] = msgspec.structs.replace(events[i], oldest=[1, 0])


def loss_of_a_waiting_one(events: list[Event]) -> None:
    i = index(events, Reissued)
    events.insert(i + 1, events[i])


def other_batch(events: list[Event]) -> None:
    i = index(events, Trained)
    events[i] = msgspec.structs.replace(events[i], tickets=["0000000000", "0000000002"])


@pytest.mark.parametrize(
    ("change", "check", "names"),
    [
        (twice_trained, "trained", "line 11: ticket 0000000000 trained at version 1 and again at 2"),
        (trained_after_drop, "ends", "ticket 0000000002 trained at version 2 after it was dropped"),
        (finished_twice, "ends", "ticket 0000000005 finished (rejected) after it was dropped"),
        (too_old, "staleness", "ticket 0000000003 trained at version 4: 2 versions behind, eta is 1"),
        (smaller_eta, "staleness", "ticket 0000000004 trained at version 2: 1 versions behind, eta is 0"),
        (smaller_eta, "admission", "ticket 0000000002 granted as number 3, beyond 2 at version 0"),
        (beyond_the_bound, "admission", "line 5: ticket 0000000002 granted as number 3, beyond 2 at version -1"),
        (grant_lost, "prompts", "line 4: ticket 0000000002 granted where 0000000001 was the next: one is lost"),
        (another_prompt, "prompts", "line 3: ticket 0000000000: prompt"),
        (prompt_twice, "prompts", "ticket 0000000006: prompt position 0 was granted before"),
        (given_back_twice, "prompts", "ticket 0000000006: prompt"),
        (grant_twice, "attempts", "line 4: ticket 0000000000: attempt 0 granted while attempt 0 was running"),
        (loss_of_a_waiting_one, "attempts", "ticket 0000000003 re-issued (worker lost) while it waited"),
        (grant_lost, "attempts", "ticket 0000000001 finished (accepted), but never granted"),
        (version_missed, "versions", "version 2 trained after version 0"),
        (dead_training, "versions", f"version 2 trained by training side {A}, while {B} had started"),
        (roll_back_by_an_older_one, "versions", f"training side 0 started after {A}"),
        (from_the_future, "versions", "ticket 0000000000 of version 1 trained at version 1"),
        (other_batch, "steps", "step 1: not in the step log: ticket 0000000002"),
        (other_batch, "steps", "step 1: only in the step log: ticket 0000000001"),
        (version_missed, "steps", "step 1: only in the step log: ticket 0000000000, 0000000001"),
        (twice_trained, "replay", "line 11: ledger: ticket 0000000000 trained at version 2: unknown or trained before"),
    ],
)
def test_each_check_fails_on_a_journal_that_was_tampered_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Change, check: str, names: str
) -> None:
    run = life()
    events = list(run.state.outbox)
    change(events)
    report = audit_trial(write(tmp_path, events, run.steps))
    problems = {found.name: found.problems for found in report.checks}
    assert any(names in problem for problem in problems[check]), problems
    assert main(["audit", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "FAILED" in text and any(problem in text for problem in problems[check])


def test_a_record_that_is_damaged_fails_and_a_torn_one_is_told(tmp_path: Path) -> None:
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


def test_a_step_log_that_names_others_or_one_twice_fails(tmp_path: Path) -> None:
    run = life()
    steps = json.loads(json.dumps(run.steps))
    steps[0]["tickets"] = ["0000000000", "0000000000"]
    paths = write(tmp_path, run.state.outbox, steps)
    problems = audit_trial(paths).checks[list(CLAIMS).index("steps")].problems
    assert problems == [
        "step 1: the step log names 1 tickets twice",
        "step 1: not in the step log: ticket 0000000001",
    ]


def test_the_step_that_the_trainer_died_in_may_be_missing_from_its_log(tmp_path: Path) -> None:
    """It tells the manager first. The newest step, or one whose checkpoint was complete; any other was hidden."""
    run = life()
    without = [[s for s in run.steps if (s["kind"], s["step"]) != ("train", step)] for step in (1, 2)]
    for steps in without:
        assert audit_trial(write(tmp_path, run.state.outbox, steps)).ok
    back = index(run.state.outbox, RolledBack, last=True)
    until = run.state.outbox[:back]
    assert not audit_trial(write(tmp_path, until, [s for s in without[0] if s["kind"] == "train"][:1])).ok


def test_the_audit_of_a_compacted_journal_knows_what_was_before(tmp_path: Path) -> None:
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


def test_a_folder_that_is_no_trial_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "TRIAL_DIR" in error and "not the folder of a trial" in error
    assert not list(tmp_path.iterdir()), "it reads only"


def test_it_reads_beside_a_manager_that_has_the_ledger_open(tmp_path: Path) -> None:
    run = life()
    paths = TrialPaths(tmp_path)
    with Journal(paths.ledger) as journal:
        journal.append(run.state.outbox)
        report = audit_trial(paths)
    assert report.ok and report.granted == 6
    assert report.checks[list(CLAIMS).index("steps")].skipped == "no step log with tickets"
