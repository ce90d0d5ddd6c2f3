"""Runs and trials from Python, for scripts and notebooks: `realsys.run` and `realsys.Trial`.

    trial = realsys.run(["experiment=arith", "train.total_steps=5"])
    [record["reward_mean"] for record in trial.steps()]

A trial is only read, also while it runs. `realsys.Session` starts a trial whose training loop is the caller:

    with realsys.Session(["experiment=arith"], trial="mine") as session:
        session.run(train)  # a function like realsys.loops.train

`import realsys` does not import this module: the first use does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Self

import msgspec

from realsys import errors, session
from realsys.cluster.aio import from_thread
from realsys.cluster.http_client import CallFailed, HttpClient
from realsys.cluster.process import own_environment
from realsys.config.compose import compose, quoted
from realsys.config.paths import TrialPaths, read_config
from realsys.config.schema import Config
from realsys.errors import ConfigError, RealsysError, SessionLost, Stopped, StreamError
from realsys.launch.commands.options import find_trial
from realsys.launch.commands.replay import last_recorded
from realsys.launch.commands.status import read_summary
from realsys.launch.prepare import resolve
from realsys.launch.run import RunOptions
from realsys.launch.words import own_words, words_again
from realsys.observe.samples.catalogue import Catalogue
from realsys.observe.samples.step_samples import Sample
from realsys.observe.step_fields import FIELDS
from realsys.observe.step_log import StepRecord, surviving_steps
from realsys.session import CallReply, CallRequest, SessionAddress


class Trial:
    """A trial on disk, running or ended. Each call reads its files again."""

    def __init__(self, folder: str | Path) -> None:
        """``folder``: of the trial, or EXPERIMENT/TRIAL under runs/. Raises ConfigError if it is not a trial."""
        self._paths = find_trial(Path(folder))

    def __repr__(self) -> str:
        return f"realsys.Trial({str(self.folder)!r})"

    @property
    def folder(self) -> Path:
        """Absolute path of the trial's folder."""
        return self._paths.root

    @property
    def config(self) -> Config:
        """Configuration of the last start, with all fields: ``trial.config.train.optimizer.lr``. Raises ConfigError."""
        return read_config(self._paths.config)

    @property
    def model(self) -> Path | None:
        """Hugging Face directory of the trained model; None until training has ended."""
        return self._paths.final_model if self._paths.final_model.is_dir() else None

    @property
    def summary(self) -> dict[str, Any] | None:
        """Content of summary.json, which `realsys status` prints; None until the run has ended. Raises ConfigError."""
        return read_summary(self._paths)

    def steps(self, kind: str = "train") -> list[StepRecord]:
        """Return the records of the step log in order, without those that a roll-back undid. docs/metrics.md has the
        fields. ``kind``: ``train``, ``eval``, ``warmup``, ``phase``, ... Raises ConfigError for an unknown kind.
        """
        if kind not in FIELDS:
            raise ConfigError("kind", kind, f"must be one of {', '.join(FIELDS)}")
        return [record for record in surviving_steps(self._paths.steps) if record["kind"] == kind]

    def evaluations(self) -> list[StepRecord]:
        """Return the records of the evaluations in order. One that is incomplete has no accuracy (None)."""
        return self.steps("eval")

    def samples(self, step: int | None = None) -> list[Sample]:
        """Return the samples of a train step, of the last recorded one by default (``record.keep_steps`` above 0).

        Raises RecordError if the step is not recorded, or its record is damaged.
        """
        source = Catalogue(self._paths).step(last_recorded(self._paths) if step is None else step)
        return [source.sample(row.sample_id) for row in source.rows()]


def run(
    overrides: Sequence[str], *, trial: str | None = None, config_dir: str | Path | None = None, quiet: bool = False
) -> Trial:
    """Run a trial to its end in a separate process, as `realsys run` does, and return it.

    ``trial``: name of the trial (default: date and time). ``config_dir``: your configuration files. ``quiet``: do not
    print the lines of the run. An interrupt (Ctrl-C, the notebook's stop button) stops the run with a checkpoint. The
    same call again continues the trial if it is named.

    Raises ConfigError for settings that cannot be read; RealsysError with the message of the run, and its exit code in
    ``exit_code``, if it is refused, fails or is stopped; KeyboardInterrupt.
    """
    words, paths = _command(overrides, trial, config_dir)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            code = _watch(words, output, quiet=quiet)
        except BaseException:
            print(_text(output), end="")  # where the run is saved, and how to continue it
            raise
        if code:
            raise _failure(_text(output), code)
    return Trial(paths.root)


