"""Attacks on the reader of pickled texts: nothing may run, and sizes stay bounded."""

import base64
import os
import pickle
import struct
import tracemalloc
import zlib

import pytest

from realsys.data.layouts import inflate, packed_text, pickled_text


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("text", ["", "[]", "é\n\\u0041 \U0001f600", "x" * 300, "y" * 70_000])
def test_pickled_text_is_read(protocol, text):
    assert packed_text(packed(pickle.dumps(text, protocol)), 1 << 20) == text


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_call_does_not_run(tmp_path, protocol):
    mark = tmp_path / "ran"
    with pytest.raises(ValueError, match="only one text is accepted"):
        pickled_text(pickle.dumps(Bomb(mark), protocol))
    assert not mark.exists()


WHOLE = pickle.dumps("[1, 2]", 4)
OTHERS = [b"x", 1, 2.5, None, True, ["a"], ("a",), {"a": "b"}, {"a"}, print, 1 << 9_000]


@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        b".",
        b"\x80\x04",
        b"V",
        b"Vabc",
        b"Va\n",
        b"Va\nVb\n.",  # two texts
        b"Va\n.Vb\n.",  # a second pickle after the first
        b"Va\n.cos\nsystem\n.",
        b"cos\nsystem\n(S'true'\ntR.",
        b"Va\ncos\nsystem\nVtrue\n\x85R.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",  # STACK_GLOBAL from two texts
        b"\x80\x04\x8c\x01a\x81.",  # NEWOBJ
        b"\x80\x04\x8c\x01aQ.",  # BINPERSID
        b"\x80\x04\x8c\x01a\x82\x01.",  # EXT1
        b"\x80\x04\x8c\x01ab.",  # BUILD
        b"\x80\x04\x8c\x01a2.",  # DUP
        b"\x80\x04\x8c\x01ah\x00.",  # BINGET
        b"\x80\x04" + b"\x95" + struct.pack("<Q", 1) * 20 + b"\x8c\x01a.",
        b"\x80\x04" * 20 + b"\x8c\x01a.",
        b"\x80\x04\x8c\x01a" + b"\x94" * 20 + b".",
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"a.",  # a length beyond the data
        b"X" + struct.pack("<I", 0xFFFFFFFF) + b"a.",
        b"S'abc'\n.",  # a byte string of Python 2
        b"\x8c\x01\xff.",  # not UTF-8
        b"I" + b"9" * 10_000 + b"\n.",
        bytes(range(256)),
        *[pickle.dumps(value, protocol) for value in OTHERS for protocol in range(pickle.HIGHEST_PROTOCOL + 1)],
        *[WHOLE[:end] for end in range(1, len(WHOLE))],
        *[WHOLE + WHOLE[: end + 1] for end in range(len(WHOLE))],
    ],
    ids=lambda pickled: repr(pickled)[:40],
)
def test_hostile_pickle_is_refused(pickled):
    with pytest.raises(ValueError, match=r"^is not a pickled text"):
        pickled_text(pickled)


def test_zip_bomb_stops_at_the_bound():
    """64 MiB in 64 KiB: the memory that is taken depends on the bound, not on the bomb."""
    bomb = base64.b64encode(zlib.compress(b"\x00" * (64 << 20), 9)).decode()
    tracemalloc.start()
    with pytest.raises(ValueError, match="has more than 1048640 bytes"):
        packed_text(bomb, 1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_bound_counts_the_text_alone():
    text = "x" * 1000
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert packed_text(packed(pickle.dumps(text, protocol)), 1000) == text
    with pytest.raises(ValueError, match="more than"):
        packed_text(packed(pickle.dumps("x" * 2000)), 1000)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (zlib.compress(b"abc")[:-1], "ends within"),
        (zlib.compress(b"abc") + b"x", "1 bytes after"),
        (b"abc", "cannot be decompressed"),
        (b"", "ends within"),
    ],
)
def test_damaged_stream_is_refused(data, problem):
    with pytest.raises(ValueError, match=problem):
        inflate(data, 100)


@pytest.mark.parametrize("text", ["é", "a b", "abc", "=", "YQ==YQ=="])
def test_text_that_is_not_base64_is_refused(text):
    with pytest.raises(ValueError, match="^is not base64"):
        packed_text(text, 100)
