"""Verifiers that misbehave, loaded by name in the pool's processes."""

from __future__ import annotations

import os
import threading


def behave(prompt: str, answer: str, reference: str) -> bool:
    """Does what the answer says."""
    if answer == "hang":
        threading.Event().wait()
    if answer == "crash":
        os._exit(7)
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
    return answer == reference
