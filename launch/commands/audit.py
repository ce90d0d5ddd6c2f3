"""Check from the files of a trial that no ticket was lost or used twice, also while it runs. Likewise calls of clients.

step log, then ledger ──> Auditor ──> counts, checks, exit code. Reads only.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError, LedgerError
from realsys.launch.commands.options import add_json, add_trial, find_trial
from realsys.manager.audit import Auditor, AuditReport, Check
from realsys.manager.ledger.journal import read_journal
from realsys.manager.ledger.tickets import tickets_in
from realsys.observe.screen.terminal import print_trimmed
from realsys.observe.step_log import RECOVERED, surviving_steps
from realsys.serve.journal import audit as audit_clients

_SHOWN = 5  # problems per check; --json has all of them


def add_arguments(parser: ArgumentParser) -> None:
    add_trial(parser)
    add_json(parser, "print the whole report as JSON")


def run(args: Namespace) -> int:
    """Print the audit of a trial; return 1 if a check failed. Raises ConfigError if the folder is not a trial."""
    report = audit_trial(find_trial(args.trial_dir))
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        print_report(Console(), report)
    return 0 if report.ok else 1


def audit_trial(paths: TrialPaths) -> AuditReport:
    """Read step log and ledger. Raises ConfigError if there is no ledger, or no record in it."""
    skipped: dict[str, str] = {}
    logged = logged_tickets(paths.steps)  # before the ledger: the trainer logs a step after the manager knows it
    if logged is None:
        skipped["steps"] = "no step log with tickets"
    auditor, line, end = Auditor(), 0, 0
    try:
        before = paths.ledger.stat()
        size = before.st_size
        try:
            for line, (event, end) in enumerate(read_journal(paths.ledger), 1):  # noqa: B007 (wanted after the loop)
                auditor.observe(event, line)
        except LedgerError as error:
            auditor.problems["journal"].append(str(error))
            skipped["steps"], size = f"nothing is read beyond line {line}", end
        if (
            paths.ledger.stat().st_ino != before.st_ino
        ):  # it was compacted during the read: the size was that of another file
            size = end
    except OSError as error:
        problem = f"{error.strerror}: not the folder of a trial, or its manager has not started yet"
        raise ConfigError("TRIAL_DIR", str(paths.root), f"{paths.ledger.name}: {problem}") from None
    if size and not line:
        problem = f"{paths.ledger.name}: none of its {size} bytes is a record: restore it from a copy"
        raise ConfigError("TRIAL_DIR", str(paths.root), problem)
    if logged is not None and "steps" not in skipped:
        # While the ledger was read, a running trainer may have logged further steps that are in it.
        later = {step: names for step, names in (logged_tickets(paths.steps) or {}).items() if step <= auditor.newest}
        # a compacted ledger has only the last recovery
        found = (record.get("step") for record in surviving_steps(paths.steps) if record["kind"] == RECOVERED)
        auditor.compare_steps({**later, **logged}, {step for step in found if isinstance(step, int)})
    report = auditor.report(torn_bytes=max(0, size - end), skipped=skipped)
    if paths.clients.is_dir():
        report.checks.append(check_clients(paths))
        report.ok &= report.checks[-1].ok
    return report


def check_clients(paths: TrialPaths) -> Check:
    """Check the journals of the models of a service's clients."""
    try:
        problems = audit_clients(paths.clients)
    except LedgerError as error:
        problems = [str(error)]
    return Check("clients", "each call of a client was carried out once, in its order, and none is lost", problems)


def logged_tickets(steps: Path) -> Mapping[int, list[str]] | None:
    """Return the tickets of each step from the step log; None without a log, or with one that names no tickets."""
    if not steps.is_file():
        return None
    records = (record for record in surviving_steps(steps) if record["kind"] == "train")
    logged = {step: record.get("tickets") for record in records if isinstance(step := record.get("step"), int)}
    if logged and not any(isinstance(ranges, str) for ranges in logged.values()):
        return None
    return {step: list(tickets_in(str(ranges or ""))) for step, ranges in logged.items()}


def print_report(console: Console, report: AuditReport) -> None:
    """Print the counts, then the checks with the first problems of each."""
    counts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    counts.add_column(style="bold")
    counts.add_column(justify="right")
    counts.add_column()
    compacted = f"{report.compacted} of them compacted: their grants are not checked again" if report.compacted else ""
    counts.add_row("records", str(report.records), compacted)
    if report.torn_bytes:
        counts.add_row("", "", f"{report.torn_bytes} bytes of a record that was not completed: cut off by a restart")
    if report.inherited:
        counts.add_row("inherited", str(report.inherited), "groups trained before the checkpoint that was resumed")
    counts.add_row("tickets", str(report.granted), f"in {report.attempts} attempts")
    for state, number in report.states.items():
        text = f"in {report.steps} steps" if state == "trained" else ""
        counts.add_row(f"  {state}", str(number), _listed(report.dropped_by_reason) if state == "dropped" else text)
    again = sum(report.reissued_by_cause.values())
    counts.add_row("re-issued", str(again), _listed(report.reissued_by_cause))
    taken = [start for start in report.starts if start.reissued]
    text = "; ".join(f"to version {start.version}: {start.reissued} re-issued" for start in taken)
    counts.add_row("roll-backs", str(len(taken)), text)
    counts.add_row(
        "staleness", "", "  ".join(f"{versions}: {n}" for versions, n in report.histogram.items()) or "nothing trained"
    )
    print_trimmed(console, counts)
    console.print()
    for check in report.checks:
        verdict, style = ("ok", "green") if check.ok else ("FAILED", "bold red")
        if check.ok and check.skipped:
            verdict, style = "-", "dim"
        line = Text.assemble((f"{verdict:<7}", style), f"{check.name:<11}{check.claim}")
        if check.skipped:
            line.append(f" (not checked: {check.skipped})", "dim")
        console.print(line, soft_wrap=True)
        for problem in check.problems[:_SHOWN]:
            console.print(Text(f"         {problem}"), soft_wrap=True)
        if len(check.problems) > _SHOWN:
            console.print(Text(f"         and {len(check.problems) - _SHOWN} more"), soft_wrap=True)
    failed = [check.name for check in report.checks if not check.ok]
    skipped = [check.name for check in report.checks if check.ok and check.skipped]
    end = Text(f"\nFAILED: {', '.join(failed)}", "bold red") if failed else Text("\nevery check holds", "green")
    console.print(end.append(f" (not checked: {', '.join(skipped)})" if skipped else "", "dim"), soft_wrap=True)


def _listed(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(numbers.items(), key=lambda item: -item[1]))
