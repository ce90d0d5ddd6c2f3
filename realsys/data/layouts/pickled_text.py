"""Text from base64(zlib(pickle(text))), without running the pickle.

A pickle is a program: ``pickle.loads`` would run it with the rights of the user. Here nothing is run. The opcodes are
read one by one, and only the program that pushes one text and stops is accepted:

    [PROTO] [FRAME] a text [memo entries] STOP

Sizes are bounded before memory is taken: a small file may inflate to any size.
"""

from __future__ import annotations

import base64
import binascii
import pickletools
import zlib

_BEFORE = frozenset({"PROTO", "FRAME"})
_TEXT = frozenset({"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"})
_AFTER = frozenset({"MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"})
_MAX_OPCODES = 8  # PROTO, FRAME, the text, a memo entry and STOP are 5
_OVERHEAD = 64  # bytes of the opcodes around the text


def packed_text(packed: str, max_bytes: int) -> str:
    """Return the text in ``packed``. Raises ValueError for anything but one text of at most ``max_bytes`` bytes."""
    try:
        compressed = base64.b64decode(packed, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"is not base64: {error}") from None
    return pickled_text(inflate(compressed, max_bytes + _OVERHEAD))


def inflate(compressed: bytes, max_bytes: int) -> bytes:
    """Decompress one whole zlib stream. Raises ValueError if it is damaged or has more than ``max_bytes``."""
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(compressed, max_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"cannot be decompressed: {error}") from None
    if len(data) > max_bytes:
        raise ValueError(f"has more than {max_bytes} bytes when it is decompressed")
    if not stream.eof:
        raise ValueError("ends within its compressed data")
    if stream.unused_data:
        raise ValueError(f"has {len(stream.unused_data)} bytes after its compressed data")
    return data


def pickled_text(pickled: bytes) -> str:
    """Return the text of a pickle that holds one text and nothing else. Raises ValueError for any other."""
    text: str | None = None
    try:
        for number, (opcode, argument, position) in enumerate(pickletools.genops(pickled)):
            name = opcode.name
            if name == "STOP" and text is not None and position == len(pickled) - 1:
                return text
            if number < _MAX_OPCODES and name in _TEXT and text is None:
                text = argument
            elif number >= _MAX_OPCODES or name not in (_BEFORE if text is None else _AFTER):
                raise ValueError(f"the pickle has the opcode {name} at byte {position}: only one text is accepted")
    except (ValueError, AssertionError, OverflowError, EOFError) as error:
        raise ValueError(f"is not a pickled text: {error}") from None
    raise ValueError("is not a pickled text: it has no end")
