"""Sources of samples in a trial, by name.

step:12       samples of train step 12
eval:step-40  completions of an evaluation, by the name of its folder
dropped       groups that were not trained
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from realsys.cluster.files import FileStamp, file_stamp
from realsys.config.allocation import ACTOR
from realsys.config.dataflow import role_settings
from realsys.config.paths import TrialPaths, read_config
from realsys.config.schema import Config
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import RecordError
from realsys.observe.dropped_groups import group_files
from realsys.observe.evaluation_records import RESULT, SAMPLES, headline, read_result, stored_evaluations
from realsys.observe.samples.dropped_samples import DroppedSource
from realsys.observe.samples.eval_samples import EvalSource
from realsys.observe.samples.filters import SampleSource
from realsys.observe.samples.step_samples import StepSource
from realsys.observe.samples.turns import References
from realsys.train.record_files import BATCH, record_of_step, recorded_steps

DROPPED = "dropped"
_MOST_DIGITS = 12  # digits of the number of a step


class Listed(msgspec.Struct, frozen=True):
    """A source that exists. ``label``: for people."""

    name: str
    kind: str
    label: str


@dataclass(frozen=True, slots=True)
class _Open:
    """The step or evaluation that was used last. It is read again if ``file`` has changed: after a roll-back a step is
    trained again, and an evaluation is repeated.
    """

    name: str
    file: Path
    stamp: FileStamp | None
    source: SampleSource


class Catalogue:
    """Sources of one trial. It keeps the step or evaluation that was used last, and the list of dropped groups."""

    def __init__(self, paths: TrialPaths) -> None:
        """Raises ConfigError if the folder is not a trial."""
        self._paths = paths
        self._config: Config = read_config(paths.config)
        self._tokenizer: TextTokenizer | None = None
        self._references: References | None = None
        self._open: _Open | None = None
        self._dropped: DroppedSource | None = None

    def sources(self) -> list[Listed]:
        """Return all sources: steps, evaluations, then the groups that were not trained; the newest first."""
        steps = [Listed(f"step:{step}", "step", f"step {step}") for step in sorted(self.steps(), reverse=True)]
        evaluations = [
            Listed(f"eval:{name}", "eval", f"{name}: {self._headline(name)}")
            for name in reversed(stored_evaluations(self._paths.evaluations))
            if (self._paths.evaluations / name / RESULT).is_file()
        ]
        dropped = len(group_files(self._paths.dropped))
        return [*steps, *evaluations, *([Listed(DROPPED, DROPPED, f"{dropped} groups not trained")] if dropped else [])]

    def steps(self) -> dict[int, Path]:
        """Return step -> folder of every record."""
        return recorded_steps(self._paths.records)

    def open(self, name: str) -> SampleSource:
        """Return a source. Raises RecordError if it does not exist, and errors of its files."""
        if name == DROPPED:
            self._dropped = self._dropped or DroppedSource(self._paths.dropped, self.tokenizer, self.references)
            return self._dropped
        if self._open is None or self._open.name != name or self._open.stamp != file_stamp(self._open.file):
            self._open = self._opened(name)
        return self._open.source

    def _opened(self, name: str) -> _Open:
        kind, _, rest = name.partition(":")
        if kind == "step" and rest.isdecimal() and len(rest) <= _MOST_DIGITS:
            file = record_of_step(self._paths.records, int(rest)) / BATCH
            return _Open(name, file, file_stamp(file), self.step(int(rest)))
        if kind == "eval" and rest in stored_evaluations(self._paths.evaluations):
            file = self._paths.evaluations / rest / SAMPLES
            return _Open(name, file, file_stamp(file), self.evaluation(rest))
        raise RecordError(f"{self._paths.root}: samples {name[:80]!r} not found: use step:N, eval:NAME or dropped")

    def step(self, step: int) -> StepSource:
        """Return the samples of a recorded step. Raises RecordError."""
        return StepSource(self._paths, step, self.tokenizer, self.references)

    def evaluation(self, name: str) -> EvalSource:
        """Return the completions of a stored evaluation. Raises RecordError."""
        return EvalSource(self._paths.evaluations / name)

    @property
    def references(self) -> References:
        """Reference answers of the prompts. Raises ModelError."""
        if self._references is None:
            self._references = References(self._config, self._paths, self.tokenizer)
        return self._references

    @property
    def tokenizer(self) -> TextTokenizer:
        """Tokenizer of the actor. Raises ModelError."""
        if self._tokenizer is None:
            self._tokenizer = TextTokenizer(role_settings(self._config, ACTOR).model_dir(self._paths))
        return self._tokenizer

    def _headline(self, name: str) -> str:
        """Return the result of an evaluation in one line. A damaged one must not hide the other sources."""
        try:
            return headline(read_result(self._paths.evaluations / name))
        except RecordError:
            return "its result cannot be read"
