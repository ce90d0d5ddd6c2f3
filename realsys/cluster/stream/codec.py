"""Encoding and decoding of groups and messages.

A group is two frames: a msgpack header, and its arrays as raw little-endian memory:

    [header, with loss masks, versions and routes as runs][tokens of all rows | logprobs of all rows]

A teacher's tokens follow those of the rows, and its log-probs follow theirs.

Loss mask and versions seldom change within a row, so runs encode in a few bytes what would be half of the payload. The
arrays share one frame, although joining them copies: one frame per array costs libzmq and the kernel more than the
copy, at any size (twice the CPU time for a group of 8 x 32k tokens).

``decode_group`` trusts nothing: for any bytes, it returns a group in which every length, type and bound holds, or
raises DecodeError. The arrays it returns are read-only views of one frame, which lives as long as any of them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import zmq

from realsys.errors import DecodeError, StreamError
from realsys.types import (
    F32,
    I32,
    LOWEST_TEMPERATURE,
    Episode,
    FinishReason,
    Group,
    Mask,
    Row,
    Ticket,
    constant,
    is_temperature,
)

Buffer = bytes | bytearray | memoryview | zmq.Frame
T = TypeVar("T")

INT = np.dtype("<i4")
FLOAT = np.dtype("<f4")
BOOL = np.dtype(np.bool_)
ITEM = 4  # bytes of one int32 or float32
CHUNK = 1 << 15  # elements checked at a time: the second pass over them finds them in the CPU cache

#: frames up to this many bytes are cheaper to copy than to share with libzmq
COPY_LIMIT = 256 * 1024
#: bounds for the decoder: without them a small header could claim arrays that exhaust the memory
MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_TOKENS = 1 << 26  # per sequence
MAX_EPISODES = 1 << 16
MAX_ROWS = 1 << 16  # per episode
#: a log-prob is at most 0; engines that compute in low precision overshoot by rounding
LOGPROB_SLACK = 1e-3

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Version = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Run = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
VersionRun = Annotated[tuple[Version, ...], msgspec.Meta(min_length=2, max_length=3)]
Index = Annotated[int, msgspec.Meta(ge=0, le=MAX_EPISODES)]
Name = Annotated[str, msgspec.Meta(max_length=2048)]
#: their order is the wire format: append only
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")


class PlainRowHeader(msgspec.Struct, array_like=True, frozen=True):
    """A RowHeader as it is sent if all tokens have the temperature of the trial, and no teacher was asked."""

    mask: Annotated[list[Run], msgspec.Meta(min_length=1)]
    finish: Annotated[int, msgspec.Meta(ge=0, lt=len(FINISH_REASONS))]
    versions: list[VersionRun]
    route: list[tuple[Index, Run]]
    rewards: list[tuple[Count, float]]


class RowHeader(PlainRowHeader, array_like=True, frozen=True):
    """One row of T tokens, L of them in the loss. Both lengths follow from ``mask``.

    mask          lengths of the runs of loss_mask, False and True in turn, False first: T is the sum of all
                  runs, L the sum of every second one
    finish        index into FINISH_REASONS
    versions      (version, tokens) runs over the L tokens; (version, tokens, version of the oldest keys) if the tokens
                  attended to keys of an older version
    route         (index into the group's servers, tokens) runs; empty if the servers are not known
    rewards       (position, reward) of single tokens
    temperatures  (temperature, tokens) runs over the L tokens; 0: that of the trial; empty: all have it
    top_k         tokens of a teacher for each of the L tokens; 0: no teacher was asked
    """

    temperatures: list[tuple[float, Run]] = []
    top_k: Count = 0

    @property
    def length(self) -> int:
        return sum(self.mask)

    @property
    def loss_tokens(self) -> int:
        return sum(self.mask[1::2])


class EpisodeHeader(msgspec.Struct, array_like=True, frozen=True):
    """One episode."""

    rows: Annotated[list[RowHeader], msgspec.Meta(min_length=1, max_length=MAX_ROWS)]
    reward: float
    correct: bool | None
    metrics: dict[Name, float]


class GroupHeader(msgspec.Struct, array_like=True, frozen=True, tag="g2"):
    """First frame of a group. ``servers`` holds the names that the routes index."""

    ticket: Ticket
    worker: str
    started: float
    finished: float
    extra: dict[Name, float]
    errors: list[Name]
    servers: list[Name]
    episodes: Annotated[list[EpisodeHeader], msgspec.Meta(min_length=1, max_length=MAX_EPISODES)]


def encode_message(message: msgspec.Struct) -> bytes:
    """Encode a Struct as msgpack."""
    return msgspec.msgpack.encode(message)


def decode_message(data: Buffer, kind: type[T]) -> T:
    """Decode ``data`` as a Struct of type ``kind``; raise DecodeError if it is something else."""
    key: Any = kind
    decoder: msgspec.msgpack.Decoder[T] = decoder_of(key)
    return decode_with(decoder, data, kind.__name__)


def decode_with(decoder: msgspec.msgpack.Decoder[T], data: Buffer, what: str) -> T:
    """Decode ``data`` with a decoder that exists already, for example of a union of tagged Structs."""
    try:
        return decoder.decode(data.buffer if isinstance(data, zmq.Frame) else data)
    # ValueError covers msgspec's own errors and invalid UTF-8. RecursionError: arrays nested too deep,
    # which msgspec reports only once the stack is used up.
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as err:
        raise DecodeError(f"not a {what}: {' '.join(str(err).split())[:300]}") from err


class Slabs:
    """Reusable memory for payloads: fresh pages cost more than the copy into them.

    ``release`` a slab only when nothing reads it any more: libzmq sends from it without a copy.
    """

    def __init__(self, keep: int) -> None:
        self._free: list[bytearray] = []
        self._keep = keep

    def take(self, size: int) -> memoryview:
        """Return ``size`` bytes with undefined content."""
        for i in reversed(range(len(self._free))):  # the slab used last may still be in the CPU caches
            if len(self._free[i]) >= size:
                return memoryview(self._free.pop(i))[:size]
        return memoryview(bytearray(size))

    def release(self, taken: memoryview) -> None:
        """Keep the slab of ``taken`` for later use."""
        slab = taken.obj
        assert isinstance(slab, bytearray)
        self._free.append(slab)
        if len(self._free) > self._keep:  # the smallest goes: it serves the fewest groups
            self._free.remove(min(self._free, key=len))


def encode_group(group: Group, slabs: Slabs | None = None) -> list[bytes | memoryview]:
    """Encode ``group`` as a header and a payload frame. With ``slabs``, the payload uses one of them.

    Raises StreamError if an array has the wrong type or shape; the message names ticket, episode, row
    and array.
    """
    tokens: list[Any] = []
    logprobs: list[Any] = []
    teachers: list[tuple[I32, F32]] = []
    servers: dict[str, int] = {}
    episodes: list[EpisodeHeader] = []
    elements = 0
    for k, episode in enumerate(group.episodes):
        rows: list[Any] = []
        for r, row in enumerate(episode.rows):
            rows.append(_row_header(f"group {group.ticket.ticket_id}: episode {k}, row {r}", row, servers))
            tokens.append(np.ascontiguousarray(row.tokens))
            logprobs.append(np.ascontiguousarray(row.logprobs))
            elements += len(row.tokens) + len(row.logprobs)
            if row.teacher is not None:
                teachers.append(row.teacher)
                elements += 2 * row.teacher[0].size
        episodes.append(EpisodeHeader(rows, float(episode.reward), episode.correct, episode.metrics))
    header = GroupHeader(
        group.ticket,
        group.worker,
        group.started,
        group.finished,
        group.extra,
        group.errors,
        list(servers),
        episodes,
    )
    tops, top_logprobs = ([np.ravel(each[part]) for each in teachers] for part in (0, 1))
    arrays = [*tokens, *tops, *logprobs, *top_logprobs]
    return [msgspec.msgpack.encode(header), _join(arrays, ITEM * elements, slabs)]


def _row_header(what: str, row: Row, servers: dict[str, int]) -> PlainRowHeader:
    """Check the row's arrays and describe them; add the names of new servers to ``servers``."""
    length, loss_tokens = len(row.tokens), len(row.logprobs)
    for name, array, dtype, size in (
        ("tokens", row.tokens, INT, length),
        ("loss_mask", row.loss_mask, BOOL, length),
        ("logprobs", row.logprobs, FLOAT, loss_tokens),
        ("versions", row.versions, INT, loss_tokens),
        ("kv_versions", row.versions if row.kv_versions is None else row.kv_versions, INT, loss_tokens),
    ):
        if array.dtype != dtype or array.shape != (size,):
            shape = list(array.shape)
            raise StreamError(f"{what}: {name} is {array.dtype}{shape}, must be {dtype.name}[{size}]")
    top_k = 0 if row.teacher is None else row.teacher[0].shape[-1]
    for own, kind in zip(row.teacher or (), (INT, FLOAT), strict=False):
        if own.dtype != kind or own.shape != (loss_tokens, top_k):
            needed = f"{kind.name}[{loss_tokens}, {top_k}]"
            raise StreamError(f"{what}: teacher has {own.dtype}{list(own.shape)}, must be {needed}")
    # The decoder relies on it, too: the runs of a mask begin with False.
    if not length or row.loss_mask[0]:
        raise StreamError(f"{what}: a row must begin with a token outside the loss: nothing predicts the first one")
    mask = mask_runs(row.loss_mask)
    if sum(mask[1::2]) != loss_tokens:
        raise StreamError(f"{what}: loss_mask marks {sum(mask[1::2])} tokens, but there are {loss_tokens} logprobs")
    for position, _ in row.rewards:
        if not (0 <= position < length and row.loss_mask[position]):
            raise StreamError(f"{what}: a reward is at position {position}, which is not in the loss")
    route = [(servers.setdefault(server, len(servers)), count) for server, count in row.route]
    finish = FINISH_REASONS.index(row.finish_reason)
    versions, rewards = version_runs(row.versions, row.kv_versions), list(row.rewards)
    if not row.temperatures and row.teacher is None:
        return PlainRowHeader(mask, finish, versions, route, rewards)
    return RowHeader(mask, finish, versions, route, rewards, list(row.temperatures), top_k)


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


def decode_group(frames: Sequence[Buffer]) -> Group:
    """Decode the group in ``frames``; raise DecodeError on anything malformed."""
    if len(frames) != 2:
        raise DecodeError(f"a group of {len(frames)} frames: must be 2")
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise DecodeError(f"a group header of {len(frames[0])} bytes: must be at most {MAX_HEADER_BYTES}")
    header = decode_message(frames[0], GroupHeader)
    # The header before the payload: no array is made until its lengths are known to agree.
    _check_header(header)
    rows = [row for episode in header.episodes for row in episode.rows]
    n_tokens, n_loss = sum(row.length for row in rows), sum(row.loss_tokens for row in rows)
    n_top = sum(row.loss_tokens * row.top_k for row in rows)
    payload = _payload(frames[1], n_tokens + n_loss + 2 * n_top, header.ticket.ticket_id)
    tokens = payload[: n_tokens + n_top]
    logprobs: F32 = payload[n_tokens + n_top :].view(FLOAT)
    if tokens.min() < 0:
        raise DecodeError(f"group {header.ticket.ticket_id}: token {tokens.min()} < 0")
    for start in range(0, len(logprobs), CHUNK):
        chunk = logprobs[start : start + CHUNK]
        # min and max of anything with a NaN are NaN, so finite bounds show that every value is a number
        low, high = float(chunk.min()), float(chunk.max())
        if not (math.isfinite(low) and high <= LOGPROB_SLACK):
            raise DecodeError(
                f"group {header.ticket.ticket_id}: logprobs span [{low}, {high}]: must be finite and at most 0"
            )
    arrays = _Arrays(
        tokens,
        logprobs,
        expand_versions([run for row in rows for run in row.versions]),
        expand_masks([row.mask for row in rows], n_tokens),
        (tokens[n_tokens:], logprobs[n_loss:]),
    )
    episodes = [
        Episode(
            [arrays.next_row(row, header.servers) for row in episode.rows],
            episode.reward,
            episode.correct,
            episode.metrics,
        )
        for episode in header.episodes
    ]
    return Group(header.ticket, episodes, header.worker, header.started, header.finished, header.extra, header.errors)


class _Arrays:
    """The arrays of all rows of a group, one after the other, handed out row by row."""

    def __init__(self, tokens: I32, logprobs: F32, versions: I32, masks: Mask, teacher: tuple[I32, F32]) -> None:
        self._tokens = tokens
        self._logprobs = logprobs
        self._versions = versions
        self._masks = masks
        self._teacher = teacher
        self._next_token = 0
        self._next_loss_token = 0
        self._next_top = 0

    def next_row(self, header: RowHeader, servers: Sequence[str]) -> Row:
        """Return the next row; its arrays are views."""
        token_start = self._next_token
        loss_start = self._next_loss_token
        self._next_token += header.length
        self._next_loss_token += header.loss_tokens
        shape = header.loss_tokens, header.top_k
        top = slice(self._next_top, self._next_top + header.loss_tokens * header.top_k)
        self._next_top = top.stop
        teacher = self._teacher[0][top].reshape(shape), self._teacher[1][top].reshape(shape)
        return Row(
            tokens=self._tokens[token_start : self._next_token],
            loss_mask=self._masks[token_start : self._next_token],
            logprobs=self._logprobs[loss_start : self._next_loss_token],
            versions=self._versions[loss_start : self._next_loss_token],
            finish_reason=FINISH_REASONS[header.finish],
            route=tuple([(servers[server], count) for server, count in header.route]),
            rewards=tuple(header.rewards),
            kv_versions=expand_kv_versions(header.versions),
            temperatures=tuple(header.temperatures),
            teacher=teacher if header.top_k else None,
        )


def _check_header(header: GroupHeader) -> None:
    ticket = header.ticket
    if not ticket.ticket_id or ticket.attempt < 0 or ticket.prompt_index < 0:
        raise DecodeError(f"group with ticket_id={ticket.ticket_id!r} attempt={ticket.attempt}")
    numbers = [header.started, header.finished, *header.extra.values()]
    if not all(map(math.isfinite, numbers)):
        raise DecodeError(f"group {ticket.ticket_id}: started, finished or extra is not finite")
    for k, episode in enumerate(header.episodes):
        what = f"group {ticket.ticket_id}: episode {k}"
        if not math.isfinite(episode.reward):
            raise DecodeError(f"{what}: reward={episode.reward} is not finite")
        if not all(map(math.isfinite, episode.metrics.values())):
            raise DecodeError(f"{what}: a metric is not finite")
        for r, row in enumerate(episode.rows):
            try:
                _check_row(row, len(header.servers))
            except DecodeError as err:
                raise DecodeError(f"{what}, row {r}: {err}") from None


def _check_row(row: RowHeader, servers: int) -> None:
    # Plain loops, and none over what most rows do not have: this runs for every row, and takes longer than its arrays.
    loss_tokens, counted = row.loss_tokens, 0
    for run in row.versions:
        if not 1 <= run[1] <= MAX_TOKENS:
            raise DecodeError(f"a run of versions must have 1 to {MAX_TOKENS} tokens")
        if len(run) > 2 and run[2] > run[0]:
            raise DecodeError("a token has keys of a later version than its own")
        counted += run[1]
    if counted != loss_tokens:
        raise DecodeError(f"{counted} tokens have a version, but {loss_tokens} are in the loss")
    if row.route:
        routed = sum(count for _, count in row.route)
        if routed != loss_tokens:
            raise DecodeError(f"{routed} tokens have a server, but {loss_tokens} are in the loss")
        if max(row.route)[0] >= servers:
            raise DecodeError(f"a route names a server beyond the {servers} of the group")
    if row.temperatures:
        if not all(is_temperature(temperature) for temperature, _ in row.temperatures):
            raise DecodeError(f"a temperature must be 0 or at least {LOWEST_TEMPERATURE:g}")
        warmed = sum(count for _, count in row.temperatures)
        if warmed != loss_tokens:
            raise DecodeError(f"{warmed} tokens have a temperature, but {loss_tokens} are in the loss")
    # finite rewards at rising positions in the loss
    if not row.rewards:
        return
    ends = np.cumsum(row.mask)
    positions = np.array([position for position, _ in row.rewards], np.int64)
    inside = np.searchsorted(ends, positions, side="right")  # run number; odd runs are in the loss
    if (np.diff(positions) <= 0).any() or positions[-1] >= ends[-1] or (inside % 2 == 0).any():
        raise DecodeError("rewards must be at rising positions of tokens in the loss")
    if not all(math.isfinite(reward) for _, reward in row.rewards):
        raise DecodeError("a reward of a token is not finite")


def _payload(frame: Buffer, size: int, what: str) -> I32:
    """View ``frame`` as a read-only array of exactly ``size`` elements."""
    if len(frame) != ITEM * size:
        raise DecodeError(f"group {what}: {len(frame)} bytes of arrays, but the header claims {ITEM * size}")
    array = np.frombuffer(frame.buffer if isinstance(frame, zmq.Frame) else frame, dtype=INT)
    # libzmq hands out small messages at any offset of its receive buffer. Unaligned arrays are slow,
    # and code that casts their pointer may fault.
    if not array.flags.aligned:
        array = array.copy()
    array.flags.writeable = False
    return array


# ---- runs of equal values in the arrays of a row, and the arrays again. Pure
#
# Loss mask and versions seldom change within a row. A mask is the lengths of its runs, False and True in turn, False
# first. Versions are runs (version, tokens), or (version, tokens, version of the oldest keys) where they differ.

VersionRuns = Sequence[tuple[int, ...]]


def mask_runs(mask: Mask) -> list[int]:
    """Return the lengths of the runs of a mask that begins with False."""
    first = int(mask.argmax())
    if first + np.count_nonzero(mask) == len(mask):  # prompt and one completion: ten times as fast
        return [first, len(mask) - first]
    ends = np.flatnonzero(mask[1:] != mask[:-1]) + 1
    return np.diff(ends, prepend=0, append=len(mask)).tolist()  # type: ignore[no-any-return]


def version_runs(versions: I32, kv_versions: I32 | None = None) -> list[tuple[int, ...]]:
    """Return the runs of ``versions``, or of both arrays together."""
    if not len(versions):
        return []
    if constant(versions) and kv_versions is None:
        return [(int(versions[0]), len(versions))]
    changes = versions[1:] != versions[:-1]
    if kv_versions is not None:
        changes |= kv_versions[1:] != kv_versions[:-1]
    starts = [0, *(np.flatnonzero(changes) + 1).tolist()]
    ends = [*starts[1:], len(versions)]
    runs = [(int(versions[start]), end - start) for start, end in zip(starts, ends, strict=True)]
    oldest = versions if kv_versions is None else kv_versions
    return [
        run if oldest[start] == run[0] else (*run, int(oldest[start])) for start, run in zip(starts, runs, strict=True)
    ]


def expand_versions(runs: VersionRuns) -> I32:
    """Return one version per token, read-only.

    If all versions are equal, the array is one number in memory: fresh pages for a number per token
    would cost more than the rest of decoding a large group.
    """
    size = sum(run[1] for run in runs)
    if len({run[0] for run in runs}) == 1:
        return np.broadcast_to(np.array(runs[0][0], dtype=INT), (size,))
    versions: I32 = np.empty(size, dtype=INT)
    start = 0
    for version, count, *_ in runs:
        versions[start : start + count] = version
        start += count
    versions.flags.writeable = False
    return versions


def expand_kv_versions(runs: VersionRuns) -> I32 | None:
    """Return the version of the oldest keys of each token, read-only; None if all are those of the tokens."""
    if sum(map(len, runs)) == 2 * len(runs):
        return None
    kv_versions = np.array([run[2] if len(run) > 2 else run[0] for run in runs], INT).repeat([run[1] for run in runs])
    kv_versions.flags.writeable = False
    return kv_versions


def expand_masks(rows: Sequence[Sequence[int]], size: int) -> Mask:
    """Return the loss masks of all rows, concatenated, read-only."""
    masks = np.zeros(size, np.bool_)
    start = 0
    for runs in rows:
        for number, count in enumerate(runs):
            if number % 2:
                masks[start : start + count] = True
            start += count
    masks.flags.writeable = False
    return masks


# ---- decoders of msgpack messages, made once for each type


_MAKING_DECODER = threading.Lock()


@lru_cache(maxsize=256)
def decoder_of(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of ``kind``. Thread-safe."""
    # msgspec 0.22 describes each Struct once, and lets a second thread use the description while the first
    # still fills it in: the process ends with a segmentation fault.
    with _MAKING_DECODER:
        return msgspec.msgpack.Decoder(kind)


# ---- headers of the two streams: the first frame of every message
#
# The payload follows it.
#
# Push-pull (Pusher -> Puller, then back)
#
#     Push        + the frames of a group     ->
#                                             <-  PushAck | PushNack
#
# Request-reply (WorkerEndpoint <-> MasterStream)
#
#     Hello                                   ->      after each (re)connection
#                                             <-  Welcome | Refused
#                                             <-  Request + payload
#     Reply + payload | Notice + payload      ->
#                                             <-  Ack
#
# Both directions of request-reply are numbered per worker incarnation. The sender keeps a message until it is
# acknowledged: a Request by its Reply, a Reply or Notice by the next Request or by an Ack. After a reconnection it
# resends those above the high-water mark that Hello or Welcome names. The receiver drops a number that it has already.
# A connection that is cut therefore loses no message and doubles none.
#
# The tags end in a version. Change it with the fields: a peer of another version must fail to decode the header.


Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
#: worker index; wide enough for the hash of a name (master_stream.MAX_PEERS bounds their number)
WorkerIndex = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Label = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Push(msgspec.Struct, array_like=True, frozen=True, tag="push/1"):
    """Header of a pushed group.

    ``floor`` is the lowest sequence that the sender may still send or resend to this receiver.
    """

    identity: Label
    sequence: Number
    floor: Number


class PushAck(msgspec.Struct, array_like=True, frozen=True, tag="push-ack/1"):
    """Acknowledgement that these groups are stored."""

    sequences: list[Number]


class PushNack(msgspec.Struct, array_like=True, frozen=True, tag="push-nack/1"):
    """Refusal of a group, or a late copy of a push that its sender has cancelled. Resending does not help."""

    sequence: Number
    reason: str


class Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello/1"):
    """Opening of a connection by a worker.

    ``last_request`` is the number of the newest Request this incarnation has received (0: none).
    """

    index: WorkerIndex
    incarnation: Label
    last_request: Number


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag="welcome/1"):
    """Reply to a Hello.

    ``last_message`` is the number of the newest Reply or Notice the master has received from this incarnation
    (0: none).
    """

    last_message: Number


class Refused(msgspec.Struct, array_like=True, frozen=True, tag="refused/1"):
    """Reply to a Hello of a retired incarnation, or to one whose successor has said hello."""

    reason: str


class RequestHeader(msgspec.Struct, array_like=True, frozen=True, tag="request/2"):
    """Header of a call of the master. It acknowledges as an Ack does, every Reply and Notice up to ``acknowledged``."""

    number: Number
    handler: Label
    acknowledged: Number


class FailureReply(msgspec.Struct, array_like=True, frozen=True):
    """Exception that a handler raised."""

    type: str
    message: str
    traceback: str


class ReplyHeader(msgspec.Struct, array_like=True, frozen=True, tag="reply/1"):
    """Header of the reply to Request ``request``."""

    number: Number
    request: Number
    failure: FailureReply | None


class NoticeHeader(msgspec.Struct, array_like=True, frozen=True, tag="notice/1"):
    """Header of a message that is no reply."""

    number: Number
    handler: Label


class Ack(msgspec.Struct, array_like=True, frozen=True, tag="ack/1"):
    """Acknowledgement that the master has every Reply and Notice up to ``number``."""

    number: Number


TO_PUSHER: msgspec.msgpack.Decoder[PushAck | PushNack] = msgspec.msgpack.Decoder(PushAck | PushNack)
TO_PULLER: msgspec.msgpack.Decoder[Push] = msgspec.msgpack.Decoder(Push)
TO_MASTER: msgspec.msgpack.Decoder[Hello | ReplyHeader | NoticeHeader] = msgspec.msgpack.Decoder(
    Hello | ReplyHeader | NoticeHeader
)
TO_WORKER: msgspec.msgpack.Decoder[Welcome | Refused | RequestHeader | Ack] = msgspec.msgpack.Decoder(
    Welcome | Refused | RequestHeader | Ack
)
