"""Groups that were not trained, on disk for people: the newest ones of each process, with the reason of each.

    {trial}/dropped/{process}/{number}.msgpack    one DroppedGroup

    RolloutWorker, ModelWorker ──offer──> DroppedWriter ──thread──> file; the oldest files go

Nothing depends on these files, so a run never waits for them: while one group is written others are skipped, a process
begins at most one dropped and one failed group per second, and a group has at most MOST_GROUP_BYTES of rows.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from realsys.errors import MALFORMED, RecordError
from realsys.types import F32, I32, FinishReason, Mask, Ticket

log = logging.getLogger(__name__)

MOST_BYTES = 16 << 20  # bytes of one process
MOST_GROUP_BYTES = 1 << 20  # bytes of the rows of one group; one row is always kept
MOST_TEXT = 100_000  # characters of a prompt or an error
LEAST_GAP_S = 1.0  # between two groups that were dropped, and between two that failed


class RowArrays(Protocol):
    """The part of ``realsys.types.Row`` that is kept."""

    tokens: I32
    loss_mask: Mask
    logprobs: F32
    versions: I32
    finish_reason: FinishReason


class DroppedRow(msgspec.Struct, frozen=True):
    """A row as in ``realsys.types.Row``: the bytes of its arrays."""

    tokens: bytes
    loss_mask: bytes
    logprobs: bytes
    versions: bytes
    finish_reason: str

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by the names that a recorded step uses."""
        return {
            "tokens": np.frombuffer(self.tokens, np.int32),
            "loss_mask": np.frombuffer(self.loss_mask, np.bool_),
            "behav_logprobs": np.frombuffer(self.logprobs, np.float32),
            "versions": np.frombuffer(self.versions, np.int32),
        }


class DroppedEpisode(msgspec.Struct, frozen=True):
    """An episode of a group that was not trained.

    error      why it failed, "" if it did not; the row of a failed episode is its last call of the engine
    tokens     sampled tokens of all its rows
    versions   oldest and newest version that sampled them; None without tokens
    rows       fewer than it had, or none, if the group was too large to keep all
    """

    number: int
    reward: float | None
    correct: bool | None
    error: str
    finish_reason: str
    tokens: int
    versions: tuple[int, int] | None
    rows: list[DroppedRow]


class DroppedGroup(msgspec.Struct, frozen=True):
    """A group that was not trained, or not with all of its episodes; then ``reason`` is "".

    worker        RolloutWorker that sampled it
    prompt        text of the prompt; "" if the writer has it as tokens only
    reference     reference answer; None if the writer does not know it
    next_version  version on top of which the next batch was to be trained; None: the group did not reach the trainer
    """

    time: float  # unix seconds
    ticket: Ticket
    worker: str
    reason: str
    prompt: str
    reference: str | None
    episodes: list[DroppedEpisode]
    next_version: int | None = None


class Room:
    """Bytes that are left for the rows of one group."""

    def __init__(self) -> None:
        self._bytes = MOST_GROUP_BYTES

    def episode(
        self, number: int, rows: Sequence[RowArrays], reward: float | None, correct: bool | None, error: str = ""
    ) -> DroppedEpisode:
        """Return an episode with as many of its rows as fit. The first row of a group is always kept."""
        reasons = [row.finish_reason for row in rows]
        versions = [row.versions for row in rows if len(row.versions)]
        return DroppedEpisode(
            number=number,
            reward=reward,
            correct=correct,
            error=error[:MOST_TEXT],
            finish_reason=next((reason for reason in reasons if reason != "stop"), "stop"),
            tokens=sum(len(row.logprobs) for row in rows),
            versions=(int(min(v.min() for v in versions)), int(max(v.max() for v in versions))) if versions else None,
            rows=self._kept(rows),
        )

    def _kept(self, rows: Sequence[RowArrays]) -> list[DroppedRow]:
        kept: list[DroppedRow] = []
        for row in rows:
            size = row.tokens.nbytes + row.loss_mask.nbytes + row.logprobs.nbytes + row.versions.nbytes
            if size > self._bytes and self._bytes < MOST_GROUP_BYTES:
                self._bytes = 0
                return kept
            self._bytes -= size
            kept.append(
                DroppedRow(
                    row.tokens.tobytes(),
                    row.loss_mask.tobytes(),
                    row.logprobs.tobytes(),
                    row.versions.tobytes(),
                    row.finish_reason,
                )
            )
        return kept


class DroppedWriter:
    """Writer of one process. It keeps the newest ``keep`` groups; with 0 it does nothing."""

    def __init__(self, root: Path, process: str, keep: int, clock: Callable[[], float] = time.monotonic) -> None:
        """``root``: ``paths.dropped``."""
        self.process = process
        self._folder = root / process.replace("/", "-")
        self._keep = keep
        self._clock = clock
        self._last: dict[bool, float] = {}  # failed -> clock
        self._thread: threading.Thread | None = None

    def offer(self, make: Callable[[], DroppedGroup], *, failed: bool = False) -> None:
        """Write the group that ``make`` returns in the background, unless one is being written or just was.

        ``make`` is called only for a group that is written.
        """
        now = self._clock()
        is_writing = self._thread is not None and self._thread.is_alive()
        if not self._keep or is_writing or now - self._last.get(failed, -np.inf) < LEAST_GAP_S:
            return
        self._last[failed] = now
        # A daemon: a process that ends does not wait for a slow disk.
        self._thread = threading.Thread(target=self._write, args=(make(),), name="dropped group", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Return when the group that is being written is on disk."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, group: DroppedGroup) -> None:
        try:
            write_group(self._folder, group, self._keep)
        except OSError as error:
            log.warning("dropped group %s not kept: %s", group.ticket.ticket_id, error)


def write_group(folder: Path, group: DroppedGroup, keep: int) -> None:
    """Add a group to the folder of its process, and remove the oldest ones. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(folder.glob("*.msgpack"))
    number = int(files[-1].stem) + 1 if files and files[-1].stem.isdigit() else 0
    path = folder / f"{number:08d}.msgpack"
    staged = path.with_suffix(".tmp")
    staged.write_bytes(msgspec.msgpack.encode(group))
    os.replace(staged, path)
    size = 0
    for count, old in enumerate([path, *reversed(files)], 1):
        size += old.stat().st_size
        if count > keep or (size > MOST_BYTES and count > 1):
            old.unlink(missing_ok=True)


class GroupFile(NamedTuple):
    """A file of a group. A file with another content differs in one of these."""

    time_ns: int  # time of its last change
    path: Path
    size: int  # bytes


def group_files(root: Path) -> list[GroupFile]:
    """Return the files of all processes, the newest first. ``root``: ``paths.dropped``."""
    files: list[GroupFile] = []
    for path in root.glob("*/*.msgpack"):
        try:
            status = path.stat()
        except FileNotFoundError:  # its process has just removed it
            continue
        files.append(GroupFile(status.st_mtime_ns, path, status.st_size))
    return sorted(files, reverse=True)


def read_group(path: Path) -> DroppedGroup:
    """Read a group. Raises RecordError, also if its process has removed it."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=DroppedGroup)
    except FileNotFoundError:
        raise RecordError(f"{path}: not found: its process keeps newer groups only; load the list again") from None
    except (OSError, *MALFORMED) as error:
        raise RecordError(f"{path}: cannot be read: {error}") from None
