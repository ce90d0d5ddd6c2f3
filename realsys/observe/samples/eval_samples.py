"""Completions of a finished evaluation. Their texts stay on disk until one is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from realsys.errors import MALFORMED, RecordError
from realsys.observe.evaluation_records import SAMPLES, EvalSample, headline, read_result, stored_evaluations
from realsys.observe.samples.filters import SampleRow, SampleView, Turn

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
        self._scan()

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

    def _scan(self) -> None:
        """Read the numbers of every completion. A last line that was cut off is not one."""
        found: list[tuple[tuple[int, int, int], SampleRow]] = []
        try:
            for offset, numbers in _lines(self._path):
                row = _row(numbers)
                self._offsets[row.sample_id] = offset
                found.append(((numbers.problem, numbers.sample, numbers.attempt), row))
        except FileNotFoundError:
            raise RecordError(f"{self._path.parent}: no completions are stored: the evaluation has not ended") from None
        except (OSError, *MALFORMED) as error:
            raise RecordError(f"{self._path}: cannot be read: {error}") from None
        self._rows = [row for _, row in sorted(found, key=lambda pair: pair[0])]


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


def _row(line: _Line) -> SampleRow:
    attempt = f".{line.attempt}" if line.attempt else ""
    return SampleRow(
        sample_id=f"{line.problem}/{line.sample}{attempt}",
        group=str(line.problem),
        prompt_index=line.problem,
        reward=line.reward,
        correct=line.correct,
        tokens=line.tokens,
        truncated=line.finish_reason != "stop",
        finish_reason=line.finish_reason,
    )


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
