"""Inputs for fuzzing: valid values made from the types, and mutations of them. All from one seed.

    type ──example──> value ──spoil_value──> encode ──spoil_bytes──> input
                        └── half of the inputs are spoilt as values, half as bytes, some as both, a few are random

A spoilt value still is JSON or msgpack, so that it passes the parser and meets the checks behind it.
"""

import copy
import functools
import math
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
from msgspec import inspect as types

#: placeholder for a bomb of nested arrays, which no encoder would write
BOMB = "@bomb@"
DEPTH = 100_000
NUMBERS: list[Any] = [0, 1, -1, 2, 127, 255, 1 << 15, 1 << 26, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 53, (1 << 63) - 1]
NUMBERS += [1 << 63, (1 << 64) - 1, -(1 << 63), 0.5, -0.0, 1e-320, 1e308, -1e308]
WEIRD: list[Any] = [None, True, False, "", "x", "0", "-1", "../../etc/passwd", "/", "a" * 5000, "\x00", "é\u2028", BOMB]
WEIRD += [[], {}, [None], [[]], {"": 0}, {"a": {"b": []}}, [0] * 300]


def example(kind: Any, rng: Random) -> Any:
    """A valid value of a type, in the form in which it is encoded."""
    return _example(_info(kind), rng)


@functools.cache
def _info(kind: Any) -> types.Type:
    return types.type_info(kind)


def _example(info: types.Type, rng: Random) -> Any:
    match info:
        case types.StructType():
            return _struct(info, rng)
        case types.DataclassType(fields=fields):
            return {field.encode_name: _example(field.type, rng) for field in fields}
        case types.IntType(ge=low, gt=above, le=high):
            low = above + 1 if above is not None else 0 if low is None else low
            return rng.randint(low, max(low, min(low + rng.choice((1, 5, 1000)), low + 1000 if high is None else high)))
        case types.FloatType():
            return rng.choice((0.0, 1.0, rng.random()))
        case types.StrType(min_length=low, pattern=pattern):
            return rng.choice(("e1", "before")) if pattern else rng.choice(("w", "t1", "0", "abc/0")) * (low or 1)
        case types.BytesType():
            return rng.randbytes(rng.randrange(20))
        case types.BoolType():
            return rng.random() < 0.5
        case types.LiteralType(values=values):
            return rng.choice(values)
        case types.UnionType(types=options):
            return _example(rng.choice(options), rng)
        case types.TupleType(item_types=items):
            return [_example(item, rng) for item in items]
        case types.ListType(item_type=item, min_length=low) | types.VarTupleType(item_type=item, min_length=low):
            return [_example(item, rng) for _ in range(max(low or 0, rng.randrange(4)))]
        case types.DictType(key_type=key, value_type=value):
            return {str(_example(key, rng)): _example(value, rng) for _ in range(rng.randrange(4))}
        case _:
            return None


def _struct(info: types.StructType, rng: Random) -> Any:
    fields = {field.encode_name: _example(field.type, rng) for field in info.fields}
    if info.array_like:
        return [*([] if info.tag is None else [info.tag]), *fields.values()]
    given = {f.encode_name: fields[f.encode_name] for f in info.fields if f.required or rng.random() < 0.7}
    return given if info.tag is None else {info.tag_field: info.tag, **given}


class Spoiler:
    """Makes inputs from valid ones. ``decode`` and ``encode``: of the format that they are in, JSON or msgpack."""

    def __init__(self, rng: Random, format: str = "json") -> None:
        self.rng = rng
        self._module: Any = msgspec.json if format == "json" else msgspec.msgpack
        self._bomb = (b"[" * DEPTH) if format == "json" else b"\x91" * DEPTH
        self._closed_bomb = (b"[" * DEPTH + b"]" * DEPTH) if format == "json" else b"\x91" * DEPTH + b"\xc0"

    def encode(self, value: Any) -> bytes:
        data: bytes = self._module.encode(value)
        marker: bytes = self._module.encode(BOMB)
        if marker in data:
            data = data.replace(marker, self.rng.choice((self._bomb, self._closed_bomb)), 1)
        return data

    def spoil(self, valid: bytes) -> bytes:
        """One input from one valid message."""
        chance = self.rng.random()
        if chance < 0.02:
            return self.rng.randbytes(self.rng.randrange(200))
        if chance < 0.05:
            return valid
        if chance < 0.55:
            valid = self.encode(self.spoil_value(self._module.decode(valid)))
        return self.spoil_bytes(valid) if chance > 0.5 else valid

    def spoil_value(self, value: Any) -> Any:
        """``value`` with one to three things in it changed."""
        value = copy.deepcopy(value)
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            value = self._change(value)
        return value

    def _change(self, value: Any) -> Any:
        """Somewhere inside: the deeper, the likelier."""
        rng = self.rng
        if isinstance(value, dict) and value and rng.random() < 0.85:
            key = rng.choice(list(value))
            match rng.randrange(12):
                case 0:
                    del value[key]
                case 1:
                    value[rng.choice(("unknown", "", "0", "type"))] = copy.deepcopy(rng.choice(WEIRD))
                case 2:
                    value[key + "x"] = value.pop(key)
                case _:
                    value[key] = self._change(value[key])
            return value
        if isinstance(value, list) and value and rng.random() < 0.85:
            at = rng.randrange(len(value))
            match rng.randrange(10):
                case 0:
                    del value[at]
                case 1:
                    value.insert(at, copy.deepcopy(rng.choice(WEIRD)))
                case 2:
                    value.extend(copy.deepcopy(value[at]) for _ in range(rng.choice((1, 2, 300))))
                case _:
                    value[at] = self._change(value[at])
            return value
        return self._other(value)

    def _other(self, value: Any) -> Any:
        rng = self.rng
        if isinstance(value, str) and rng.random() < 0.4:
            at = rng.randrange(len(value) + 1)
            return value[:at] + rng.choice(("", "x", "..", "/", "\x00", "9")) + value[at + rng.randrange(3) :]
        if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.4:
            near = value + rng.choice((-1, 1, 7, 1 << 20)) if math.isfinite(value) else 0
            return near if not isinstance(near, int) or -(1 << 63) <= near < 1 << 64 else 0
        return rng.choice(NUMBERS) if rng.random() < 0.5 else copy.deepcopy(rng.choice(WEIRD))

    def spoil_bytes(self, data: bytes) -> bytes:
        """Bits flipped; pieces removed, doubled, moved, overwritten; cut off; something appended."""
        rng, out = self.rng, bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 4, 16))):
            at = rng.randrange(len(out) + 1)
            size = rng.choice((1, 2, 4, 8, rng.randrange(1, 64)))
            match rng.randrange(8):
                case 0 if at < len(out):
                    out[at] ^= 1 << rng.randrange(8)
                case 1 if at < len(out):
                    out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
                case 2:
                    del out[at : at + size]
                case 3:
                    out[at:at] = out[at : at + size]
                case 4:
                    out[at:at] = rng.randbytes(size)
                case 5:
                    out[at : at + size] = rng.choice(NUMBERS[:-5]).to_bytes(9, "little", signed=True)[:size]
                case 6 if rng.random() < 0.3:
                    del out[at:]
                case 7 if rng.random() < 0.05:
                    out[at:at] = self._bomb
        return bytes(out)


def examples(kind: Any, format: str = "json") -> Callable[[Spoiler], bytes]:
    """Inputs of one type: each a spoilt encoding of another valid value."""

    def make(spoiler: Spoiler) -> bytes:
        return spoiler.spoil(spoiler.encode(example(kind, spoiler.rng)))

    return make
