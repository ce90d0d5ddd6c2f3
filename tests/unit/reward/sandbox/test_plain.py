"""Plain data between processes: it survives the way, and nothing else is read."""

import collections
import json
import sys

import pytest

from realsys.reward.sandbox.inside.plain import MAX_FRAME, Handle, PlainError, decode, encode

VALUES = [
    None,
    True,
    -(10**40),
    1.5,
    float("inf"),
    2 + 3j,
    "a\ud800é",
    b"\0\xff",
    [1, (2, [3])],
    {1, (2, 3)},
    frozenset({"a"}),
    {(1, 2): {"x": None}, 3: [4]},
    range(1, 9, 2),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_value_survives(value):
    read = decode(encode(value))
    assert read == value
    assert type(read) is type(value)


def test_subclasses_become_their_base():
    point = collections.namedtuple("point", "x y")
    values = [collections.Counter("aab"), point(1, 2), collections.OrderedDict(a=1), {"k": 1}.keys()]
    assert decode(encode(values)) == [{"a": 2, "b": 1}, (1, 2), {"a": 1}, {"k"}]


def test_lying_text_is_sent_as_it_is():
    class Liar(str):
        def __eq__(self, other):
            return True

        __hash__ = str.__hash__

    assert decode(encode(Liar("wrong"))) != "right"


def test_other_value_is_refused_or_kept():
    with pytest.raises(PlainError, match="object is no plain data"):
        encode([object()])
    kept = []
    read = decode(encode([object()], lambda value: kept.append(value) or len(kept) - 1))
    assert isinstance(read[0], Handle)
    assert len(kept) == 1


def test_endless_value_is_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(PlainError, match="no plain data"):
        encode(endless)


SAME = [{"i": hex(n * sys.hash_info.modulus)} for n in range(1000)]


@pytest.mark.parametrize(
    ("wire", "problem"),
    [
        *[(wire, "JSONDecodeError") for wire in ("", "[")],
        ('{"x": 1}', "unknown tag 'x'"),
        ('{"t": 1}', "no list"),
        ('{"n": "1"}', "no number"),
        ('{"d": [[1]]}', "not enough values"),
        ('{"s": [[]]}', "unhashable"),
        ('{"h": "a"}', "no handle"),
        ('{"r": ["a"]}', "no range"),
        ('{"a": 1, "b": 2}', "not one tag"),
        ("[" * 100_000, "recursion"),
        ('{"i": "zz"}', "'zz'"),
        ('{"b": "0"}', "fromhex"),
        ('{"r": [1, 2, 0]}', "must not be zero"),
        # a set of them takes quadratic time
        (json.dumps({"s": SAME}), "same hash"),
        (json.dumps({"d": [[member, 0] for member in SAME]}), "same hash"),
    ],
    ids=lambda text: text[:20],
)
def test_other_bytes_are_refused(wire, problem):
    with pytest.raises(PlainError, match=problem):
        decode(wire.encode())


def test_message_has_a_bound():
    assert MAX_FRAME == 16 << 20