def _command(
    overrides: Sequence[str], trial: str | None, config_dir: str | Path | None, *more: str
) -> tuple[list[str], TrialPaths]:
    """Return the words of `realsys run`, and the folder of the trial. Raises ConfigError."""
    if isinstance(overrides, str):
        raise ConfigError("overrides", overrides, 'must be a list of texts: ["experiment=arith", ...]')
    given = [*overrides, *more, *([] if trial is None else [f"trial={quoted(trial)}"])]
    options = RunOptions(trial, None if config_dir is None else Path(config_dir), plain=True)
    config = resolve(compose(given, config_dir=options.config_dir), now=datetime.now())
    words = [*own_words(), *words_again([*overrides, *more], config.trial, options)]
    return [*words, *(text for text in overrides if text.startswith("recover="))], TrialPaths.of(config)


def _watch(words: Sequence[str], output: IO[str], *, quiet: bool) -> int:
    """Print the lines of the process until it has ended. Returns its exit code."""
    process = _started(words, output)
    with process:
        assert process.stdout is not None
        try:
            for line in (line for line in process.stdout if not quiet):
                print(line, end="", flush=True)
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.communicate()  # the run ends within its own bounds (cluster.stop_timeout_s)
            raise
    return process.returncode


def _started(words: Sequence[str], output: IO[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        env=own_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=output,
        encoding="utf-8",
        errors="replace",
        process_group=0,  # else Ctrl-C on a terminal reaches it twice, and the second one kills
    )


def _text(output: IO[str]) -> str:
    output.seek(0)
    return output.read()


def _failure(text: str, code: int) -> RealsysError:
    """Return the error with the messages of the run on stderr. Lines before them are of libraries."""
    own = re.search(r"^realsys: (.*)", text, re.MULTILINE | re.DOTALL)
    error = RealsysError((own[1] if own else text).strip() or f"the run ended with exit code {code}")
    error.exit_code = code
    return error


# ---- a trial whose training loop is this process
#
#     Session ──starts──> realsys run train.loop=session ──> MasterWorker ──session.json──> address
#        ├──calls──> MasterWorker (``realsys.train.master.script_service``)
#        └──stdin of the launcher: when this process ends, however it ends, the run stops with a checkpoint

_LOOP = "train.loop=session"
_POLL_S = 0.2
_AGAIN_S = 0.5  # pause after a call that did not reach the MasterWorker
_HELD_S = 60.0  # bound on one question: the MasterWorker answers a call within 10 s, or that it is not done
_STOPPED = (130, 138, 143)  # exit codes of a run that was stopped


def main(train: Callable[[Any], Any], settings: Sequence[str] = ()) -> None:
    """Run a training loop as a program, with ``settings`` and then the words of its command line.

    An error is one line on stderr, and the exit code is that of `realsys run`: 2 for bad input, before anything starts.
    """
    try:
        with Session([*settings, *sys.argv[1:]]) as session:
            session.run(train)
    except RealsysError as error:
        print(f"realsys: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


class Session(session.Session):
    """A trial on whose models and rollouts a script trains: in a program, or in the cells of a notebook.

    Close it, or use it as a context manager: the end of the block ends training (evaluation, export), an exception
    stops the run with a checkpoint. Started again with the same trial name, it continues from the last checkpoint,
    even if this process was killed.
    """

    def __init__(
        self,
        overrides: Sequence[str] = (),
        *,
        trial: str | None = None,
        config_dir: str | Path | None = None,
        quiet: bool = False,
    ) -> None:
        """Start the processes of a trial, or continue it if it exists. Arguments as in ``run``.

        Returns when models are loaded and version 0, or that of the last checkpoint, is published. Raises as ``run``.
        """
        words, paths = _command(overrides, trial, config_dir, _LOOP)
        self._start(words, paths, quiet)

    @classmethod
    def resume(cls, folder: str | Path, overrides: Sequence[str] = (), *, quiet: bool = False) -> Self:
        """Continue the trial in ``folder`` with its own settings, after its last checkpoint. Raises as ``run``."""
        paths = find_trial(Path(folder))
        resumed = cls.__new__(cls)
        resumed._start([*own_words(), "resume", str(paths.root), *overrides, _LOOP, "--plain"], paths, quiet)
        return resumed

    def _start(self, words: Sequence[str], paths: TrialPaths, quiet: bool) -> None:
        self._paths = paths
        self._address = self._read_address()  # of an earlier start
        self._number = itertools.count(1)
        self._said = ""  # by the run on stderr
        self._asked: CallRequest | None = None  # the call that has no reply yet
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed in _end)
        self._process = _started([*words, "--while-stdin"], self._errors)
        self._printer = threading.Thread(target=_print_lines, args=(self._process, quiet), daemon=True)
        self._printer.start()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="session", daemon=True)
        self._thread.start()
        self._client: HttpClient | None = None
        self._train: Callable[[Any], Any] | None = None
        try:
            self._connect()
            super().__init__(self._carry_out, read_config(self._paths.config), self._paths.root)
        except BaseException:
            self._stop()
            raise

    def run(self, train: Callable[[Any], Any]) -> None:
        """Run a training loop: plain, or a coroutine function. When the trainer was started anew, run it again."""
        self._train = train
        while True:
            try:
                return session.run_script(train, self, getattr(train, "__qualname__", "the training loop"))
            except SessionLost as lost:
                print(f"realsys: {lost}", flush=True)

    def close(self) -> Trial:
        """End training: evaluate, export, end all processes. Raises RealsysError if that fails."""
        while self._process.poll() is None:
            try:
                self._carry_out(session.FINISH)
                while self._process.poll() is None:
                    time.sleep(_POLL_S)
                    self._check_start()
            except SessionLost as lost:  # steps after the last checkpoint are lost, too
                print(f"realsys: {lost}", flush=True)
                if self._train is not None:
                    self.run(self._train)
        self._end()
        return Trial(self._paths.root)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._stop()

    def _stop(self) -> None:
        """Stop the run with a checkpoint, and print where it is saved, and how to continue it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(RealsysError):
            self._end()
        print(self._said, end="")

    def _end(self) -> None:
        """Wait for the end of the run, which has its own bounds. Raises its failure, when it is called first."""
        code = self._process.wait()
        self._printer.join()
        if self._loop.is_closed():
            return
        failure = self._failure()
        self._errors.close()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        if self._client is not None:
            from_thread(self._loop, self._client.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if code:
            raise failure

    def _failure(self) -> RealsysError:
        """Return the error of the run, which has ended."""
        code = self._process.wait()
        self._said = _text(self._errors)
        return Stopped(self._said.strip() or "the run was stopped") if code in _STOPPED else _failure(self._said, code)

    def _read_address(self) -> SessionAddress | None:
        try:
            return msgspec.json.decode(self._paths.session.read_bytes(), type=SessionAddress)
        except (OSError, msgspec.MsgspecError):
            return None

    def _connect(self) -> None:
        """Wait for the MasterWorker of a new start. Raises the failure of the run if it ends before."""
        while not self._is_new_start():
            if self._process.poll() is not None:
                raise self._failure()
            time.sleep(_POLL_S)
        if self._client is not None:
            from_thread(self._loop, self._client.close)
        self._address = self._read_address()
        self._client = HttpClient(self._paths.token.read_text(encoding="utf-8").strip())

    def _carry_out(self, method: str, *args: Any) -> Any:
        """Have the MasterWorker carry out a call; return its result, or raise its error."""
        if self._loop.is_closed():
            raise Stopped("the session is closed")
        request = CallRequest(next(self._number), method, list(args))
        before, self._asked = self._asked, request
        if before is not None and (before.method, before.args) == (method, request.args) and method == "prepare":
            self._asked = request = before  # a user has interrupted the wait for this batch
        reply = from_thread(self._loop, self._ask, request)
        self._asked = None
        if reply is None:
            self._check_start()
        assert reply is not None
        if reply.error:
            raise _raised(reply)
        return msgspec.convert(reply.result, session.CALLS.get(method))

    def _check_start(self) -> None:
        """Connect to the MasterWorker of another start, if there is one, and raise SessionLost."""
        if self._is_new_start():
            self._connect()
            raise SessionLost("the trainer was started anew, from its last checkpoint: the loop begins again")

    def _is_new_start(self) -> bool:
        return (address := self._read_address()) is not None and address != self._address

    async def _ask(self, request: CallRequest) -> CallReply | None:
        """Ask until the call is done; None if the MasterWorker that began it has ended, and another one was started."""
        assert self._client is not None and self._address is not None
        while True:
            try:
                body = await self._client.call(f"{self._address.url}/call", request, _HELD_S)
            except CallFailed as failed:
                if failed.status:
                    raise StreamError(f"{request.method}: {failed}") from None
                if self._process.poll() is not None:
                    raise self._failure() from None
                if self._is_new_start():
                    return None
                await asyncio.sleep(_AGAIN_S)
                continue
            reply = msgspec.msgpack.decode(body, type=CallReply)
            if reply.done:
                return reply


def _raised(reply: CallReply) -> RealsysError:
    kind = getattr(errors, reply.error, RealsysError)
    error: RealsysError = kind.__new__(kind)
    error.args = (reply.message,)
    return error


def _print_lines(process: subprocess.Popen[str], quiet: bool) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if not quiet:
            print(line, end="", flush=True)
