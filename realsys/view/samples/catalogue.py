"""Sources of samples in a trial, by name.

step:12       samples of train step 12
eval:step-40  completions of an evaluation, by the name of its folder
dropped       groups that were dropped or failed
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from realsys.config.allocation import ACTOR
from realsys.config.dump import read_config
from realsys.config.paths import TrialPaths
from realsys.config.roles import role_settings
from realsys.config.schema import Config
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import RecordError
from realsys.evaluation.eval_records import headline
from realsys.evaluation.stored_samples import RESULT, read_result, stored_evaluations
from realsys.rollout.stores.dropped_store import group_files
from realsys.train.records.record_files import recorded_steps
from realsys.view.samples.base import SampleSource
from realsys.view.samples.dropped_samples import DroppedSource
from realsys.view.samples.eval_samples import EvalSource
from realsys.view.samples.references import References
from realsys.view.samples.step_samples import StepSource

DROPPED = "dropped"


class Listed(msgspec.Struct, frozen=True):
    """A source that exists. ``label``: for people."""

    name: str
    kind: str
    label: str


class Catalogue:
    """Sources of one trial. It keeps the one that was used last."""

    def __init__(self, paths: TrialPaths) -> None:
        """Raises ConfigError if the folder is not a trial."""
        self._paths = paths
        self._config: Config = read_config(paths.config)
        self._tokenizer: TextTokenizer | None = None
        self._references: References | None = None
        self._open: tuple[str, SampleSource] | None = None

    def sources(self) -> list[Listed]:
        """Return all sources: steps, evaluations, then the groups that were not trained; the newest first."""
        steps = [Listed(f"step:{step}", "step", f"step {step}") for step in sorted(self.steps(), reverse=True)]
        evaluations = [
            Listed(f"eval:{name}", "eval", f"{name}: {headline(read_result(self._paths.evaluations / name))}")
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
        if self._open is not None and self._open[0] == name and name != DROPPED:
            return self._open[1]
        kind, _, rest = name.partition(":")
        if kind == "step" and rest.isdecimal():
            source: SampleSource = self.step(int(rest))
        elif kind == "eval" and rest in stored_evaluations(self._paths.evaluations):
            source = self.evaluation(rest)
        elif name == DROPPED:
            source = DroppedSource(self._paths.dropped, self.tokenizer)
        else:
            raise RecordError(f"{self._paths.root}: samples {name!r} not found: use step:N, eval:NAME or dropped")
        self._open = (name, source)
        return source

    def step(self, step: int) -> StepSource:
        """Return the samples of a recorded step. Raises RecordError."""
        if self._references is None:
            self._references = References(self._config, self._paths, self.tokenizer)
        return StepSource(self._paths, step, self.tokenizer, self._references)

    def evaluation(self, name: str) -> EvalSource:
        """Return the completions of a stored evaluation. Raises RecordError."""
        return EvalSource(self._paths.evaluations / name)

    @property
    def tokenizer(self) -> TextTokenizer:
        """Tokenizer of the actor. Raises ModelError."""
        if self._tokenizer is None:
            self._tokenizer = TextTokenizer(role_settings(self._config, ACTOR).model_dir(self._paths))
        return self._tokenizer
