"""Rows that the training script chooses or makes (``data.order=script``), in ``{trial}/data/submitted.jsonl``.

    script ──row, agent──> SubmittedWriter ──lines, synced──> submitted.jsonl ──what is new──> SubmittedLines: readers
                                 └──numbers of the prompts──> ledger ──tickets──> RolloutWorkers

A prompt of the train split has its number there, from 0 to size - 1. Line k of this file, from 0, is prompt size + k:

    {"row": {"prompt": "a1=", "answer": "1"}}                                   a new row
    {"row": {"prompt": "a1=", "answer": "1"}, "agent": "package.module:Class"}  a new row, for another agent
    {"row": 17, "agent": "package.module:Class"}                                prompt 17 of the train split, for it

Whole lines are only added, so a number never changes its meaning. Lines that no ledger knows do no harm: a process that
died between both writes leaves them behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from realsys.cluster.files import fsync_directory
from realsys.config.doors import AGENT
from realsys.config.schema_data import DataConfig
from realsys.data.layouts import layout_of, read_row
from realsys.errors import MALFORMED, DataError

log = logging.getLogger(__name__)

MOST_LINE_BYTES = 16 << 20  # of a row with its tests; every attempt of its ticket reads it
MOST_AGENT_CHARACTERS = 256
#: Seconds for which a RolloutWorker waits for a line. A file system that is shared shows what another node has written
#: and synced with a delay: NFS asks for the size of a file again after up to 60 s.
LINE_WAIT_S = 90.0
_FIRST_DELAY_S, _LAST_DELAY_S = 0.05, 2.0  # between looks at the file; doubles


class SubmittedRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line. ``row``: keys of a line of a data file, or number of a train prompt. ``agent`` "": the trial's."""

    row: msgspec.Raw
    agent: str = ""

    def train_index(self) -> int | None:
        """Return the number of the train prompt that the line names; None: it has a row of its own."""
        return None if bytes(self.row).lstrip().startswith(b"{") else msgspec.json.decode(self.row, type=int)


# ---- reading: by number, while the file grows


class SubmittedLines:
    """Random access to the lines. A look reads only what the file has gained. It takes 8 bytes of memory per line."""

    def __init__(self, path: Path, wait_s: float = LINE_WAIT_S) -> None:
        self.path = path
        self._wait_s = wait_s
        self._offsets = array("q")  # of each whole line
        self._end = 0  # of the last whole line
        self._lock = threading.Lock()  # a look may be in a thread

    async def arrival(self, number: int) -> None:
        """Wait until line ``number``, from 0, can be read. Raises DataError if it does not appear in time."""
        if number < len(self._offsets):
            return
        clock, delay = asyncio.get_running_loop().time, _FIRST_DELAY_S
        deadline = clock() + self._wait_s
        while not await asyncio.to_thread(self._look, number):
            if clock() >= deadline:
                problem = "do all machines of the trial share its folder?"
                raise self._missing(number, f" after a wait of {self._wait_s:g} s: {problem}")
            await asyncio.sleep(delay)  # no event says that another machine sees the line
            delay = min(2 * delay, _LAST_DELAY_S)

    def read(self, number: int) -> SubmittedRow:
        """Read line ``number``, from 0. Raises DataError."""
        if not self._look(number):
            raise self._missing(number, "")
        try:
            with self.path.open("rb") as file:
                file.seek(self._offsets[number])
                return msgspec.json.decode(file.readline(), type=SubmittedRow)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror or error}") from None
        except MALFORMED as error:
            raise DataError(f"{self.where(number)}: {error}") from None

    def where(self, number: int) -> str:
        """Return file and line."""
        return f"{self.path}:{number + 1}"

    def _look(self, number: int) -> bool:
        """Return True if line ``number`` is there. Lines that are not whole yet do not count."""
        with self._lock:
            if number >= len(self._offsets):
                try:
                    with self.path.open("rb") as file:  # opened anew: then NFS asks for the size
                        file.seek(self._end)
                        for line in file:
                            if not line.endswith(b"\n"):
                                break
                            self._offsets.append(self._end)
                            self._end += len(line)
                except FileNotFoundError:
                    return False
                except OSError as error:
                    raise DataError(f"{self.path}: cannot be read: {error.strerror or error}") from None
            return number < len(self._offsets)

    def _missing(self, number: int, waited: str) -> DataError:
        return DataError(f"{self.path}: line {number + 1} not found{waited}; the file has {len(self._offsets)} lines")


# ---- writing: one process, the MasterWorker


