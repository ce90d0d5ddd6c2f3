"""Headers of the two streams: the first frame of every message. The payload follows it.

Push-pull (Pusher -> Puller, then back)

    Push        + the frames of a group     ->
                                            <-  PushAck | PushNack

Request-reply (WorkerEndpoint <-> MasterStream)

    Hello                                   ->      after each (re)connection
                                            <-  Welcome | Refused
                                            <-  Request + payload
    Reply + payload | Notice + payload      ->
                                            <-  Ack

Both directions of request-reply are numbered per worker incarnation. The sender keeps a message until it is
acknowledged: a Request by its Reply, a Reply or Notice by the next Request or by an Ack. After a reconnection it
resends those above the high-water mark that Hello or Welcome names. The receiver drops a number that it has already.
A connection that is cut therefore loses no message and doubles none.

The tags end in a version. Change it with the fields: a peer of another version must fail to decode the header.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
#: worker index; wide enough for the hash of a name (master_stream.MAX_PEERS bounds their number)
Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
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

    index: Index
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
