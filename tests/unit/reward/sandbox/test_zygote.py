"""The zygote: how it judges the end of a program."""

import json
import os
import socket
import subprocess

import pytest

from realsys.reward.sandbox.inside import zygote as module
from realsys.reward.sandbox.inside.zygote import KILLED, Zygote, _Running
from realsys.reward.sandbox.settings import RunLimits


def reached(command, monkeypatch, *, namespaces=True, oom=False, kill=False) -> str:
    """Return the limit that the zygote finds when a command has ended. ``oom``: the kernel has ended a process."""
    kills = iter([3, 4 if oom else 3])
    monkeypatch.setattr(module, "oom_kills", lambda: next(kills))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        zygote = Zygote(theirs, {"namespaces": namespaces})
        process = subprocess.Popen(["sh", "-c", command])
        running = _Running({"id": 1, "limits": RunLimits().as_message()}, process.pid, None)
        if kill:
            zygote._kill(running)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        zygote._kill(running)  # too late: this one does not count
        zygote._collect(running)
        process.returncode = 0
        return json.loads(ours.recv(4096))["reached"]


@pytest.mark.parametrize(
    ("command", "settings", "expected"),
    [
        ("exit 0", {"oom": True}, ""),
        ("exit 3", {}, ""),
        ("exit 3", {"oom": True}, KILLED),
        ("kill -9 $$", {}, KILLED),
        ("kill -9 $$", {"namespaces": False}, ""),
        ("kill -15 $$", {}, ""),
        ("exec sleep 60", {"kill": True, "oom": True}, ""),
    ],
)
def test_victim_of_the_machine_is_found(monkeypatch, command, settings, expected):
    assert reached(command, monkeypatch, **settings) == expected


def test_counts_of_the_kernel_are_read():
    assert module.oom_kills() >= 0
    assert module.last_pid() > 0