class SubmittedWriter:
    """The one writer of the file. Opening cuts off a torn last line. Its calls block: make them in a thread."""

    def __init__(self, path: Path, data: DataConfig, size: int) -> None:
        """``size``: prompts of the train split. Raises DataError."""
        self.path = path
        self._data = data
        self._size = size
        self._lines = self._end = 0
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            fsync_directory(path.parent)
            self._repair()
        except OSError as error:
            raise DataError(f"{path}: cannot be opened: {error.strerror or error}") from None

    def append(self, rows: Sequence[tuple[int | Mapping[str, Any], str]]) -> list[int]:
        """Return the prompt number of each (row, agent): for the ledger, once the lines are on the disk.

        A row is the number of a train prompt, or the keys of a new one in the layout ``data.layout``. ``agent``:
        built-in name or ``package.module:attribute``; "": ``rollout.agent``. A train prompt without an agent needs no
        line. Raises DataError, and then has submitted nothing: row 3 is the fourth of ``rows``.
        """
        lines: list[bytes] = []
        numbers: list[int] = []
        for place, (row, agent) in enumerate(rows):
            where = f"row {place}"
            if problem := _agent_problem(agent):
                raise DataError(f"{where}: {problem}")
            line = self._line(row, agent, where)
            numbers.append(row if line is None and isinstance(row, int) else self._size + self._lines + len(lines))
            lines += [] if line is None else [line]
        if lines:
            self._write(b"".join(lines), len(lines))
        return numbers

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, row: int | Mapping[str, Any], agent: str, where: str) -> bytes | None:
        """Return the line of a row; None if it needs none. Raises DataError."""
        if isinstance(row, int) and not isinstance(row, bool):
            if not 0 <= row < self._size:
                raise DataError(f"{where}: prompt {row} not found: the train split has {self._size}")
            body = msgspec.json.encode(row)
            if not agent:
                return None
        elif isinstance(row, Mapping):
            values = dict(row)
            checked, problem = read_row(layout_of(self._data.layout, self._data.layout_args, values, where), values)
            if checked is None:
                raise DataError(f"{where}: {problem}")
            try:
                body = msgspec.json.encode(checked.line())
            except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
                raise DataError(f"{where}: cannot be written as JSON: {error}") from None
        else:
            problem = f"is {type(row).__name__}: it must be the number of a train prompt, or a dict"
            raise DataError(f"{where} {problem}")
        line = msgspec.json.encode(SubmittedRow(msgspec.Raw(body), agent)) + b"\n"
        if len(line) > MOST_LINE_BYTES:
            raise DataError(f"{where}: has {len(line):,} bytes as JSON: {MOST_LINE_BYTES:,} are the most")
        return line

    def _write(self, data: bytes, lines: int) -> None:
        if (size := os.fstat(self._fd).st_size) != self._end:
            raise DataError(f"{self.path}: has {size} bytes instead of {self._end}: another process has written to it")
        try:
            written = os.write(self._fd, data)
            os.fsync(self._fd)
            problem = f"wrote {written} of {len(data)} bytes: disk full?" if written != len(data) else ""
        except OSError as error:
            problem = f"cannot write {len(data)} bytes: {error.strerror or error}"
        if problem:
            with contextlib.suppress(OSError):
                self._repair()  # whole lines stay: readers may have seen them
            raise DataError(f"{self.path}: {problem}")
        self._lines, self._end = self._lines + lines, self._end + len(data)

    def _repair(self) -> None:
        """Count the whole lines, and cut off what follows them. Raises OSError."""
        self._lines = self._end = 0
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            for line in file:
                if line.endswith(b"\n"):
                    self._lines, self._end = self._lines + 1, self._end + len(line)
        if torn := os.fstat(self._fd).st_size - self._end:
            log.warning("%s: cut a torn line of %d bytes after %d lines", self.path, torn, self._lines)
            os.ftruncate(self._fd, self._end)


def _agent_problem(agent: str) -> str:
    if not isinstance(agent, str):
        return f"agent is {type(agent).__name__}: it must be a name, or empty"
    if not agent or agent in AGENT.builtin:
        return ""
    if len(agent) > MOST_AGENT_CHARACTERS:
        return f"agent has {len(agent)} characters: {MOST_AGENT_CHARACTERS} are the most"
    module, _, attribute = agent.partition(":")
    if module and attribute:
        return ""
    return f"agent {agent!r} not found: use one of {', '.join(sorted(AGENT.builtin))}, or package.module:name"
