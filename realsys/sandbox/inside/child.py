"""A child of the zygote: confines itself, says that it is ready, and then runs what the outside sends."""

from __future__ import annotations

import contextlib
import gc
import os
from typing import Any

from . import confine, kernel, plain, preload, program, tests

BROKEN = 99  # exit code of a child that could not begin; it has not said that it is ready
READY = b"ready"
_NICE = 10  # so that the zygote, which watches over the limits, runs first


def main(message: dict[str, Any], descriptors: list[int], setup: dict[str, Any], user: tuple[int, int]) -> None:
    """Run the child; it ends the process."""
    mode, limits = message["mode"], message["limits"]
    gc.disable()
    channel, *rest = _low(descriptors)
    try:
        _confine(limits, setup, user)
    except OSError as error:
        plain.send(channel, f"broken: {error}".encode())
        os._exit(BROKEN)
    plain.send(channel, READY)
    data = plain.receive(channel)
    if data is None:
        os._exit(BROKEN)
    task = plain.decode(data)
    del data
    preload.in_child()
    gc.enable()
    if mode == "test":
        tests.run(task, channel, rest[0])
    elif mode == "command":
        program.command(task, channel, rest)
    elif mode == "serve":
        os.close(channel)
        program.serve(task, rest[0])
    else:
        os.close(channel)
        program.run(task, rest)


def _low(descriptors: list[int]) -> list[int]:
    """Move the descriptors to 3, 4, ..., make 0, 1 and 2 null, and close all others."""
    high = [os.dup2(each, 200 + place) for place, each in enumerate(descriptors)]
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    low = [os.dup2(each, 3 + place, inheritable=False) for place, each in enumerate(high)]
    os.closerange(3 + len(low), 1 << 16)
    return low


def _confine(limits: dict[str, Any], setup: dict[str, Any], user: tuple[int, int]) -> None:
    os.setpgid(0, 0)
    if not setup["namespaces"]:
        kernel.die_with_parent()
    else:
        confine.enter_namespaces(*user)
        confine.own_folders(int(limits["disk_mb"]))
    os.chdir(confine.TMP)
    os.umask(0o077)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    confine.limit(limits, namespaces=setup["namespaces"])
    if setup["namespaces"]:
        confine.give_up(setup["readable"], landlock=setup["landlock"])
