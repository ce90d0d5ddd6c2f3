"""Trajectories and messages as bytes.

A group is two frames: a msgpack header, and its arrays as raw little-endian memory:

    [header, with the versions as runs][tokens of all answers | logprobs of all answers]

Versions change only where new weights were loaded, so (version, count) runs say in a few bytes what would be a third of
the payload. The arrays share one frame, though joining them copies: a frame per array costs libzmq and the kernel more
than the copy, at any size (twice the CPU time for a group of 8 x 32k tokens).

``decode_group`` trusts nothing: whatever bytes come in, it returns a group in which every length, type and bound holds,
or raises DecodeError. The arrays it returns are read-only views of one frame, which lives as long as any of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import zmq

from realsys.errors import DecodeError, StreamError
from realsys.types import F32, I32, FinishReason, Ticket, Trajectory, TrajectoryGroup

Buffer = bytes | bytearray | memoryview | zmq.Frame
T = TypeVar("T")

INT = np.dtype("<i4")
FLOAT = np.dtype("<f4")
ITEM = 4  # bytes of an element of either
CHUNK = 1 << 15  # elements checked at a time: several passes over them find them in the cache

#: frames up to this many bytes are cheaper to copy than to share with libzmq
COPY_LIMIT = 256 * 1024
MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_TOKENS = 1 << 26  # of one sequence
MAX_ANSWERS = 1 << 16
#: a log-prob is at most 0; engines that compute in low precision overshoot by rounding
LOGPROB_SLACK = 1e-3

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


Version = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Run = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]


class AnswerHeader(msgspec.Struct, array_like=True, frozen=True):
    """One trajectory: its array lengths follow from ``length`` and ``prompt_len``; ``runs`` of (version, tokens).

    ``route``: the same of servers; empty where it is not known.
    """

    length: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    prompt_len: Count
    reward: float
    finish_reason: FinishReason
    runs: list[tuple[Version, Run]]
    route: tuple[tuple[Annotated[str, msgspec.Meta(max_length=256)], Run], ...] = ()


class GroupHeader(msgspec.Struct, array_like=True, frozen=True, tag="group/1"):
    """First frame of a group."""

    ticket: Ticket
    worker: str
    started: float
    finished: float
    extra: dict[str, float]
    answers: Annotated[list[AnswerHeader], msgspec.Meta(min_length=1, max_length=MAX_ANSWERS)]


def encode_message(message: msgspec.Struct) -> bytes:
    """A Struct as msgpack."""
    return msgspec.msgpack.encode(message)


def decode_message(data: Buffer, kind: type[T]) -> T:
    """The Struct of type ``kind`` in ``data``; DecodeError if it is not there."""
    key: Any = kind
    decoder: msgspec.msgpack.Decoder[T] = _decoder(key)
    return decode_with(decoder, data, kind.__name__)


def decode_with(decoder: msgspec.msgpack.Decoder[T], data: Buffer, what: str) -> T:
    """Like ``decode_message``, for a decoder made beforehand (of a union of tagged Structs, say)."""
    try:
        return decoder.decode(data.buffer if isinstance(data, zmq.Frame) else data)
    # ValueError covers msgspec's own errors and invalid UTF-8; RecursionError a bomb of nested arrays
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as err:
        raise DecodeError(f"not a {what}: {' '.join(str(err).split())[:300]}") from err


class Slabs:
    """Memory for payloads, used again and again: fresh pages cost more than the copy into them.

    ``give_back`` a slab only when nothing reads it any more.
    """

    def __init__(self, keep: int) -> None:
        self._free: list[bytearray] = []
        self._keep = keep

    def take(self, size: int) -> memoryview:
        """``size`` bytes of whatever content."""
        for i in reversed(range(len(self._free))):  # the one used last: it may still be in the caches
            if len(self._free[i]) >= size:
                return memoryview(self._free.pop(i))[:size]
        return memoryview(bytearray(size))

    def give_back(self, taken: memoryview) -> None:
        slab = taken.obj
        assert isinstance(slab, bytearray)
        self._free.append(slab)
        if len(self._free) > self._keep:
            self._free.remove(min(self._free, key=len))


def encode_group(group: TrajectoryGroup, slabs: Slabs | None = None) -> list[bytes | memoryview]:
    """Header and payload frame of ``group``; the payload lies in one of ``slabs`` if given.

    StreamError if an array has the wrong type or shape (the message names ticket, trajectory and array).
    """
    tokens: list[Any] = []
    logprobs: list[Any] = []
    answers: list[AnswerHeader] = []
    elements = 0
    for k, trajectory in enumerate(group.trajectories):
        _check_shapes(f"group {group.ticket.ticket_id}: trajectory {k}", trajectory)
        tokens.append(np.ascontiguousarray(trajectory.tokens))
        logprobs.append(np.ascontiguousarray(trajectory.logprobs))
        length = len(trajectory.tokens)
        runs = _runs(trajectory.versions)
        reward, reason = float(trajectory.reward), trajectory.finish_reason
        answers.append(AnswerHeader(length, trajectory.prompt_len, reward, reason, runs, trajectory.route))
        elements += length + trajectory.answer_len
    header = GroupHeader(group.ticket, group.worker, group.started, group.finished, group.extra, answers)
    return [msgspec.msgpack.encode(header), _join([*tokens, *logprobs], ITEM * elements, slabs)]


def _check_shapes(what: str, trajectory: Trajectory) -> None:
    length, answer_len = len(trajectory.tokens), len(trajectory.logprobs)
    if trajectory.prompt_len + answer_len != length:
        raise StreamError(f"{what}: {length} tokens are not prompt_len={trajectory.prompt_len} + {answer_len} logprobs")
    for name, array, dtype, size in (
        ("tokens", trajectory.tokens, INT, length),
        ("logprobs", trajectory.logprobs, FLOAT, answer_len),
        ("versions", trajectory.versions, INT, answer_len),
    ):
        if array.dtype != dtype or array.shape != (size,):
            shape = list(array.shape)
            raise StreamError(f"{what}: {name} is {array.dtype}{shape}, needs {dtype.name}[{size}]")


def _runs(versions: I32) -> list[tuple[int, int]]:
    if not len(versions):
        return []
    if (versions == versions[0]).all():
        return [(int(versions[0]), len(versions))]
    starts = [0, *(np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist()]
    ends = [*starts[1:], len(versions)]
    return [(int(versions[start]), end - start) for start, end in zip(starts, ends, strict=True)]


def _join(arrays: list[Any], size: int, slabs: Slabs | None) -> bytes | memoryview:
    if slabs is None:
        return b"".join(arrays)
    payload = slabs.take(size)
    start = 0
    for array in arrays:
        end = start + array.nbytes
        payload[start:end] = memoryview(array).cast("B")
        start = end
    return payload


def decode_group(frames: Sequence[Buffer]) -> TrajectoryGroup:
    """The group in ``frames``; DecodeError on anything malformed."""
    if len(frames) != 2:
        raise DecodeError(f"a group of {len(frames)} frames, needs 2")
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise DecodeError(f"group header of {len(frames[0])} bytes, at most {MAX_HEADER_BYTES}")
    header = decode_message(frames[0], GroupHeader)
    _check_header(header)
    n_tokens = sum(answer.length for answer in header.answers)
    n_answer = n_tokens - sum(answer.prompt_len for answer in header.answers)
    payload = _payload(frames[1], n_tokens + n_answer, header.ticket.ticket_id)
    tokens = payload[:n_tokens]
    logprobs: F32 = payload[n_tokens:].view(FLOAT)
    _check_values(header.ticket.ticket_id, tokens, logprobs)
    versions = _expand(header.answers)
    trajectories: list[Trajectory] = []
    t = a = 0
    for answer in header.answers:
        t_end, a_end = t + answer.length, a + answer.length - answer.prompt_len
        arrays = (tokens[t:t_end], logprobs[a:a_end], versions[a:a_end])
        trajectories.append(Trajectory(*arrays, answer.prompt_len, answer.reward, answer.finish_reason, answer.route))
        t, a = t_end, a_end
    return TrajectoryGroup(header.ticket, trajectories, header.worker, header.started, header.finished, header.extra)


def _check_header(header: GroupHeader) -> None:
    ticket = header.ticket
    if not ticket.ticket_id or ticket.attempt < 0 or ticket.prompt_index < 0:
        raise DecodeError(f"group with ticket_id={ticket.ticket_id!r} attempt={ticket.attempt}")
    numbers = [header.started, header.finished, *header.extra.values()]
    if not all(map(math.isfinite, numbers)):
        raise DecodeError(f"group {ticket.ticket_id}: started, finished or extra is not finite")
    for k, answer in enumerate(header.answers):
        if answer.prompt_len > answer.length:
            raise DecodeError(
                f"group {ticket.ticket_id}: trajectory {k}: prompt_len={answer.prompt_len} > {answer.length} tokens"
            )
        answer_len, counted = answer.length - answer.prompt_len, sum(count for _, count in answer.runs)
        if counted != answer_len:
            raise DecodeError(
                f"group {ticket.ticket_id}: trajectory {k}: versions of {counted} tokens, answer has {answer_len}"
            )
        routed = sum(count for _, count in answer.route)
        if answer.route and routed != answer_len:
            raise DecodeError(
                f"group {ticket.ticket_id}: trajectory {k}: servers of {routed} tokens, answer has {answer_len}"
            )
        if not math.isfinite(answer.reward):
            raise DecodeError(f"group {ticket.ticket_id}: trajectory {k}: reward={answer.reward} is not finite")


def _check_values(ticket_id: str, tokens: I32, logprobs: F32) -> None:
    if tokens.min() < 0:
        raise DecodeError(f"group {ticket_id}: token {tokens.min()} < 0")
    for start in range(0, len(logprobs), CHUNK):
        chunk = logprobs[start : start + CHUNK]
        # NaN wins both min and max, so the bounds also say that every value between them is a number
        low, high = float(chunk.min()), float(chunk.max())
        if not (math.isfinite(low) and high <= LOGPROB_SLACK):
            raise DecodeError(f"group {ticket_id}: logprobs span [{low}, {high}], must be finite and at most 0")


def _expand(answers: Sequence[AnswerHeader]) -> I32:
    """Versions of all answers, one after the other, read-only.

    Where no update came meanwhile they are one number in memory: fresh pages for one per token cost more than all else
    that is done to decode a large group.
    """
    runs = [run for answer in answers for run in answer.runs]
    size = sum(count for _, count in runs)
    if len({version for version, _ in runs}) == 1:
        return np.broadcast_to(np.array(runs[0][0], dtype=INT), (size,))
    versions: I32 = np.empty(size, dtype=INT)
    start = 0
    for version, count in runs:
        versions[start : start + count] = version
        start += count
    versions.flags.writeable = False
    return versions


def _payload(frame: Buffer, size: int, what: str) -> I32:
    """``frame`` as a read-only array of exactly ``size`` elements."""
    if len(frame) != ITEM * size:
        raise DecodeError(f"group {what}: {len(frame)} bytes of arrays, header says {ITEM * size}")
    array = np.frombuffer(frame.buffer if isinstance(frame, zmq.Frame) else frame, dtype=INT)
    if not array.flags.aligned:  # ZMQ hands out small messages at any offset of its receive buffer
        array = array.copy()
    array.flags.writeable = False
    return array


@lru_cache(maxsize=256)
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)
