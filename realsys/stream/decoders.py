"""Decoders of msgpack messages, made once for each type."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import msgspec

_MAKING_DECODER = threading.Lock()


@lru_cache(maxsize=256)
def decoder_of(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of ``kind``. Thread-safe."""
    # msgspec 0.22 describes each Struct once, and lets a second thread use the description while the first
    # still fills it in: the process ends with a segmentation fault.
    with _MAKING_DECODER:
        return msgspec.msgpack.Decoder(kind)
