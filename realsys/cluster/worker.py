"""The life of a worker process, the same for every kind.

    parse ─> log, signals, parent ─> config ─> name store ─> lease + heartbeat ─> body(ctx) ─> revoke ─> exit
                                                               │ lapses: error file, exit 75
    any exception, in any thread: error file, exit 1, or 2 if the input or the device is at fault

``python -m workers.<kind> --trial-dir DIR --index I`` calls ``worker_main(kind, body)``. Arguments are parsed before
anything slow is imported.

Exit codes: 0 the body returned; 1 it failed; 2 wrong arguments, input or device; 75 fenced; 143 stopped by a signal
before it was done.
"""

from __future__ import annotations

import argparse
import functools
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from realsys.cluster import failpoint
from realsys.cluster.process import (
    ErrorRecord,
    StopSignals,
    bounded,
    configure_logging,
    die_with_parent,
    end,
    flush,
    raise_file_limit,
    record_of,
    write_error,
)
from realsys.errors import Fenced, RealsysError, WaitTimeout
from realsys.observe import spans

if TYPE_CHECKING:
    from realsys.cluster.lease import Heartbeat
    from realsys.cluster.names.contract import Lease, Names, NameStore
    from realsys.config.paths import TrialPaths
    from realsys.config.schema import Config

log = logging.getLogger(__name__)

EXIT_FAILED, EXIT_FENCED, EXIT_STOPPED = 1, 75, 143
LAST_WORDS_S = 2.0  # bound on writing the error file, and on revoking the lease: peers wait for the end of the process

Body = Callable[["WorkerContext"], None]


@dataclass(frozen=True, slots=True)
class TrialParts:
    """The trial as each of its workers sees it."""

    config: Config
    paths: TrialPaths
    names: Names
    store: NameStore


