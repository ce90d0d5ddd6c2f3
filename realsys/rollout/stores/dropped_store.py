"""Dropped and failed groups of a RolloutWorker, on disk for people: the newest ones, with the reason of each.

    {trial}/dropped/{worker}/{number}.msgpack    one DroppedGroup

    GroupPlayer ──add──> DroppedStore ──thread──> file; the oldest files go

Nothing depends on these files, so a run never waits for them: while one group is written others are skipped, no more
than one group per second is written, and a group has at most MOST_GROUP_BYTES of rows.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from realsys.data.prompts import Prompt
from realsys.errors import RecordError
from realsys.generation.client import Generated
from realsys.types import Episode, Row, Ticket

log = logging.getLogger(__name__)

MOST_BYTES = 16 << 20  # bytes of one worker
MOST_GROUP_BYTES = 1 << 20  # bytes of the rows of one group; one row is always kept
LEAST_GAP_S = 1.0  # between two groups that were dropped, and between two that failed
_LONGEST_TEXT = 100_000  # characters of a prompt or an error

#: error of an episode, and its last call of the engine: the tokens before it, and the completion
Failure = tuple[str, tuple[Sequence[int], Generated] | None]


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
    """An episode of a group that was not trained. ``error``: why it failed; then it has its last call as row, if any.

    ``rows`` is empty if the group was too large to keep all.
    """

    number: int
    reward: float | None
    correct: bool | None
    error: str
    rows: list[DroppedRow]


class DroppedGroup(msgspec.Struct, frozen=True):
    """A group that was not trained, or not with all of its episodes; then ``reason`` is ""."""

    time: float  # unix seconds
    ticket: Ticket
    worker: str
    reason: str
    prompt: str
    reference: str
    episodes: list[DroppedEpisode]


class DroppedStore:
    """Store of one RolloutWorker. It keeps the newest ``keep`` groups; with 0 it does nothing."""

    def __init__(self, root: Path, worker: str, keep: int, clock: Callable[[], float] = time.monotonic) -> None:
        """``root``: ``paths.dropped``."""
        self._folder = root / worker.replace("/", "-")
        self._worker = worker
        self._keep = keep
        self._clock = clock
        self._last: dict[bool, float] = {}  # failed -> clock
        self._writing: asyncio.Task[None] | None = None

    def add(
        self,
        ticket: Ticket,
        prompt: Prompt,
        reason: str,
        episodes: Mapping[int, Episode],
        failed: Mapping[int, Failure],
    ) -> None:
        """Write a group in the background, unless one is being written or was just written."""
        now, is_failure = self._clock(), bool(failed)
        if not self._keep or self._writing is not None or now - self._last.get(is_failure, -np.inf) < LEAST_GAP_S:
            return
        self._last[is_failure] = now
        group = DroppedGroup(
            time.time(),
            ticket,
            self._worker,
            reason[:_LONGEST_TEXT],
            prompt.text[:_LONGEST_TEXT],
            prompt.answer[:_LONGEST_TEXT],
            _episodes(episodes, failed),
        )
        self._writing = asyncio.create_task(self._write(group), name="dropped group")

    async def flush(self) -> None:
        """Return when the group that is being written is on disk."""
        if self._writing is not None:
            await self._writing

    async def _write(self, group: DroppedGroup) -> None:
        try:
            await asyncio.to_thread(write_group, self._folder, group, self._keep)
        except OSError as error:
            log.warning("dropped group %s not kept: %s", group.ticket.ticket_id, error)
        finally:
            self._writing = None


def write_group(folder: Path, group: DroppedGroup, keep: int) -> None:
    """Add a group to the folder of its worker, and remove the oldest ones. Raises OSError."""
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


def group_files(root: Path) -> list[Path]:
    """Return the files of all workers, the newest first. ``root``: ``paths.dropped``."""
    found: list[tuple[int, Path]] = []
    for path in root.glob("*/*.msgpack"):
        try:
            found.append((path.stat().st_mtime_ns, path))
        except FileNotFoundError:  # its worker has just removed it
            continue
    return [path for _, path in sorted(found, reverse=True)]


def read_group(path: Path) -> DroppedGroup:
    """Read a group. Raises RecordError, also if its worker has removed it."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=DroppedGroup)
    except FileNotFoundError:
        raise RecordError(f"{path}: not found: its worker keeps newer groups only; load the list again") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise RecordError(f"{path}: cannot be read: {error}") from None


def _episodes(episodes: Mapping[int, Episode], failed: Mapping[int, Failure]) -> list[DroppedEpisode]:
    """Return the failed episodes, then the others, with rows as long as they fit."""
    room = MOST_GROUP_BYTES
    made: list[DroppedEpisode] = []
    for number, (error, call) in sorted(failed.items()):
        rows, room = _kept([_row_of(*call)] if call is not None else [], room)
        made.append(DroppedEpisode(number, None, None, error[:_LONGEST_TEXT], rows))
    for number, episode in sorted(episodes.items()):
        rows, room = _kept(episode.rows, room)
        made.append(DroppedEpisode(number, episode.reward, episode.correct, "", rows))
    return made


def _kept(rows: Sequence[Row], room: int) -> tuple[list[DroppedRow], int]:
    kept: list[DroppedRow] = []
    for row in rows:
        size = row.tokens.nbytes + row.loss_mask.nbytes + row.logprobs.nbytes + row.versions.nbytes
        if size > room and room < MOST_GROUP_BYTES:
            return kept, 0
        room -= size
        kept.append(
            DroppedRow(
                row.tokens.tobytes(),
                row.loss_mask.tobytes(),
                row.logprobs.tobytes(),
                row.versions.tobytes(),
                row.finish_reason,
            )
        )
    return kept, room


def _row_of(before: Sequence[int], completion: Generated) -> Row:
    """Return a call of the engine as a row."""
    tokens = np.concatenate([np.asarray(before, np.int32), completion.tokens])
    mask = np.zeros(len(tokens), np.bool_)
    mask[len(before) :] = True
    return Row(tokens, mask, completion.logprobs, completion.versions, completion.finish_reason)
