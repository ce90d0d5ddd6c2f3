"""Ids of tool calls: nine letters or digits, which every client and chat template accepts (Mistral's want just nine).

The first seven name the completion, the last two number its tool calls. So a client may send the tool calls of one
completion apart from each other, and they can be joined again.
"""

from __future__ import annotations

import hashlib
import string

_DIGITS = string.digits + string.ascii_letters
_NAME = 7
_LENGTH = 9


def call_id(completion: str, index: int) -> str:
    """Return the id of tool call ``index`` of a completion, which ``completion`` names."""
    number = int.from_bytes(hashlib.blake2b(completion.encode(), digest_size=8).digest(), "big")
    return _base62(number, _NAME) + _base62(index, _LENGTH - _NAME)


def same_completion(first: str, second: str) -> bool:
    """Return True if both are ids of ``call_id`` for tool calls of one completion."""
    return len(first) == len(second) == _LENGTH and first[:_NAME] == second[:_NAME] and first.isalnum()


def _base62(number: int, length: int) -> str:
    digits = []
    for _ in range(length):
        number, digit = divmod(number, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(reversed(digits))