class WorkerContext:
    """Argument of a worker's body. ``stop`` is set by SIGTERM and SIGINT: the body must then return soon.

    Waits in the name store end with ``stop``, too.
    """

    def __init__(self, trial: TrialParts, kind: str, index: int, heartbeat: Heartbeat, signals: StopSignals) -> None:
        self.config = trial.config
        self.paths = trial.paths
        self.names = trial.names
        self.store = trial.store
        self.kind = kind
        self.index = index
        self.name = f"{kind}/{index}"
        self.incarnation: str = heartbeat.incarnation
        self.lease: Lease = heartbeat.lease
        self.stop: threading.Event = signals.stop
        self._heartbeat = heartbeat
        self._signals = signals

    @functools.cached_property
    def token(self) -> str:
        """The trial's secret, which HTTP calls that change state must carry. Raises RealsysError."""
        try:
            return self.paths.token.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as exc:
            problem = f"cannot read the trial's token {self.paths.token}: {exc}"
            raise RealsysError(f"{self.name}: {problem}") from exc

    def register(self, key: str, value: str) -> None:
        """Publish ``key`` for as long as this process lives; takes it over from a predecessor at this index."""
        self.store.add(key, value, lease=self.lease, replace=True)

    def set_state(self, state: str) -> None:
        """Show in the heartbeat's value what this worker is doing, in a word."""
        self._heartbeat.set_state(state)

    def check_alive(self) -> None:
        """Call it before every act that others see (``realsys.cluster.lease``). Without a lease the process ends."""
        self._heartbeat.check()

    def count(self, counters: Callable[[], Mapping[str, int]]) -> None:
        """Show the result of ``counters`` in the heartbeat's value: refusals by cause. Called on another thread."""
        self._heartbeat.count(counters)

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` from another thread at the request to stop, or now if it was made before.

        For event loops: ``ctx.on_stop(lambda: loop.call_soon_threadsafe(stopped.set))``.
        """
        self._signals.on_stop(callback)


class _FailureReporter:
    """Writes the error file of this process, for its first failure only."""

    def __init__(self, kind: str, index: int, directory: Path) -> None:
        self._kind = kind
        self._index = index
        self._directory = directory
        self._lock = threading.Lock()
        self._reported = False
        self._written = threading.Event()
        self.release: Callable[[], None] = lambda: None  # revokes the lease, once the worker has one

    def report(self, exc: BaseException, where: str) -> None:
        log.critical("%s: %s: %s", where, type(exc).__name__, exc, exc_info=exc)
        with self._lock:
            first, self._reported = not self._reported, True
        if not first:
            self._written.wait(2 * LAST_WORDS_S)  # the caller may end the process next
            return
        record = record_of(self._kind, self._index, exc)
        bounded(lambda: self._write(record), LAST_WORDS_S, "writing the error file")
        self._written.set()

    def _write(self, record: ErrorRecord) -> None:
        try:
            write_error(self._directory, record)
        except OSError as exc:  # a full disk must not hide why the process ended: the log has it
            log.error("cannot write the error file in %s: %s", self._directory, exc)

    def fence(self, exc: Fenced) -> NoReturn:
        self.report(exc, "fenced")
        flush()
        os._exit(EXIT_FENCED)

    def thread_failed(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_value is None or isinstance(args.exc_value, SystemExit):
            return
        name = args.thread.name if args.thread is not None else "unknown"
        self.report(args.exc_value, f"thread {name!r} failed")
        # The main thread may wait for this thread's result for ever: end the process here.
        bounded(self.release, LAST_WORDS_S, "revoking the lease")
        flush()
        os._exit(EXIT_FENCED if isinstance(args.exc_value, Fenced) else EXIT_FAILED)


def worker_main(kind: str, body: Body, argv: Sequence[str] | None = None) -> NoReturn:
    """Run ``body`` as worker ``kind`` and exit. ``argv`` has no program name; default ``sys.argv[1:]``."""
    parser = argparse.ArgumentParser(prog=f"python -m realsys.workers.{kind}", description=f"One {kind} of a trial.")
    parser.add_argument("--trial-dir", type=Path, required=True, help="folder that holds the trial's config.json")
    parser.add_argument("--index", type=int, required=True, help="number of this worker among its kind, from 0")
    arguments = parser.parse_args(argv)
    if arguments.index < 0:
        parser.error(f"--index {arguments.index}: must be 0 or more")
    if not arguments.trial_dir.is_dir():
        parser.error(f"--trial-dir {arguments.trial_dir}: no such directory")
    trial_dir, index = arguments.trial_dir.resolve(), arguments.index
    name = f"{kind}/{index}"
    configure_logging(name)
    raise_file_limit()
    signals = StopSignals(threading.Event())
    signals.install()
    from realsys.config.paths import TrialPaths  # imports pydantic: not before the arguments are parsed

    paths = TrialPaths(trial_dir)
    reporter = _FailureReporter(kind, index, paths.errors)
    threading.excepthook = reporter.thread_failed
    sys.excepthook = lambda _type, exc, _traceback: reporter.report(exc, "failed")
    try:
        die_with_parent()
        code = _run(kind, index, body, paths, signals, reporter)
    except Fenced as exc:
        reporter.fence(exc)
    except Exception as exc:
        reporter.report(exc, "failed")
        code = exc.exit_code if isinstance(exc, RealsysError) else EXIT_FAILED
    log.info("exit %d", code)
    end(code, signals.orphan_grace_s)


def _run(kind: str, index: int, body: Body, paths: TrialPaths, signals: StopSignals, reporter: _FailureReporter) -> int:
    """Set up, run the body, take down. Returns the exit code."""
    from realsys.cluster.lease import Heartbeat, LeaseTerms, lease_clock
    from realsys.cluster.names.connect import PASSWORD_VARIABLE, make_name_store, trial_names
    from realsys.cluster.network import take_address
    from realsys.config.paths import read_config

    failpoint.arm(f"{kind}/{index}")
    failpoint.failpoint("worker.start")
    config = take_address(read_config(paths.config))
    signals.orphan_grace_s = config.cluster.stop_timeout_s
    names = trial_names(config)
    store = make_name_store(config, paths, known=True)
    os.environ.pop(PASSWORD_VARIABLE, None)  # not for the verifiers, agents and engines that this process starts
    signals.on_stop(store.interrupt)
    terms = LeaseTerms(
        config.cluster.lease_s,
        config.cluster.heartbeat_s,
        clock=lease_clock(config.cluster),
        last=paths.incarnation(kind, index),
    )
    heartbeat = Heartbeat(store, names.heartbeat(f"{kind}/{index}"), kind, index, terms, on_lost=reporter.fence)
    heartbeat.start()

    def release() -> None:
        heartbeat.stop()
        try:
            heartbeat.lease.revoke()
        except RealsysError as exc:
            log.warning("cannot revoke the lease, it will lapse: %s", exc)

    reporter.release = release
    if config.telemetry.spans:
        folder = paths.spans / f"{kind}-{index}"
        spans.start(folder, f"{kind}/{index}", heartbeat.incarnation)
    context = WorkerContext(TrialParts(config, paths, names, store), kind, index, heartbeat, signals)
    log.info("started: pid %d, incarnation %s", os.getpid(), context.incarnation)
    try:
        return _run_body(body, context, reporter)
    finally:
        bounded(spans.stop, LAST_WORDS_S, "writing the last spans")
        bounded(release, LAST_WORDS_S, "revoking the lease")
        try:
            store.close()
        except RealsysError as exc:  # a blocked callback; it does not change the result of the body
            log.warning("closing the name store: %s", exc)


def _run_body(body: Body, context: WorkerContext, reporter: _FailureReporter) -> int:
    # The modules stay. Otherwise each full garbage collection would walk their 70,000 objects or more, and
    # stop the event loop of the MasterWorker or of the manager for 40 ms.
    gc.freeze()
    try:
        body(context)
    except WaitTimeout as exc:
        if not context.stop.is_set():
            raise
        log.info("stopped: %s", exc)
        return EXIT_STOPPED
    except SystemExit as exc:
        if exc.code in (None, 0):
            return 0
        if exc.code == EXIT_STOPPED and context.stop.is_set():  # the body stopped before its work was done
            return EXIT_STOPPED
        reporter.report(exc, "the body called sys.exit")
        return exc.code if isinstance(exc.code, int) else EXIT_FAILED
    return 0
