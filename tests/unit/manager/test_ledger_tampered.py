"""`realsys audit`: each check fails on a journal that was tampered with, and names the problem."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from realsys.config.paths import TrialPaths
from realsys.errors import LedgerError
from realsys.launch.cli import main
from realsys.launch.commands.audit import audit_trial
from realsys.manager.ledger.events import (
    Claimed,
    Dropped,
    Event,
    Finished,
    Granted,
    Opened,
    Reissued,
    RolledBack,
    Trained,
)
from realsys.manager.ledger.journal import Journal, encode_records
from tests.support.ledger.ledger_lives import A, B, index, life, write

Change = Callable[[list[Event]], None]


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


def reissued_too_often(events: list[Event]) -> None:
    events[0] = msgspec.structs.replace(events[0], max_reissues=0)
    i = index(events, Reissued)
    events[i] = msgspec.structs.replace(events[i], cause="stale")


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


def not_claimed(events: list[Event]) -> None:
    del events[index(events, Claimed)]


def claimed_twice(events: list[Event]) -> None:
    i = index(events, Claimed)
    events.insert(i, events[i])


def claimed_for_another_version(events: list[Event]) -> None:
    i = index(events, Claimed, last=True)
    events[i] = msgspec.structs.replace(events[i], version=4)


def lost_while_it_is_trained(events: list[Event]) -> None:
    i = index(events, Trained)
    events.insert(i, Reissued("0000000000", 0, "lease lapsed", 1.0))


def another_prompt_the_second_time(events: list[Event]) -> None:
    i = index(events, Granted, last=True) - 6  # the grant of ticket 3 after the roll-back
    event = events[i]
    assert isinstance(event, Granted) and event.attempt == 3
    events[i] = msgspec.structs.replace(event, prompt_index=event.prompt_index + 1)


def smaller_batch(events: list[Event]) -> None:
    i = index(events, Trained)
    events[i] = msgspec.structs.replace(events[i], tickets=["0000000000"], oldest=[0])


def younger_than_it_is(events: list[Event]) -> None:
    i = index(events, Finished)
    events[i] = msgspec.structs.replace(events[i], version_min=1)


def granted_at_an_older_version(events: list[Event]) -> None:
    i = index(events, Granted) + 2
    events[i] = msgspec.structs.replace(events[i], version=1)


def granted_at_a_version_of_the_future(events: list[Event]) -> None:
    i = index(events, Granted, last=True)
    events[i] = msgspec.structs.replace(events[i], version=4)


def nothing_opened(events: list[Event]) -> None:
    del events[index(events, Opened)]


@pytest.mark.parametrize(
    ("change", "check", "names"),
    [
        (twice_trained, "trained", "line 12: ticket 0000000000 trained at version 1 and again at 2"),
        (trained_after_drop, "ends", "ticket 0000000002 trained at version 2 after it was dropped"),
        (finished_twice, "ends", "ticket 0000000005 finished (rejected) after it was dropped"),
        (too_old, "staleness", "ticket 0000000003 trained at version 4: 2 versions behind, max_staleness is 1"),
        (
            reissued_too_often,
            "staleness",
            "ticket 0000000003 reissued 1 times as too old, and the bound",
        ),
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
def test_each_check_fails_on_tampered_journal(
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


LINES = encode_records(life().state.outbox)[0].splitlines(keepends=True)


def names_the_line(paths: TrialPaths, lines: list[bytes], first: int) -> bool:
    """The audit fails at line ``first``, counted from 0, and at nothing that lies before it."""
    paths.ledger.write_bytes(b"".join(lines))
    (check, *_) = audit_trial(paths).checks
    return len(check.problems) == 1 and f"line {first + 1} was changed, or records before it are" in check.problems[0]


@pytest.mark.parametrize("at", range(len(LINES)))
def test_missing_or_moved_line_is_detected(tmp_path: Path, at: int) -> None:
    """Also where the rest makes sense: a finish that nobody misses, two grants in another order."""
    paths, rest = TrialPaths(tmp_path), LINES[:at] + LINES[at + 1 :]
    if at < len(LINES) - 1:
        assert names_the_line(paths, rest, at), "missing"
        swapped = [*LINES[:at], LINES[at + 1], LINES[at], *LINES[at + 2 :]]
        assert names_the_line(paths, swapped, at), "exchanged with the next"
    assert names_the_line(paths, [*LINES[: at + 1], *LINES[at:]], at + 1), "twice"
    with pytest.raises(LedgerError, match=f"line {at + 2} was changed"):
        Journal(paths.ledger)
