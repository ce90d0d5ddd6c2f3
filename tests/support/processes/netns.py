"""Two hosts on one machine: network namespaces that a pair of virtual interfaces joins.

As Debian does it, each host resolves its own name to 127.0.1.1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NETNS_FILES = Path("/etc/netns")  # `ip netns exec` mounts NAME/hosts over /etc/hosts
ADDRESSES = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "REALSYS_HOST"}
COMMAND_TIMEOUT_S = 20.0


def missing() -> str:
    """Return why this machine cannot make network namespaces; "" if it can."""
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"there is no program named {program}"
    if os.geteuid():
        return "network namespaces need root"
    probe = f"probe{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    if made.returncode == 0:
        made = _ip("netns", "exec", probe, "unshare", "--uts", "true", check=False)
        _ip("netns", "del", probe, check=False)
    return "" if made.returncode == 0 else f"namespaces cannot be made here: {made.stderr.strip()}"


def _ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    argv = ["ip", *arguments]
    return subprocess.run(argv, check=check, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)


class TwoHosts:
    """Context with the hosts 0 and 1: names, addresses and interfaces. Removed when it is left."""

    def __init__(self) -> None:
        tag = uuid.uuid4().hex[:6]
        self.spaces = [f"rs{tag}{letter}" for letter in "ab"]
        self.names = [f"node{letter}" for letter in "ab"]
        self.interfaces = ["fab0", "ib7"]  # hosts of a cluster need not name them alike
        self.addresses = ["10.77.5.1", "10.77.5.2"]

    def __enter__(self) -> TwoHosts:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        for number, space in enumerate(self.spaces):
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            folder = NETNS_FILES / space
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.names[number]}\n")
        here, there = self.spaces
        ends = ("link", "add", self.interfaces[0], "netns", here, "type", "veth")
        _ip(*ends, "peer", "name", self.interfaces[1], "netns", there)
        for space, interface, address in zip(self.spaces, self.interfaces, self.addresses, strict=True):
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", interface)
            _ip("-n", space, "link", "set", interface, "up")

    def __exit__(self, *_: object) -> None:
        for space in self.spaces:
            _ip("netns", "del", space, check=False)
            shutil.rmtree(NETNS_FILES / space, ignore_errors=True)

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on a host, under the host's own name. All of it is one process."""
        inside = ["sh", "-c", 'hostname "$0" && exec "$@"', self.names[host], *argv]
        return ["ip", "netns", "exec", self.spaces[host], "unshare", "--uts", *inside]

    def start(self, host: int, script: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a Python script on a host."""
        argv = self.command(host, [sys.executable, "-c", script, *arguments])
        env = {**environment(), "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def environment() -> dict[str, str]:
    """Return this process's environment without addresses."""
    return {name: value for name, value in os.environ.items() if name not in ADDRESSES}


def outputs(processes: Sequence[subprocess.Popen[str]], timeout_s: float) -> list[str]:
    """Return what the processes print, and assert that they exit 0 in time; none is left."""
    try:
        printed = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n---\n".join(printed)
    return printed
