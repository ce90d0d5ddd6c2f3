"""Verifiers that misbehave, loaded by name in the pool's processes."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import Any

from realsys.reward.verifiers.contract import Item, Verdict, declare

_kept: list[object] = []


def behave(item: Item) -> Any:
    """Do what the completion says; compare any other completion with the answer."""
    does, answer = item.completion, item.answer
    _end(does, answer)
    if does == "crash once":  # the file ``answer`` says that it did
        if not os.path.exists(answer):
            open(answer, "w").close()
            os._exit(7)
        return True
    if does == "none":
        return None
    if does == "wait":
        threading.Event().wait(float(answer))
    if does == "fork":  # and returns in both processes
        os.fork()
        return True
    if does == "print":
        print("this is what it said", file=sys.stderr)
        return True
    if does == "huge":
        return "x" * (100 << 20)
    if does == "nan":
        return float("nan")
    if does == "process":
        threading.Event().wait(0.05)
        return os.getpid()
    if does == "metrics":
        return Verdict(0.25, None, {"length": 3, "right": True})
    if does == "extra":
        return Verdict(1.0, None, {repr(item.extra)[:100]: 1.0})
    if does == "note":  # written to the file ``answer``
        with open(answer, "a") as file:
            file.write(f"{item.prompt}\n")
        return True
    if does == "close everything":
        os.closerange(3, 100)
    return does == answer


def _check(item: Item, *, bonus: float = 0.0) -> str | None:
    _end(item.answer, "")
    if item.answer == "bonus":
        return f"the bonus is {bonus}"
    return "it is bad" if item.answer == "bad" else None


@declare(check_answer=_check, wrong_over_limit=True)
def checked(item: Item, *, bonus: float = 0.0) -> Any:
    """Do the same. It checks references, and a completion over the limit is wrong."""
    result = behave(item)
    return Verdict(None, result, {}, bonus) if bonus and isinstance(result, bool) else result


def _end(does: str, answer: str) -> None:
    """Raise, die or never return, if ``does`` says so."""
    if does == "crash":
        os._exit(7)
    if does == "raise":
        raise ArithmeticError("cannot\ntell")
    if does == "unspeakable":
        raise ValueError("\ud800" + "x" * 10_000)
    if does == "memory":
        bytearray(1 << 40)
    if does == "exit":
        sys.exit(0)
    if does == "signal its group":
        os.killpg(0, signal.SIGTERM)
    if does == "ignore SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if does == "start":  # its child outlives it; the file ``answer`` gets the pid
        child = subprocess.Popen(["sleep", "600"])
        with open(answer, "w") as file:
            file.write(str(child.pid))
    if does in ("hang", "ignore SIGTERM", "start"):
        threading.Event().wait()
    while does == "spin":
        pass
    while does == "print without end":
        sys.stdout.write("x" * 100_000)
    while does == "open sockets":
        _kept.append(socket.socket())
    if does == "fill the disk":
        with tempfile.TemporaryFile() as file:
            while True:
                file.write(bytes(1 << 20))
