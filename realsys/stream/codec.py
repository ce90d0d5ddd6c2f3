"""Trajectories and messages as bytes.

A group is a msgpack header followed by its arrays as raw little-endian memory:

    large   [header][tokens 0][logprobs 0][versions 0][tokens 1] ...       one frame per array, nothing copied
    packed  [header][all tokens | all logprobs | all versions]             one frame, when the arrays are small

``decode_group`` trusts nothing: whatever bytes come in, it returns a group in which every length, type and bound holds,
or raises DecodeError. The arrays it returns are read-only views of the frames.
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
ITEM = 4  # bytes of an element of any of the three arrays

#: groups up to this many bytes of arrays are packed: below it a frame costs more than copying its bytes
PACK_LIMIT = 256 * 1024
MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_TOKENS = 1 << 26  # of one sequence
MAX_ANSWERS = 1 << 16
#: a log-prob is at most 0; engines that compute in low precision overshoot by rounding
LOGPROB_SLACK = 1e-3

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class AnswerHeader(msgspec.Struct, array_like=True, frozen=True):
    """One trajectory: its array lengths follow from ``length`` and ``prompt_len``."""

    length: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    prompt_len: Count
    reward: float
    finish_reason: FinishReason


class GroupHeader(msgspec.Struct, array_like=True, frozen=True, tag="group/1"):
    """First frame of a group."""

    ticket: Ticket
    worker: str
    started: float
    finished: float
    extra: dict[str, float]
    packed: bool
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


def encode_group(group: TrajectoryGroup) -> list[bytes | memoryview]:
    """Frames of ``group``. Large arrays are not copied: they must not change until the group is acknowledged.

    StreamError if an array has the wrong type or shape (the message names ticket, trajectory and array).
    """
    columns: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    answers: list[AnswerHeader] = []
    total = 0
    for k, trajectory in enumerate(group.trajectories):
        length, answer_len = len(trajectory.tokens), len(trajectory.logprobs)
        if trajectory.prompt_len + answer_len != length:
            raise StreamError(
                f"group {group.ticket.ticket_id}: trajectory {k}: {length} tokens are not "
                f"prompt_len={trajectory.prompt_len} + {answer_len} logprobs"
            )
        arrays = (trajectory.tokens, trajectory.logprobs, trajectory.versions)
        sizes = (length, answer_len, answer_len)
        for column, (name, dtype), array, size in zip(columns, _COLUMNS, arrays, sizes, strict=True):
            if array.dtype != dtype or array.shape != (size,):
                raise StreamError(
                    f"group {group.ticket.ticket_id}: trajectory {k}: {name} is {array.dtype}{list(array.shape)}, "
                    f"needs {dtype.name}[{size}]"
                )
            column.append(array if array.flags.c_contiguous else np.ascontiguousarray(array))
        answers.append(AnswerHeader(length, trajectory.prompt_len, float(trajectory.reward), trajectory.finish_reason))
        total += ITEM * (length + 2 * answer_len)
    packed = total <= PACK_LIMIT
    header = GroupHeader(group.ticket, group.worker, group.started, group.finished, group.extra, packed, answers)
    frames: list[bytes | memoryview] = [msgspec.msgpack.encode(header)]
    if packed:
        frames.append(b"".join([*columns[0], *columns[1], *columns[2]]))
    else:
        frames.extend(memoryview(array) for row in zip(*columns, strict=True) for array in row)
    return frames


def decode_group(frames: Sequence[Buffer]) -> TrajectoryGroup:
    """The group in ``frames``; DecodeError on anything malformed."""
    if not frames:
        raise DecodeError("a group without frames")
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise DecodeError(f"group header of {len(frames[0])} bytes, at most {MAX_HEADER_BYTES}")
    header = decode_message(frames[0], GroupHeader)
    _check_header(header)
    arrays = _packed_arrays(header, frames) if header.packed else _raw_arrays(header, frames)
    trajectories = [
        Trajectory(tokens, logprobs, versions, answer.prompt_len, answer.reward, answer.finish_reason)
        for answer, (tokens, logprobs, versions) in zip(header.answers, arrays, strict=True)
    ]
    return TrajectoryGroup(header.ticket, trajectories, header.worker, header.started, header.finished, header.extra)


_COLUMNS = (("tokens", INT), ("logprobs", FLOAT), ("versions", INT))
Arrays = list[tuple[I32, F32, I32]]


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
        if not math.isfinite(answer.reward):
            raise DecodeError(f"group {ticket.ticket_id}: trajectory {k}: reward={answer.reward} is not finite")


def _packed_arrays(header: GroupHeader, frames: Sequence[Buffer]) -> Arrays:
    ticket_id = header.ticket.ticket_id
    if len(frames) != 2:
        raise DecodeError(f"group {ticket_id}: {len(frames)} frames, packed needs 2")
    n_tokens = sum(answer.length for answer in header.answers)
    n_answer = n_tokens - sum(answer.prompt_len for answer in header.answers)
    payload: I32 = _view(frames[1], INT, n_tokens + 2 * n_answer, f"{ticket_id}: arrays")
    tokens, versions = payload[:n_tokens], payload[n_tokens + n_answer :]
    logprobs: F32 = payload[n_tokens : n_tokens + n_answer].view(FLOAT)
    _check_values(ticket_id, tokens, logprobs, versions)
    arrays: Arrays = []
    t = a = 0
    for answer in header.answers:
        t_end, a_end = t + answer.length, a + answer.length - answer.prompt_len
        arrays.append((tokens[t:t_end], logprobs[a:a_end], versions[a:a_end]))
        t, a = t_end, a_end
    return arrays


def _raw_arrays(header: GroupHeader, frames: Sequence[Buffer]) -> Arrays:
    ticket_id = header.ticket.ticket_id
    if len(frames) != 1 + 3 * len(header.answers):
        raise DecodeError(f"group {ticket_id}: {len(frames)} frames, {len(header.answers)} answers need 3 each and 1")
    arrays: Arrays = []
    for k, answer in enumerate(header.answers):
        what, answer_len = f"{ticket_id}: trajectory {k}", answer.length - answer.prompt_len
        tokens: I32 = _view(frames[3 * k + 1], INT, answer.length, what)
        logprobs: F32 = _view(frames[3 * k + 2], FLOAT, answer_len, what)
        versions: I32 = _view(frames[3 * k + 3], INT, answer_len, what)
        _check_values(what, tokens, logprobs, versions)
        arrays.append((tokens, logprobs, versions))
    return arrays


def _check_values(what: str, tokens: I32, logprobs: F32, versions: I32) -> None:
    if tokens.min() < 0:
        raise DecodeError(f"group {what}: token {tokens.min()} < 0")
    if not len(logprobs):
        return
    # NaN wins both min and max, so the bounds also say that every value between them is a number
    low, high = float(logprobs.min()), float(logprobs.max())
    if not (math.isfinite(low) and high <= LOGPROB_SLACK):
        raise DecodeError(f"group {what}: logprobs span [{low}, {high}], must be finite and at most 0")
    if versions.min() < 0:
        raise DecodeError(f"group {what}: version {versions.min()} < 0")


def _view(frame: Buffer, dtype: np.dtype[Any], size: int, what: str) -> Any:
    """``frame`` as a read-only array of exactly ``size`` elements."""
    if len(frame) != ITEM * size:
        raise DecodeError(f"group {what}: a frame of {len(frame)} bytes, header says {ITEM * size}")
    array = np.frombuffer(frame.buffer if isinstance(frame, zmq.Frame) else frame, dtype=dtype)
    if not array.flags.aligned:  # ZMQ hands out small messages at any offset of its receive buffer
        array = array.copy()
    array.flags.writeable = False
    return array


@lru_cache(maxsize=256)
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)
