"""Answers of a served program: whatever it sends, the outside gets plain data or ProgramRaised."""

import socket
from types import SimpleNamespace

import pytest

from realsys.reward.sandbox.inside import plain
from realsys.reward.sandbox.sandbox import Program, ProgramRaised
from realsys.reward.sandbox.settings import CRASHED, MEMORY, OUTPUT, WALL, RunEnded, RunLimits

LOADED = plain.encode(("ok", None))


class FakeChild:
    """A program that has sent all its answers already, and is still there."""

    left_s, begin, born, ended, limits = 1.0, float("inf"), 0.0, None, RunLimits()

    def __init__(self):
        self.zygote = SimpleNamespace(last=lambda child: RunEnded(0))


@pytest.fixture
def link():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Program(FakeChild(), ours), theirs


def answer(link, *frames, most=1 << 20):
    program, theirs = link
    for frame in frames:
        plain.send(theirs.fileno(), frame)
    theirs.shutdown(socket.SHUT_WR)
    return program.call("f", [1], most)


def test_plain_result_is_returned(link):
    assert answer(link, LOADED, plain.encode(("ok", (1, [2])))) == (1, [2])


@pytest.mark.parametrize(
    ("frames", "reason", "gone"),
    [
        ([LOADED, plain.encode(("raised", ["MemoryError", "Exception"], ""))], MEMORY, False),
        ([LOADED, plain.encode(("raised", ["KeyError"], "x"))], CRASHED, False),
        ([LOADED, plain.encode(("raised", 5, "x"))], CRASHED, True),
        ([LOADED, plain.encode(("raised", [5], 10**5000))], CRASHED, True),
        ([LOADED, plain.encode(("ok",))], CRASHED, True),
        ([LOADED, plain.encode([])], CRASHED, True),
        ([LOADED, b""], CRASHED, True),
        ([LOADED, b"[" * 90_000], CRASHED, True),
        ([LOADED, b" " * 100_000], OUTPUT, True),
        # the program has ended, and one that could not be loaded
        ([LOADED], CRASHED, True),
        ([plain.encode(("raised", ["SyntaxError"], "x"))], CRASHED, True),
    ],
)
def test_other_answer_has_a_reason(link, frames, reason, gone):
    with pytest.raises(ProgramRaised) as raised:
        answer(link, *frames, most=99_999)
    assert (raised.value.reason, raised.value.gone) == (reason, gone)


def test_time_without_a_processor_does_not_count(link):
    """The first wait is longer than the limit; the machine was busy for all of it."""
    program, _ = link
    child, own_s, killed = program._child, [0.01, 9.0], []
    child.limits = RunLimits(cpu_s=0.01, wall_s=0.02)
    child.own_s, child.kill = lambda begin: own_s.pop(0), killed.append
    with pytest.raises(ProgramRaised) as raised:
        program.call("f", [1])
    assert (raised.value.reason, killed, own_s) == (WALL, [WALL], [])
