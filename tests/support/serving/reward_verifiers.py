"""Verifiers that misbehave, loaded by name in the pool's processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading

from realsys.reward.verifiers.base import Item, Verdict

_kept: list[object] = []


def behave(item: Item) -> bool:
    """Do what the completion says."""
    answer, reference = item.completion, item.answer
    if answer == "hang":
        threading.Event().wait()
    if answer == "crash":
        os._exit(7)
    if answer == "crash once":  # the file ``reference`` says that it did
        if not os.path.exists(reference):
            open(reference, "w").close()
            os._exit(7)
        return True
    if answer == "spin":
        while True:
            pass
    if answer == "raise":
        raise ArithmeticError("cannot\ntell")
    if answer == "none":
        return None  # type: ignore[return-value]
    if answer == "memory":
        return len(bytearray(1 << 40)) > 0
    if answer == "pid":
        return os.getpid() == int(reference)
    if answer == "wait":
        threading.Event().wait(float(reference))
    if answer == "fork":  # and returns in both processes
        os.fork()
        return True
    if answer == "start":  # its child outlives it; the file ``reference`` gets the pid
        child = subprocess.Popen(["sleep", "600"])
        with open(reference, "w") as file:
            file.write(str(child.pid))
        threading.Event().wait()
    if answer == "ignore SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Event().wait()
    if answer == "signal its group":
        os.killpg(0, signal.SIGTERM)
    if answer == "print":
        print("this is what it said", file=sys.stderr)
        return True
    if answer == "print without end":
        while True:
            sys.stdout.write("x" * 100_000)
    if answer == "fill the disk":
        with tempfile.TemporaryFile() as file:
            while True:
                file.write(bytes(1 << 20))
    if answer == "open sockets":
        while True:
            _kept.append(socket.socket())
    if answer == "exit":
        sys.exit(0)
    if answer == "huge":
        return "x" * (100 << 20)  # type: ignore[return-value]
    if answer == "nan":
        return float("nan")  # type: ignore[return-value]
    if answer == "unspeakable":
        raise ValueError("\ud800" + "x" * 10_000)
    if answer == "process":
        threading.Event().wait(0.05)
        return os.getpid()
    if answer == "metrics":
        return Verdict(0.25, None, {"length": 3, "right": True})  # type: ignore[return-value]
    if answer == "extra":
        return Verdict(1.0, None, {repr(item.extra)[:100]: 1.0})  # type: ignore[return-value]
    if answer == "note":  # written to the file ``reference``
        with open(reference, "a") as file:
            file.write(f"{item.prompt}\n")
        return True
    if answer == "close everything":
        os.closerange(3, 100)
    return answer == reference
