"""`realsys audit`: clean for a file that a manager wrote; its errors for damaged and missing files."""

import json

import msgspec
import pytest

from realsys.cluster.journal import encode_records
from realsys.config.paths import TrialPaths
from realsys.errors import LedgerError
from realsys.launch.cli import main
from realsys.launch.commands.audit import audit_trial
from realsys.manager.audit import CLAIMS
from realsys.manager.decisions import ManagerState
from realsys.manager.ledger.events import (
    Claimed,
    Dropped,
    Finished,
    Granted,
    Opened,
    Reissued,
    Resumed,
    RolledBack,
    Snapshot,
    Trained,
)
from realsys.manager.ledger.journal import Journal
from realsys.manager.ledger.prompt_order import permutation
from tests.support.ledger.ledger_lives import A, B, index, life, write
from tests.support.ledger.manager_states import SETTINGS


def test_a_whole_life_is_clean_and_counted(tmp_path, capsys):
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


def test_damaged_record_fails_and_torn_one_is_reported(tmp_path):
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


def test_step_log_with_other_tickets_fails(tmp_path):
    run = life()
    steps = json.loads(json.dumps(run.steps))
    steps[0]["tickets"] = "0,0"
    paths = write(tmp_path, run.state.outbox, steps)
    problems = audit_trial(paths).checks[list(CLAIMS).index("steps")].problems
    assert problems == ["step 1: the step log names 1 tickets twice", "step 1: not in the step log: ticket 0000000001"]


def test_last_step_may_be_missing_from_log(tmp_path):
    """The trainer reports to the manager first: only the newest step, or one with a checkpoint, may be missing."""
    run = life()
    without = [[s for s in run.steps if (s["kind"], s["step"]) != ("train", step)] for step in (1, 2)]
    for steps in without:
        assert audit_trial(write(tmp_path, run.state.outbox, steps)).ok
    back = index(run.state.outbox, RolledBack, last=True)
    until = run.state.outbox[:back]
    assert not audit_trial(write(tmp_path, until, [s for s in without[0] if s["kind"] == "train"][:1])).ok


def test_audit_of_compacted_journal_counts_everything(tmp_path):
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


def test_what_a_resumed_trial_inherited_counts_for_admission(tmp_path):
    opened = Opened(10, 1, 2, 1, "drop", 4, 0.0)
    prompt = int(permutation(1, 4, 10)[4])
    pending = Granted("0000000000", 0, 5, -1, "w", "1", 20, 2.0)
    new = Granted("0000000001", 0, prompt, 44, "w", "1", 20, 2.0)
    report = audit_trial(write(tmp_path, [Resumed("/c", 20, 40, 44, [5], 1.0), opened, pending, new], []))
    assert report.ok and (report.inherited, report.granted) == (40, 2), report.checks
    early = msgspec.structs.replace(new, version=18)
    report = audit_trial(write(tmp_path, [Resumed("/c", 20, 40, 44, [5], 1.0), opened, pending, early], []))
    assert "granted as number 42, beyond 40 at version 18" in report.checks[7].problems[0]


