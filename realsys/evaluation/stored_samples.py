"""Completions of evaluations on disk, and their result.

    {trial}/evaluations/{eval_id}/parts/{worker}.jsonl    lines that RolloutWorkers append, any attempt
                                  samples.jsonl           one line per completion that counts, by problem and sample
                                  result.json             the step log's record; written last

A RolloutWorker appends a completion before it reports its end, so every completion that counts is there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from realsys.errors import MALFORMED, RecordError

SAMPLES, RESULT, PARTS = "samples.jsonl", "result.json", "parts"


class EvalSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One completion of an evaluation, with its verdict.

    problem    index of the prompt in its split
    sample     number of the completion of this problem, from 0
    answer     final answer that the verifier found in the completion; None without one
    reference  the reference answer of the problem
    correct    None if the task has no right or wrong
    tokens     sampled tokens
    """

    eval_id: str
    set: str
    problem: int
    sample: int
    attempt: int
    version_min: int
    version_max: int
    prompt: str
    completion: str
    reference: str
    reward: float
    correct: bool | None
    finish_reason: str
    tokens: int
    answer: str | None = None
    metrics: dict[str, float] = {}
    worker: str = ""
    seed: int = 0

    @property
    def unit(self) -> tuple[int, int, int]:
        """Return what tells it apart in its evaluation."""
        return self.problem, self.sample, self.attempt


def append_sample(folder: Path, worker: str, sample: EvalSample) -> None:
    """Append a completion to the part of ``worker``. ``folder``: of the evaluation. Raises OSError."""
    parts = folder / PARTS
    parts.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", worker) or "worker"
    # One write: a reader may meet a line that is cut off at its end, but never a mixture of two.
    with (parts / f"{name}.jsonl").open("ab", buffering=0) as file:
        file.write(msgspec.json.encode(sample) + b"\n")


def collect(folder: Path, counted: Iterable[tuple[int, int, int]]) -> list[EvalSample]:
    """Return the completions that count, (problem, sample, attempt), in their order, from the workers' parts.

    One that is not there, because its worker could not write it to this disk, is left out. An evaluation that was
    stored before its record reached the step log has no parts any more; then its own file has them.
    """
    found: dict[tuple[int, int, int], EvalSample] = {}
    for part in [*sorted((folder / PARTS).glob("*.jsonl")), *folder.glob(SAMPLES)]:
        found |= {sample.unit: sample for sample in _lines(part)}
    return [found[unit] for unit in sorted(counted) if unit in found]


def write_result(folder: Path, samples: Iterable[EvalSample], result: Mapping[str, Any]) -> None:
    """Store the completions that count and the result, and remove the workers' parts. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / SAMPLES, b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples))
    _replace(folder / RESULT, msgspec.json.encode(result) + b"\n")
    shutil.rmtree(folder / PARTS, ignore_errors=True)


def read_samples(folder: Path) -> list[EvalSample]:
    """Return the completions of a finished evaluation, by problem and sample. Raises RecordError."""
    path = folder / SAMPLES
    if not path.is_file():
        raise RecordError(f"{folder}: no completions are stored: the evaluation has not ended")
    return sorted(_lines(path), key=lambda sample: sample.unit)


def read_result(folder: Path) -> dict[str, Any]:
    """Return the step log's record of a finished evaluation. Raises RecordError."""
    try:
        result: dict[str, Any] = msgspec.json.decode((folder / RESULT).read_bytes(), type=dict[str, Any])
    except (OSError, *MALFORMED) as error:
        raise RecordError(f"{folder / RESULT}: cannot be read: {error}") from None
    return result


def stored_evaluations(root: Path) -> list[str]:
    """Return the ids of the evaluations with stored completions, oldest first. ``root``: ``paths.evaluations``."""
    folders = [path for path in root.glob("*") if (path / SAMPLES).is_file()]
    return [path.name for path in sorted(folders, key=lambda path: (path / SAMPLES).stat().st_mtime_ns)]


def _lines(path: Path) -> Iterator[EvalSample]:
    """Yield the samples of a file. A last line that was cut off is not one. Raises RecordError for any other."""
    decoder = msgspec.json.Decoder(EvalSample)
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            return
        try:
            yield decoder.decode(line)
        except MALFORMED as error:
            raise RecordError(f"{path}:{number}: is not a completion of an evaluation: {error}") from None


def _replace(path: Path, content: bytes) -> None:
    staged = path.with_name(f".{path.name}.tmp")
    staged.write_bytes(content)
    os.replace(staged, path)
