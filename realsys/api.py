"""Runs and trials from Python, for scripts and notebooks: `realsys.run` and `realsys.Trial`.

    trial = realsys.run(["experiment=arith", "train.total_steps=5"])
    [record["reward_mean"] for record in trial.steps()]

A trial is only read, also while it runs. `import realsys` does not import this module: the first use does.
"""

from __future__ import annotations

import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from realsys.cluster.process import own_environment
from realsys.config.compose import compose, quoted
from realsys.config.paths import TrialPaths, read_config
from realsys.config.schema import Config
from realsys.errors import ConfigError, RealsysError
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
    if isinstance(overrides, str):
        raise ConfigError("overrides", overrides, 'must be a list of texts: ["experiment=arith", ...]')
    given = [*overrides, *([] if trial is None else [f"trial={quoted(trial)}"])]
    options = RunOptions(trial, None if config_dir is None else Path(config_dir), plain=True)
    config = resolve(compose(given, config_dir=options.config_dir), now=datetime.now())
    words = [*own_words(), *words_again(overrides, config.trial, options)]
    words += [text for text in overrides if text.startswith("recover=")]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        try:
            code = _watch(words, errors, quiet=quiet)
        except BaseException:
            print(_text(errors), end="")  # where the run is saved, and how to continue it
            raise
        if code:
            raise _failure(_text(errors), code)
    return Trial(TrialPaths.of(config).root)


def _watch(words: Sequence[str], errors: IO[str], *, quiet: bool) -> int:
    """Print the lines of the process until it has ended. Returns its exit code."""
    process = subprocess.Popen(
        words,
        env=own_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        encoding="utf-8",
        errors="replace",
        process_group=0,  # else Ctrl-C on a terminal reaches it twice, and the second one kills
    )
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


def _text(errors: IO[str]) -> str:
    errors.seek(0)
    return errors.read()


def _failure(text: str, code: int) -> RealsysError:
    """Return the error with the messages of the run on stderr. Lines before them are of libraries."""
    own = re.search(r"^realsys: (.*)", text, re.MULTILINE | re.DOTALL)
    error = RealsysError((own[1] if own else text).strip() or f"the run ended with exit code {code}")
    error.exit_code = code
    return error