def test_folder_without_trial_is_bad_input(tmp_path, capsys):
    assert main(["audit", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "TRIAL_DIR" in error and "not the folder of a trial" in error
    assert not list(tmp_path.iterdir()), "it reads only"


def test_audit_runs_while_manager_has_ledger_open(tmp_path):
    run = life()
    paths = TrialPaths(tmp_path)
    with Journal(paths.ledger) as journal:
        journal.append(run.state.outbox)
        report = audit_trial(paths)
    assert report.ok and report.granted == 6
    assert report.checks[list(CLAIMS).index("steps")].skipped == "no step log with tickets"


# ---- `realsys audit`: each check fails on a journal that was tampered with, and names the problem


def twice_trained(events):
    i = index(events, Trained)
    events.insert(i + 1, msgspec.structs.replace(events[i], version=2, step=2))


def trained_after_drop(events):
    dropped = events[index(events, Dropped)]
    i = index(events, Trained, last=True)
    events[i] = msgspec.structs.replace(events[i], tickets=[dropped.ticket_id, events[i].tickets[1]])


def finished_twice(events):
    i = index(events, Finished, last=True)
    events.append(events[i])


def too_old(events):
    i = index(events, Trained, last=True)
    events[i] = msgspec.structs.replace(events[i], version=4, step=4)


def reissued_too_often(events):
    events[0] = msgspec.structs.replace(events[0], max_reissues=0)
    i = index(events, Reissued)
    events[i] = msgspec.structs.replace(events[i], cause="stale")


def grant_lost(events):
    del events[index(events, Granted) + 1]


def grant_twice(events):
    i = index(events, Granted)
    events.insert(i + 1, events[i])


def another_prompt(events):
    i = index(events, Granted)
    events[i] = msgspec.structs.replace(events[i], prompt_index=(events[i].prompt_index + 1) % 10)


def prompt_twice(events):
    """A further ticket for a prompt position that had one."""
    first = events[index(events, Granted)]
    assert isinstance(first, Granted)
    events.append(msgspec.structs.replace(first, ticket_id="0000000006", version=2))


def given_back_twice(events):
    last = events[index(events, Granted, last=True)]
    events.append(msgspec.structs.replace(last, ticket_id="0000000006"))


def beyond_the_bound(events):
    i = index(events, Granted) + 2
    events[i] = msgspec.structs.replace(events[i], version=-1)


def smaller_eta(events):
    events[0] = msgspec.structs.replace(events[0], eta=0)


def dead_training(events):
    i = index(events, Trained, last=True)
    events[i] = msgspec.structs.replace(events[i], incarnation=A)


def version_missed(events):
    del events[index(events, Trained)]


def roll_back_by_an_older_one(events):
    i = index(events, RolledBack, last=True)
    events[i] = msgspec.structs.replace(events[i], incarnation="0")


def from_the_future(events):
    i = index(events, Trained)
    events[i] = msgspec.structs.replace(events[i], oldest=[1, 0])


def loss_of_a_waiting_one(events):
    i = index(events, Reissued)
    events.insert(i + 1, events[i])


def other_batch(events):
    i = index(events, Trained)
    events[i] = msgspec.structs.replace(events[i], tickets=["0000000000", "0000000002"])


def not_claimed(events):
    del events[index(events, Claimed)]


def claimed_twice(events):
    i = index(events, Claimed)
    events.insert(i, events[i])


def claimed_for_another_version(events):
    i = index(events, Claimed, last=True)
    events[i] = msgspec.structs.replace(events[i], version=4)


def lost_while_it_is_trained(events):
    i = index(events, Trained)
    events.insert(i, Reissued("0000000000", 0, "lease lapsed", 1.0))


def another_prompt_the_second_time(events):
    i = index(events, Granted, last=True) - 6  # the grant of ticket 3 after the roll-back
    event = events[i]
    assert isinstance(event, Granted) and event.attempt == 3
    events[i] = msgspec.structs.replace(event, prompt_index=event.prompt_index + 1)


def smaller_batch(events):
    i = index(events, Trained)
    events[i] = msgspec.structs.replace(events[i], tickets=["0000000000"], oldest=[0])


def younger_than_it_is(events):
    i = index(events, Finished)
    events[i] = msgspec.structs.replace(events[i], version_min=1)


def granted_at_an_older_version(events):
    i = index(events, Granted) + 2
    events[i] = msgspec.structs.replace(events[i], version=1)


def granted_at_a_version_of_the_future(events):
    i = index(events, Granted, last=True)
    events[i] = msgspec.structs.replace(events[i], version=4)


def nothing_opened(events):
    del events[index(events, Opened)]


@pytest.mark.parametrize(
    ("change", "check", "names"),
    [
        (twice_trained, "trained", "line 12: ticket 0000000000 trained at version 1 and again at 2"),
        (trained_after_drop, "ends", "ticket 0000000002 trained at version 2 after it was dropped"),
        (finished_twice, "ends", "ticket 0000000005 finished (rejected) after it was dropped"),
        (too_old, "staleness", "ticket 0000000003 trained at version 4: 2 versions behind, max_staleness is 1"),
        (reissued_too_often, "staleness", "ticket 0000000003 reissued 1 times as too old, and the bound"),
        (smaller_eta, "staleness", "ticket 0000000004 trained at version 2: 1 versions behind, max_staleness is 0"),
        (smaller_eta, "admission", "ticket 0000000002 granted as number 3, beyond 2 at version 0"),
        (beyond_the_bound, "admission", "line 5: ticket 0000000002 granted as number 3, beyond 2 at version -1"),
        (grant_lost, "prompts", "line 4: ticket 0000000002 granted where 0000000001 was the next: one is lost"),
        (another_prompt, "prompts", "line 3: ticket 0000000000: prompt"),
        (prompt_twice, "prompts", "ticket 0000000006: prompt position 0 was granted before"),
        (given_back_twice, "prompts", "ticket 0000000006: prompt"),
        (grant_twice, "attempts", "line 4: ticket 0000000000: attempt 0 granted while attempt 0 was running"),
        (loss_of_a_waiting_one, "attempts", "ticket 0000000003 reissued (worker lost) while it was waiting"),
        (grant_lost, "attempts", "ticket 0000000001 finished (accepted), but never granted"),
        (version_missed, "versions", "version 2 trained after version 0"),
        (dead_training, "versions", f"trained version 2 by trainer {A}, while {B} had started"),
        (roll_back_by_an_older_one, "versions", f"trainer 0 started after {A}"),
        (from_the_future, "versions", "ticket 0000000000 of version 1 trained at version 1"),
        (other_batch, "steps", "step 1: not in the step log: ticket 0000000002"),
        (other_batch, "steps", "step 1: only in the step log: ticket 0000000001"),
        (not_claimed, "attempts", "ticket 0000000000 trained at version 1, though it was finished, not claimed"),
        (claimed_twice, "attempts", "ticket 0000000000 claimed twice for version 1"),
        (claimed_for_another_version, "versions", "tickets claimed for version 4 after version 1"),
        (lost_while_it_is_trained, "attempts", "ticket 0000000000 reissued (lease lapsed) while it was claimed"),
        (another_prompt_the_second_time, "prompts", "ticket 0000000003 granted again with prompt"),
        (smaller_batch, "versions", "version 1 trained on 1 groups, a batch has 2"),
        (younger_than_it_is, "staleness", "its oldest token is of version 0, its worker said 1"),
        (granted_at_an_older_version, "versions", "ticket 0000000003 granted at 0 after 1"),
        (granted_at_a_version_of_the_future, "versions", "granted at version 4, and 2 is the newest that was trained"),
        (nothing_opened, "admission", "ticket 0000000000 granted before any record says what the bound is"),
        (version_missed, "steps", "step 1: only in the step log: ticket 0000000000, 0000000001"),
        (twice_trained, "replay", "ticket 0000000000 is not open: it is trained@1"),
    ],
)
def test_each_check_fails_on_tampered_journal(tmp_path, capsys, change, check, names):
    run = life()
    events = list(run.state.outbox)
    change(events)
    report = audit_trial(write(tmp_path, events, run.steps))
    problems = {found.name: found.problems for found in report.checks}
    assert any(names in problem for problem in problems[check]), problems
    assert main(["audit", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "FAILED" in text and any(problem in text for problem in problems[check])


LINES = encode_records(life().state.outbox)[0].splitlines(keepends=True)


def names_the_line(paths, lines, first):
    """The audit fails at line ``first``, counted from 0, and at nothing that lies before it."""
    paths.ledger.write_bytes(b"".join(lines))
    (check, *_) = audit_trial(paths).checks
    return len(check.problems) == 1 and f"line {first + 1} was changed, or records before it are" in check.problems[0]


@pytest.mark.parametrize("at", range(len(LINES)))
def test_missing_or_moved_line_is_detected(tmp_path, at):
    """Also where the rest makes sense: a finish that nobody misses, two grants in another order."""
    paths, rest = TrialPaths(tmp_path), LINES[:at] + LINES[at + 1 :]
    if at < len(LINES) - 1:
        assert names_the_line(paths, rest, at), "missing"
        swapped = [*LINES[:at], LINES[at + 1], LINES[at], *LINES[at + 2 :]]
        assert names_the_line(paths, swapped, at), "exchanged with the next"
    assert names_the_line(paths, [*LINES[: at + 1], *LINES[at:]], at + 1), "twice"
    with pytest.raises(LedgerError, match=f"line {at + 2} was changed"):
        Journal(paths.ledger)
