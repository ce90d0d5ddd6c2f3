"""Offline audit of a trial's ledger: ``python -m realsys.admission.audit TRIAL_DIR``.

Replays the journal (reading only, also beside a running manager), checks that every ticket is where exactly one history
can have brought it, and prints the counts as JSON. Exit code 1 if the journal is damaged or contradicts itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from realsys.admission.events import EvalAnswered, EvalStarted
from realsys.admission.journal import read_journal
from realsys.admission.ledger import Ledger
from realsys.admission.order import PromptOrder
from realsys.config.paths import TrialPaths
from realsys.errors import LedgerError


def audit(path: Path) -> dict[str, Any]:
    """Counts of a ledger file. Raises LedgerError on damage or contradiction, OSError if it cannot be read."""
    ledger = Ledger(PromptOrder(seed=0, size=1), max_attempts=1)  # decides nothing here: events carry their outcome
    records, end = 0, 0
    for event, end in read_journal(path):  # noqa: B007 (the last offset is wanted)
        records += 1
        if not isinstance(event, EvalStarted | EvalAnswered):
            ledger.apply(event)
    states = ledger.counts.by_state()
    if sum(states.values()) != ledger.counts.granted:
        raise LedgerError(f"ledger {path}: {ledger.counts.granted} tickets granted, but the states add up to {states}")
    return {
        "records": records,
        "torn_bytes": path.stat().st_size - end,
        "inherited": ledger.counts.inherited,
        "granted": ledger.counts.granted,
        "attempts": ledger.counts.attempts,
        **states,
        "dropped_by_reason": {reason: n for reason, n in ledger.counts.dropped_by_reason.items() if n},
        "reissued_by_cause": dict(ledger.counts.reissued_by_cause),
        "anomalies": dict(ledger.counts.anomalies),
        "open": {ticket.ticket_id: ticket.state for ticket in ledger.open.values()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m realsys.admission.audit", description="Check a trial's ledger.")
    parser.add_argument("trial_dir", type=Path, help="the trial's folder")
    path = TrialPaths(parser.parse_args(arguments).trial_dir).ledger
    try:
        print(json.dumps(audit(path), indent=2))
    except LedgerError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"ledger {path}: cannot be read: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
