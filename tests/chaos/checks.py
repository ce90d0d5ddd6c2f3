"""Checks after a run, however it ended: ledger, samples, leftovers, the named cause."""

import contextlib
import fcntl
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from realsys.cluster.files import FileLock
from realsys.config.doors import VERIFIER
from realsys.config.paths import TrialPaths, read_config
from realsys.data.prompts import PromptDataset
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import RealsysError, WaitTimeout
from realsys.launch.commands.audit import audit_trial
from realsys.manager.ledger.events import RolledBack, Trained
from realsys.manager.ledger.journal import read_journal
from realsys.reward.verifiers.contract import Item, verdict_of
from realsys.train.record_files import read_arrays, read_record, recorded_steps
from realsys.weights.host_places import MEMBERS, folder_name
from tests.chaos.live import ChaosRun
from tests.support.jobs.jobs import Job, processes_of
from tests.support.polling import poll

_SETTLE_S = 3.0  # a process that ends within this time is no leftover
_CAUSE = re.compile(r"^realsys: the run failed: (\S+ \(pid \d+\): .+)$", re.MULTILINE)


@dataclass
class LedgerReport:
    problems: list[str] = field(default_factory=list)
    lost: int = 0  # tickets that no state accounts for
    twice: int = 0  # tickets that are in the weights more than once
    reissued: int = 0


def ledger(paths: TrialPaths) -> LedgerReport:
    """Return the result of the audit, with an independent count of tickets trained twice."""
    report = LedgerReport()
    try:
        found = audit_trial(paths)
    except RealsysError as error:
        report.problems.append(f"audit: {error}")
        return report
    failed = {check.name: check.problems for check in found.checks if not check.ok}
    report.problems += [f"audit: {name}: {'; '.join(problems[:3])}" for name, problems in failed.items()]
    report.reissued = sum(found.reissued_by_cause.values())
    report.lost = abs(found.granted - sum(found.states.values())) + len(failed.get("prompts", ()))
    report.twice = _trained_twice(paths.ledger) + len(failed.get("ends", ()))
    return report


def reissued(paths: TrialPaths) -> int:
    """Attempts lost so far, of a run under way."""
    return sum(audit_trial(paths).reissued_by_cause.values())


def _trained_twice(path: Path) -> int:
    """Count tickets that were trained again without a roll back in between."""
    version: dict[str, int] = {}
    twice = 0
    for event, _ in read_journal(path):
        if isinstance(event, RolledBack):
            version = {ticket: at for ticket, at in version.items() if at <= event.version}
        elif isinstance(event, Trained):
            twice += len(version.keys() & set(event.tickets))
            version |= dict.fromkeys(event.tickets, event.version)
    return twice


def rejudge(paths: TrialPaths) -> tuple[int, list[str]]:
    """Judge every trained completion again from its recorded tokens; return their number and the differences."""
    config = read_config(paths.config)
    tokenizer = TextTokenizer(paths.start_model)
    prompts, verifier = PromptDataset(config, paths, tokenizer), VERIFIER.load(config.data.verifier)
    judged, problems = 0, list[str]()
    for step, folder in recorded_steps(paths.records).items():
        record = read_record(folder)
        arrays, origins = read_arrays(folder, record)
        by_ticket = {origin.ticket.ticket_id: origin for origin in origins}
        for group in record.groups:
            origin = by_ticket[group[0].ticket_id]
            prompt = prompts.prompt("train", origin.ticket.prompt_index)
            for meta in group:
                how = origin.episodes[meta.episode][meta.row]
                tokens = arrays[meta.sample_id, "tokens"].tolist()
                text = tokenizer.completion_text(tokens[len(prompt.ids) :])
                item = Item(prompt.text, text, prompt.answer, prompt.extra)
                right = how.finish_reason == "stop" and verdict_of(verifier(item)).correct
                wanted = config.rollout.reward.correct if right else config.rollout.reward.wrong
                judged += 1
                if tokens[: len(prompt.ids)] != list(prompt.ids):
                    problems.append(f"step {step}: sample {meta.sample_id} begins with another prompt than its own")
                if meta.correct is not bool(right):
                    problems.append(f"step {step}: sample {meta.sample_id} is recorded as correct={meta.correct}")
                if meta.reward != wanted:
                    problems.append(f"step {step}: sample {meta.sample_id} has reward {meta.reward}, judged {wanted}")
    return judged, problems


def cause_of(job: Job) -> str:
    """Return the line with the cause of a failed run, without pid and folders."""
    found = _CAUSE.search(job.stderr)
    return re.sub(r" \(pid \d+\)|/\S+/(?=\S)", "", found[1]) if found else ""


def named_end(job: Job, pattern: str) -> bool:
    return job.returncode not in (0, None) and re.search(pattern, cause_of(job)) is not None


def logged(paths: TrialPaths, pattern: str) -> bool:
    """Return True if a log of the run matches ``pattern``."""
    return any(re.search(pattern, path.read_text(errors="replace")) for path in paths.logs.iterdir())


def shared_memory() -> set[str]:
    """Return the paths that SGLang and its server have in /dev/shm, of this run or another."""
    return {str(path) for pattern in ("realsys-*", "sglang_*") for path in Path("/dev/shm").glob(pattern)}


def _used(path: str) -> bool:
    """Return True if a live process has ``path`` mapped or on its command line, or is a member of the folder."""
    members = Path(path) / MEMBERS
    if members.exists():
        lock = FileLock.take(members)
        if lock is None:
            return True
        lock.release()
    for process in Path("/proc").glob("[0-9]*"):
        for kind in ("maps", "cmdline"):
            with contextlib.suppress(OSError):
                if path.encode() in (process / kind).read_bytes():
                    return True
    return False


def leftovers(run: ChaosRun, tmp: Path, before: set[str] | None) -> list[str]:
    """Return processes, ports, locks and temp files that are left.

    ``before``: content of shared memory when a run with SGLang began.
    """
    root = run.root
    with contextlib.suppress(WaitTimeout):
        poll(lambda: not processes_of(root), "the end of all processes", _SETTLE_S)
    alive = processes_of(root)
    left = [f"process left: {line}" for line in alive]
    ours = {int(line.split()[0]) for line in alive}
    left += [f"port left: {address}" for address in sorted(run.addresses) if _listens(address, ours)]
    left += [f"locked: {path}" for path in (root / "ledger.jsonl", root / "lock") if path.exists() and _locked(path)]
    # torch makes a cache per user wherever TMPDIR points, and we a folder of sockets; they are meant to stay.
    others = [path for path in tmp.iterdir() if not path.name.startswith(("torchinductor_", f"realsys-{os.getuid()}"))]
    temporary = [*root.rglob("*.tmp"), *root.glob("errors/.*"), *others]
    left += [f"temp file left: {path}" for path in temporary]
    copies = folder_name(root)
    named = {str(path) for text in (root.name, copies) for path in Path("/dev/shm").glob(f"*{text}*")}
    new = shared_memory() - before if before is not None else set[str]()
    left += [f"shared memory left: {path}" for path in sorted(named | new) if not _used(path)]
    return left


def _listens(address: str, ours: set[int]) -> bool:
    """Return True if one of our processes, or an unknown one, listens at an address of a stream or ``http://host:port``.

    The kernel soon gives a free port to another process.
    """
    if address.startswith("ipc://"):
        return address.removeprefix("ipc://") in Path("/proc/net/unix").read_text("utf-8")
    port = urlsplit(address).port
    found = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port]
    return any(connection.pid is None or connection.pid in ours for connection in found)


def _locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
