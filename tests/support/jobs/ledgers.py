"""Invariants of a finished run: its ledger, from the journal event by event, and its statistics."""

import json
import math
from collections import Counter
from typing import Any

from realsys.launch.commands.audit import audit_trial
from realsys.manager.ledger.events import EvalEvent, Granted, Trained
from realsys.manager.ledger.journal import read_journal
from realsys.manager.ledger.ledger import Ledger
from realsys.manager.ledger.prompt_order import PromptOrder
from tests.support.jobs.jobs import Job, processes_of


def check_ledger(job: Job, *, batch_groups: int, eta: int, prompts: int, max_attempts: int = 3) -> Ledger:
    """Replays the journal and returns the ledger after its last event.

    Checks admission at every grant, that each step trained one batch, that no ticket was trained twice, that every
    ticket is in exactly one state and that N is what these states make it.
    """
    ledger = Ledger(PromptOrder(seed=0, size=prompts), max_attempts)
    trained: Counter[str] = Counter()
    versions: list[int] = []
    newest = 0
    for event, _ in read_journal(job.paths.ledger):
        if isinstance(event, EvalEvent):
            continue
        ledger.apply(event)  # raises LedgerError for what cannot follow
        if isinstance(event, Granted):
            # The version of a grant is the published one: the manager may learn of it before the step is reported.
            assert event.version >= newest, f"{event}: versions go back"
            newest = event.version
            assert (ledger.counted - 1) // batch_groups <= event.version + eta, f"{event} with N={ledger.counted}"
        if isinstance(event, Trained):
            trained.update(event.tickets)
            versions.append(event.version)
            assert len(event.tickets) == batch_groups, event
    steps = job.records("train")
    assert versions == [step["version"] for step in steps] == list(range(1, len(steps) + 1))
    assert set(trained.values()) == {1}, f"trained more than once: {[t for t, n in trained.items() if n > 1]}"
    assert len(trained) == len(steps) * batch_groups == ledger.counts.trained
    states = ledger.counts.by_state()
    assert sum(states.values()) == ledger.counts.granted
    assert ledger.counted == states["running"] + states["finished"] + states["claimed"] + states["trained"]
    ended = {t: ledger.ended(t) for t in trained}
    assert all(end and end.startswith("trained@") for end in ended.values()), ended
    report = audit_trial(job.paths)  # the command that a user has must find the same
    assert report.ok, [check for check in report.checks if not check.ok]
    assert {state: report.states[state] for state in states} == states
    assert report.torn_bytes == 0
    return ledger


def check_recovered(job: Job, *, steps: int, at_least: int) -> None:
    """Check a finished run whose trainer continued once, from step ``at_least`` or later: a clean audit, all steps."""
    report = audit_trial(job.paths)
    assert report.ok, [check for check in report.checks if not check.ok]
    [recovered] = job.records("recovered")
    assert recovered["step"] >= at_least, recovered
    assert [record["step"] for record in job.records("train")] == list(range(1, steps + 1))


def check_staleness(job: Job, eta: int) -> None:
    """Every sequence of every step was within the bound when it was trained."""
    for step in job.records("train"):
        staleness = step["staleness"]
        assert 0 <= staleness["min"] <= staleness["max"] <= eta, step
        assert sum(staleness["histogram"].values()) == step["sequences"], step
        assert max(int(lag) for lag in staleness["histogram"]) == staleness["max"], step


def check_finite(job: Job, *names: str) -> None:
    """Check that these statistics are in every train step, and finite."""
    for step in job.records("train"):
        for name in names:
            assert math.isfinite(step["stats"][name]), (name, step["stats"])


def check_complete(job: Job, steps: int) -> dict[str, Any]:
    """Every step once, batches of 4 groups, the ledger in order, no process left. Returns the summary."""
    job.completed()
    assert [record["step"] for record in job.records("train")] == list(range(1, steps + 1))
    check_staleness(job, eta=4)
    audit = audit_trial(job.paths)
    assert audit.ok, audit
    assert audit.states["trained"] == 4 * steps and audit.steps == steps
    summary: dict[str, Any] = json.loads(job.paths.summary.read_text())
    assert (summary["status"], summary["steps"], summary["killed_at_stop"]) == ("done", steps, [])
    assert processes_of(job.root) == []
    return summary
