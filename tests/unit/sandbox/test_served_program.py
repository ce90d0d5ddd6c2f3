"""Answers of a served program: whatever it sends, the outside gets plain data or ProgramRaised."""

import socket
from types import SimpleNamespace

import pytest

from realsys.sandbox.inside import plain
from realsys.sandbox.limits import CRASHED, MEMORY, OUTPUT, WALL, Ended, Limits
from realsys.sandbox.served_program import Program, ProgramRaised

LOADED = plain.encode(("ok", None))


class FakeChild:
    """A program that has sent all its answers already, and is still there."""

    left_s, begin, born, ended, limits = 1.0, float("inf"), 0.0, None, Limits()

    def __init__(self):
        self.zygote = SimpleNamespace(last=lambda child: Ended(0))


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
    ("frame", "reason"),
    [
        (plain.encode(("raised", ["MemoryError", "Exception"], "")), MEMORY),
        (plain.encode(("raised", ["KeyError"], "x")), CRASHED),
        (plain.encode(("raised", 5, "x")), CRASHED),
        (plain.encode(("raised", [5], 10**5000)), CRASHED),
        (plain.encode(("ok",)), CRASHED),
        (plain.encode([]), CRASHED),
        (b"", CRASHED),
        (b"[" * 90_000, CRASHED),
        (b" " * 100_000, OUTPUT),
    ],
)
def test_other_answer_has_a_reason(link, frame, reason):
    with pytest.raises(ProgramRaised) as raised:
        answer(link, LOADED, frame, most=99_999)
    assert raised.value.reason == reason


def test_end_of_the_program_has_a_reason(link):
    with pytest.raises(ProgramRaised) as raised:
        answer(link, LOADED)
    assert (raised.value.reason, raised.value.gone) == (CRASHED, True)


def test_time_without_a_processor_does_not_count(link):
    """The first wait is longer than the limit; the machine was busy for all of it."""
    program, _ = link
    child, own_s, killed = program._child, [0.01, 9.0], []
    child.limits = Limits(cpu_s=0.01, wall_s=0.02)
    child.own_s, child.kill = lambda begin: own_s.pop(0), killed.append
    with pytest.raises(ProgramRaised) as raised:
        program.call("f", [1])
    assert (raised.value.reason, killed, own_s) == (WALL, [WALL], [])


def test_program_that_is_not_loaded_is_gone(link):
    with pytest.raises(ProgramRaised) as raised:
        answer(link, plain.encode(("raised", ["SyntaxError"], "x")))
    assert raised.value.gone
