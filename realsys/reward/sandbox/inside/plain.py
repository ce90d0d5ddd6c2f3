"""Plain data as bytes, between processes that do not trust each other.

Values are None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, range and Handle. ``encode``
turns a subclass into its base (an OrderedDict into a dict); ``decode`` makes exact built-in types only, so that no
method of the sender's runs at the receiver. A value that is no plain data travels as a Handle, if the sender keeps it.

    channel ── 4 bytes length, then JSON ──> channel
"""

from __future__ import annotations

import collections
import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from typing import Any

LENGTH = struct.Struct("!I")
MAX_FRAME = 16 << 20  # bytes of one message
_SAME_HASH = 64  # different members of a set, or keys of a dict, that may have the same hash
_BIG = 1 << 62  # integers beyond travel in hexadecimal: decimal text of long ones takes quadratic time

Keep = Callable[[object], int]


class PlainError(ValueError):
    """A value that is no plain data, or bytes that are none."""


class TooLongError(PlainError):
    """A message of more bytes than the receiver takes."""


class Handle:
    """A value that stays in the process of the program; ``number`` finds it there."""

    def __init__(self, number: int) -> None:
        self.number = number


def encode(value: object, keep: Keep | None = None) -> bytes:
    """Return the bytes of a value. ``keep`` stores a value that is no plain data; without it, raise PlainError."""
    try:
        return json.dumps(_wire(value, keep), separators=(",", ":"), allow_nan=False).encode()
    except (RecursionError, TypeError, ValueError) as error:
        raise PlainError(f"no plain data: {error}") from None


def decode(data: bytes) -> Any:
    """Return the value of the bytes. Raises PlainError for any bytes that ``encode`` does not make."""
    try:
        return _value(json.loads(data))
    except (RecursionError, TypeError, ValueError, OverflowError, MemoryError) as error:
        raise PlainError(f"cannot be read: {type(error).__name__}: {error}") from None


def _wire(value: Any, keep: Keep | None) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, int):
        number = int(value)
        return number if -_BIG < number < _BIG else {"i": hex(number)}
    if isinstance(value, float):
        real = float(value)
        return real if math.isfinite(real) else {"n": repr(real)}
    if isinstance(value, str):
        return "".join(value)
    if isinstance(value, list):
        return [_wire(each, keep) for each in value]
    return _tagged(value, keep)


def _tagged(value: Any, keep: Keep | None) -> Any:
    if isinstance(value, tuple):
        return {"t": [_wire(each, keep) for each in value]}
    if isinstance(value, Mapping):
        return {"d": [[_wire(key, keep), _wire(each, keep)] for key, each in value.items()]}
    if isinstance(value, frozenset):
        return {"f": [_wire(each, keep) for each in value]}
    if isinstance(value, (set, type({}.keys()))):
        return {"s": [_wire(each, keep) for each in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, complex):
        return {"c": [_wire(value.real, keep), _wire(value.imag, keep)]}
    if isinstance(value, range):
        return {"r": [value.start, value.stop, value.step]}
    if isinstance(value, Handle):
        return {"h": value.number}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return _wire(value.tolist(), keep)
    if type(value).__name__ in ("deque", "dict_values"):
        return [_wire(each, keep) for each in value]
    if keep is None:
        raise PlainError(f"{type(value).__name__} is no plain data")
    return {"h": keep(value)}


def _value(wire: Any) -> Any:
    if isinstance(wire, list):
        return [_value(each) for each in wire]
    if not isinstance(wire, dict):
        return wire
    if len(wire) != 1:
        raise PlainError("cannot be read: not one tag")
    ((tag, body),) = wire.items()
    maker = _MAKERS.get(tag)
    if maker is None:
        raise PlainError(f"cannot be read: unknown tag {tag!r}")
    return maker(body)


def _float(body: Any) -> float:
    if body not in ("nan", "inf", "-inf"):
        raise PlainError("cannot be read: no number")
    return float(body)


def _items(body: Any) -> list[Any]:
    if not isinstance(body, list):
        raise PlainError("cannot be read: no list")
    return [_value(each) for each in body]


def _hashable(members: list[Any]) -> list[Any]:
    """Return the members. Refuse those that were made to have the same hash: a set of them takes quadratic time."""
    if len(members) > _SAME_HASH:
        counts = collections.Counter(map(hash, members))
        if max(counts.values()) > _SAME_HASH:
            raise PlainError("cannot be read: too many members with the same hash")
    return members


def _pairs(body: Any) -> dict[Any, Any]:
    pairs = [(_value(key), _value(each)) for key, each in body]
    _hashable([key for key, _ in pairs])
    return dict(pairs)


def _handle(body: Any) -> Handle:
    if type(body) is not int:
        raise PlainError("cannot be read: no handle")
    return Handle(body)


def _range(body: Any) -> range:
    if not all(type(each) is int for each in body):
        raise PlainError("cannot be read: no range")
    return range(*body)


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "i": lambda body: int(body, 16),
    "n": _float,
    "t": lambda body: tuple(_items(body)),
    "d": _pairs,
    "f": lambda body: frozenset(_hashable(_items(body))),
    "s": lambda body: set(_hashable(_items(body))),
    "b": bytes.fromhex,
    "c": lambda body: complex(*_items(body)),
    "r": _range,
    "h": _handle,
}


def replaced(value: Any, kind: type, replace: Callable[[Any], Any]) -> Any:
    """Return plain data with other values in the place of those of a ``kind``."""
    if isinstance(value, kind):
        return replace(value)
    if type(value) in (list, tuple):
        return type(value)(replaced(each, kind, replace) for each in value)
    if type(value) is dict:
        return {key: replaced(each, kind, replace) for key, each in value.items()}
    return value


def send(descriptor: int, data: bytes) -> None:
    """Write one message. Raises OSError if the other side has closed."""
    if len(data) > MAX_FRAME:
        raise PlainError(f"a message of {len(data)} bytes: at most {MAX_FRAME}")
    view = memoryview(LENGTH.pack(len(data)) + data)
    while view:
        view = view[os.write(descriptor, view) :]


def receive(descriptor: int, most: int = MAX_FRAME, wait: Callable[[], None] = lambda: None) -> bytes | None:
    """Read one message; None if the other side has closed. Raises TooLongError for more than ``most`` bytes.

    ``wait`` is called before each read, and may raise.
    """
    header = _read(descriptor, LENGTH.size, wait)
    if header is None:
        return None
    (size,) = LENGTH.unpack(header)
    if size > most:
        raise TooLongError(f"a message of {size} bytes: at most {most}")
    return _read(descriptor, size, wait)


def _read(descriptor: int, size: int, wait: Callable[[], None]) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        wait()
        chunk = os.read(descriptor, min(size - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
