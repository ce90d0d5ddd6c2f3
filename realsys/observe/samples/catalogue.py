"""Sources of samples in a trial, by name.

step:12       samples of train step 12
eval:step-40  completions of an evaluation, by the name of its folder
dropped       groups that were not trained
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from realsys.algorithm.token_losses import MASKED, STALE
from realsys.cluster.files import FileStamp, file_stamp
from realsys.config.allocation import ACTOR
from realsys.config.dataflow import role_settings
from realsys.config.paths import TrialPaths, read_config
from realsys.config.schema import Config
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import MALFORMED, RecordError
from realsys.observe.dropped_groups import DroppedEpisode, DroppedGroup, GroupFile, group_files, read_group
from realsys.observe.evaluation_records import RESULT, SAMPLES, EvalSample, headline, read_result, stored_evaluations
from realsys.observe.samples.filters import PROMPT_END, SampleRow, SampleSource, SampleView, Turn
from realsys.observe.samples.step_samples import References, StepSource, turns
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


# ---- completions of a finished evaluation
#
# Their texts stay on disk until one is shown.


MOST_LINES = 200_000  # completions of one evaluation


class _Line(msgspec.Struct, frozen=True):
    """Numbers of a stored completion. Its texts are skipped."""

    problem: int
    sample: int
    reward: float
    correct: bool | None
    finish_reason: str
    tokens: int
    attempt: int = 0


class EvalSource:
    """Completions of one evaluation, in the order of their problems."""

    def __init__(self, folder: Path) -> None:
        """``folder``: of the evaluation. Raises RecordError if it has not ended, or is damaged."""
        self._path = folder / SAMPLES
        self.name = folder.name
        self._result = read_result(folder)
        self._offsets: dict[str, int] = {}
        self._rows: list[SampleRow] = []
        # a last line that was cut off is not a completion
        found: list[tuple[tuple[int, int, int], SampleRow]] = []
        try:
            for offset, numbers in _lines(self._path):
                attempt = f".{numbers.attempt}" if numbers.attempt else ""
                row = SampleRow(
                    sample_id=f"{numbers.problem}/{numbers.sample}{attempt}",
                    group=str(numbers.problem),
                    prompt_index=numbers.problem,
                    reward=numbers.reward,
                    correct=numbers.correct,
                    tokens=numbers.tokens,
                    truncated=numbers.finish_reason != "stop",
                    finish_reason=numbers.finish_reason,
                )
                self._offsets[row.sample_id] = offset
                found.append(((numbers.problem, numbers.sample, numbers.attempt), row))
        except FileNotFoundError:
            raise RecordError(f"{self._path.parent}: no completions are stored: the evaluation has not ended") from None
        except (OSError, *MALFORMED) as error:
            raise RecordError(f"{self._path}: cannot be read: {error}") from None
        self._rows = [row for _, row in sorted(found, key=lambda pair: pair[0])]

    @property
    def title(self) -> str:
        return f"{self.name}: version {self._result.get('version')}, {headline(self._result)}"

    def rows(self) -> Sequence[SampleRow]:
        return self._rows

    def prompt(self, sample_id: str) -> str:
        return self.sample(sample_id).prompt

    def text(self, sample_id: str) -> str:
        sample = self.sample(sample_id)
        return f"{sample.prompt}\n{sample.completion}"

    def view(self, sample_id: str) -> SampleView:
        sample = self.sample(sample_id)
        row = next(row for row in self._rows if row.sample_id == sample_id)
        turns = [Turn("prompt", [sample.prompt]), Turn("sampled", [sample.completion])]
        return SampleView(row, turns, facts(sample), sample.reference)

    def sample(self, sample_id: str) -> EvalSample:
        """Read one completion. Raises RecordError."""
        if sample_id not in self._offsets:
            raise RecordError(f"evaluation {self.name!r} has no completion {sample_id!r}")
        try:
            with self._path.open("rb") as file:
                file.seek(self._offsets[sample_id])
                return msgspec.json.decode(file.readline(), type=EvalSample)
        except (OSError, *MALFORMED) as error:
            raise RecordError(f"{self._path}: cannot be read: {error}") from None


def _lines(path: Path) -> Iterator[tuple[int, _Line]]:
    """Yield the whole lines with their offsets, at most MOST_LINES."""
    decoder = msgspec.json.Decoder(_Line)
    offset = 0
    with path.open("rb") as file:
        for line in islice(file, MOST_LINES):
            if not line.endswith(b"\n"):
                return
            yield offset, decoder.decode(line)
            offset += len(line)


def facts(sample: EvalSample) -> list[tuple[str, str]]:
    """Return the facts of a completion as (name, value), for people."""
    versions = sorted({sample.version_min, sample.version_max})
    parts = [("completion", str(sample.sample)), ("finish", sample.finish_reason)]
    if sample.answer is not None:
        parts.append(("final answer", sample.answer))
    parts += [(name, f"{value:g}") for name, value in sample.metrics.items()]
    parts.append(("version", "-".join(map(str, versions))))
    parts.append(("worker", f"{sample.worker}, seed {sample.seed}"))
    return parts


# ---- choice of a stored evaluation


def chosen_evaluation(root: Path, eval_id: str = "", of_set: str = "") -> str:
    """Return the name of an evaluation: the newest of ``eval_id`` and ``of_set``, "" for any. Raises RecordError naming
    those that are stored.
    """
    stored = stored_evaluations(root)
    if of_set:
        stored = [name for name in stored if read_result(root / name).get("set") == of_set]
    if not stored:
        of = f" of set {of_set!r}" if of_set else ""
        raise RecordError(f"{root}: no evaluation{of} has stored completions")
    if not eval_id:
        return stored[-1]
    if eval_id in stored:
        return eval_id
    # The step log calls the one of step 40 at the end "after"; the newest of that name is meant.
    named = [name for name in stored if read_result(root / name).get("eval_id") == eval_id]
    if not named:
        raise RecordError(f"{root}: no evaluation {eval_id!r} is stored: use one of {', '.join(stored)}")
    return named[-1]


# ---- dropped samples ---------------------------------------------------------------------------------------------
#
# Groups that were not trained, with the reason of each: RolloutWorkers dropped them, they failed, or they were too old
# for the trainer (``realsys.observe.dropped_groups``).


MOST_GROUPS = 1000
MOST_BYTES = 256 << 20  # bytes of files that the first list reads

#: reason of the trainer -> explanation
_EXPLAINED = {
    STALE: "too old when it arrived, or by its turn; its prompt was issued again",
    MASKED: "all of its tokens were too old to be trained",
}


@dataclass(frozen=True, slots=True)
class _Listed:
    """A group without its tokens."""

    reason: str
    prompt: str  # its end
    rows: list[SampleRow]


class DroppedSource:
    """The newest groups of all processes. A sample is an episode."""

    def __init__(self, root: Path, tokenizer: TextTokenizer, references: References) -> None:
        """``root``: ``paths.dropped``."""
        self._root = root
        self._tokenizer = tokenizer
        self._references = references
        self._groups: dict[GroupFile, _Listed] = {}
        self._places: dict[str, tuple[GroupFile, int]] = {}  # sample id -> file, place of the episode in it
        self._rows: list[SampleRow] = []
        self._open: tuple[GroupFile, DroppedGroup] | None = None  # the group that was read last
        self._refresh()

    @property
    def title(self) -> str:
        reasons = Counter(listed.reason for listed in self._groups.values())
        if not reasons:
            return "no dropped or failed group is kept"
        counted = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(5))
        return f"newest groups that were not trained: {counted}"

    def rows(self) -> Sequence[SampleRow]:
        """Return the samples as they are on disk now."""
        self._refresh()
        return self._rows

    def prompt(self, sample_id: str) -> str:
        return self._groups[self._places[sample_id][0]].prompt

    def text(self, sample_id: str) -> str:
        """Return prompt, reason and tokens as text; "" if its process has removed the group since the last list."""
        try:
            group, episode = self._read(sample_id)
        except RecordError:
            return ""
        tokens = [self._tokenizer.decode(np.frombuffer(row.tokens, np.int32).tolist()) for row in episode.rows]
        return "\n".join([group.prompt, reason_of(group), episode.error, *tokens])

    def view(self, sample_id: str) -> SampleView:
        group, episode = self._read(sample_id)
        row = next(row for row in self._rows if row.sample_id == sample_id)
        made = [turn for kept in episode.rows for turn in turns(kept.arrays(), 0, self._tokenizer)]
        reference, note = group.reference, ""
        if reference is None:
            reference, note = self._references.find(group.ticket.split, group.ticket.prompt_index)
        parts = [("error", episode.error)] if episode.error else []
        parts.append(("group", group.reason or "trained without its failed episodes"))
        if group.next_version is not None:
            parts[-1] = ("group", f"{group.reason}: {_EXPLAINED.get(group.reason, 'too old')}")
        if episode.versions is not None:
            oldest, newest = episode.versions
            sampled = f"v{oldest}" if oldest == newest else f"v{oldest} to v{newest}"
            staleness = _staleness(group, episode)
            behind = (
                ""
                if staleness is None
                else f"; the next batch trains on top of v{group.next_version}: {staleness} behind"
            )
            parts.append(("versions", f"sampled by {sampled}{behind}"))
        if not episode.rows:
            parts.append(("tokens", "not kept: the group was too large, or the engine returned none"))
        ticket = group.ticket
        parts.append(("worker", f"{group.worker}, {datetime.fromtimestamp(group.time):%Y-%m-%d %H:%M:%S}"))
        parts.append(("ticket", f"{ticket.ticket_id}, attempt {ticket.attempt}, granted at v{ticket.version}"))
        parts.append(("prompt", f"{ticket.prompt_index}, seed {ticket.seed}"))
        return SampleView(row, made or [Turn("prompt", [group.prompt])], parts, reference, note)

    def _refresh(self) -> None:
        """Read the groups that were added, and forget those that were removed. A file that cannot be read is left
        out: its process may remove it at any moment.
        """
        before, self._groups, size = self._groups, {}, 0
        for file in group_files(self._root)[:MOST_GROUPS]:
            size += file.size
            if size > MOST_BYTES and self._groups:
                break
            try:
                self._groups[file] = before.get(file) or _listed(read_group(file.path))
            except RecordError:
                continue
        self._places, self._rows = {}, []
        for file, listed in self._groups.items():
            for place, row in enumerate(listed.rows):
                if row.sample_id not in self._places:
                    self._places[row.sample_id] = (file, place)
                    self._rows.append(row)

    def _read(self, sample_id: str) -> tuple[DroppedGroup, DroppedEpisode]:
        if sample_id not in self._places:
            raise RecordError(f"no dropped or failed group has sample {sample_id!r}")
        file, place = self._places[sample_id]
        if self._open is None or self._open[0] != file:
            self._open = (file, read_group(file.path))
        group = self._open[1]
        return group, group.episodes[place]


def reason_of(group: DroppedGroup) -> str:
    """Return why a group was not trained, short enough for a list."""
    if group.next_version is not None:
        return f"too old ({group.reason})"
    return _short(group.reason) or "with failed episodes"


def _listed(group: DroppedGroup) -> _Listed:
    return _Listed(
        reason_of(group), group.prompt[-PROMPT_END:], [_episode_row(group, episode) for episode in group.episodes]
    )


def _episode_row(group: DroppedGroup, episode: DroppedEpisode) -> SampleRow:
    # A group with failed episodes may be dropped again, by the trainer, and its episodes have other numbers then.
    in_trainer = ".0" if group.next_version is not None else ""
    return SampleRow(
        sample_id=f"{group.ticket.unit}/{episode.number}{in_trainer}",
        group=group.ticket.ticket_id,
        prompt_index=group.ticket.prompt_index,
        reward=episode.reward,
        correct=episode.correct,
        tokens=episode.tokens,
        truncated=episode.finish_reason != "stop",
        finish_reason=episode.finish_reason,
        staleness=_staleness(group, episode),
        outcome=_short(episode.error) or (reason_of(group) if group.reason else "trained"),
    )


def _staleness(group: DroppedGroup, episode: DroppedEpisode) -> int | None:
    if group.next_version is None or episode.versions is None:
        return None
    return group.next_version - episode.versions[0]


def _short(reason: str) -> str:
    """Return the first line of a reason, short enough for a list."""
    line = reason.strip().split("\n", 1)[0]
    return line if len(line) <= 80 else line[:79] + "…"
