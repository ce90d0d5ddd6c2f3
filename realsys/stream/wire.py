"""Headers of the two streams: the first frame of every message. What follows it is the payload.

Push-pull (Pusher -> Puller, then back)

    Push        + the frames of a group     ->
                                            <-  PushAck | PushNack

Request-reply (WorkerEndpoint <-> MasterStream)

    Hello                                   ->      after each (re)connection
                                            <-  Welcome | Refused
                                            <-  Request + payload
    Reply + payload | Notice + payload      ->
                                            <-  Ack

Both directions of request-reply are numbered per worker incarnation, kept by the sender until acknowledged (a Request
by its Reply, a Reply or Notice by an Ack), resent after a reconnection from where Hello and Welcome say the peer is,
and dropped by the receiver when it has them already. So a cut connection loses and doubles nothing.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]  # of a worker; who greets is remembered, so there is an end
Label = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Push(msgspec.Struct, array_like=True, frozen=True, tag="push/1"):
    """``floor``: the lowest sequence the sender may still send or resend to this receiver."""

    identity: Label
    sequence: Number
    floor: Number


class PushAck(msgspec.Struct, array_like=True, frozen=True, tag="push-ack/1"):
    """These are stored."""

    sequences: list[Number]


class PushNack(msgspec.Struct, array_like=True, frozen=True, tag="push-nack/1"):
    """The group is refused for good, or was given up by its sender; resending it would not help."""

    sequence: Number
    reason: str


class Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello/1"):
    """``last_request``: number of the newest Request this incarnation has received (0: none)."""

    index: Index
    incarnation: Label
    last_request: Number


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag="welcome/1"):
    """``last_message``: number of the newest Reply or Notice the master has of this incarnation (0: none)."""

    last_message: Number


class Refused(msgspec.Struct, array_like=True, frozen=True, tag="refused/1"):
    """The master talks to a newer incarnation of this worker."""

    reason: str


class RequestHeader(msgspec.Struct, array_like=True, frozen=True, tag="request/1"):
    number: Number
    handler: Label


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """The exception a handler raised."""

    type: str
    message: str
    traceback: str


class ReplyHeader(msgspec.Struct, array_like=True, frozen=True, tag="reply/1"):
    number: Number
    request: Number
    failure: Failure | None


class NoticeHeader(msgspec.Struct, array_like=True, frozen=True, tag="notice/1"):
    number: Number
    handler: Label


class Ack(msgspec.Struct, array_like=True, frozen=True, tag="ack/1"):
    """The master has every Reply and Notice up to ``number``."""

    number: Number


TO_PUSHER: msgspec.msgpack.Decoder[PushAck | PushNack] = msgspec.msgpack.Decoder(PushAck | PushNack)
TO_PULLER: msgspec.msgpack.Decoder[Push] = msgspec.msgpack.Decoder(Push)
TO_MASTER: msgspec.msgpack.Decoder[Hello | ReplyHeader | NoticeHeader] = msgspec.msgpack.Decoder(
    Hello | ReplyHeader | NoticeHeader
)
TO_WORKER: msgspec.msgpack.Decoder[Welcome | Refused | RequestHeader | Ack] = msgspec.msgpack.Decoder(
    Welcome | Refused | RequestHeader | Ack
)
