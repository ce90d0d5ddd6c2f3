"""Several hosts on one machine: network namespaces that a bridge joins.

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
    for program in ("ip", "bridge", "unshare"):
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


class Hosts:
    """Context with numbered hosts: names, addresses and interfaces. Removed when it is left.

    A bridge for each rack, and one between them, join the hosts. ``cut`` and ``part`` break connections there, so no
    host sees its interface go down, as with a switch that fails.
    """

    def __init__(self, count: int = 2, *, racks: Sequence[int] = (), ipv6: bool = False) -> None:
        """``racks``: that of each host; default: each host has its own."""
        self._racks = racks or range(count)
        tag = uuid.uuid4().hex[:6]
        self.switch = f"rs{tag}switch"
        self.spaces = [f"rs{tag}{chr(ord('a') + number)}" for number in range(count)]
        self.names = [f"node{chr(ord('a') + number)}" for number in range(count)]
        # Hosts of a cluster need not name them alike.
        self.interfaces = ["fab0", "ib7", "net1", "eth5", "ens3"][:count]
        self.subnet = "fd77:5::/64" if ipv6 else "10.77.5.0/24"
        prefix = self.subnet.partition("/")[0].removesuffix("0")
        self.addresses = [f"{prefix}{number + 1}" for number in range(count)]

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        _ip("netns", "add", self.switch)
        self._bridge("spine")
        for rack in set(self._racks):
            self._bridge(f"rack{rack}")
            _ip("-n", self.switch, "link", "add", f"up{rack}", "type", "veth", "peer", "name", f"down{rack}")
            _ip("-n", self.switch, "link", "set", f"up{rack}", "master", "spine", "up")
            _ip("-n", self.switch, "link", "set", f"down{rack}", "master", f"rack{rack}", "up")
        for number, space in enumerate(self.spaces):
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            folder = NETNS_FILES / space
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.names[number]}\n")
            interface, port = self.interfaces[number], f"port{number}"
            ends = ("link", "add", interface, "netns", space, "type", "veth")
            _ip(*ends, "peer", "name", port, "netns", self.switch)
            _ip("-n", self.switch, "link", "set", port, "master", f"rack{self._racks[number]}", "up")
            address = f"{self.addresses[number]}/{self.subnet.partition('/')[2]}"
            # Without duplicate address detection, during which an IPv6 address cannot be bound.
            _ip("-n", space, "addr", "add", address, "dev", interface, *(["nodad"] if ":" in address else []))
            _ip("-n", space, "link", "set", interface, "up")

    def _bridge(self, name: str) -> None:
        _ip("-n", self.switch, "link", "add", name, "type", "bridge")
        _ip("-n", self.switch, "link", "set", name, "up")

    def __exit__(self, *_: object) -> None:
        for space in (*self.spaces, self.switch):
            _ip("netns", "del", space, check=False)
            shutil.rmtree(NETNS_FILES / space, ignore_errors=True)

    def cut(self, host: int, *, heal: bool = False) -> None:
        """Cut a host off from all others, or connect it again."""
        self._port(f"port{host}", "state", "3" if heal else "0")

    def part(self, *racks: int, heal: bool = False) -> None:
        """Cut these racks off from each other, but not from the rest; or connect them again."""
        for rack in racks:
            self._port(f"up{rack}", "isolated", "off" if heal else "on")

    def _port(self, port: str, *setting: str) -> None:
        argv = ["bridge", "-n", self.switch, "link", "set", "dev", port, *setting]
        subprocess.run(argv, check=True, capture_output=True, timeout=COMMAND_TIMEOUT_S)

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on a host, under the host's own name. All of it is one process.

        The shared memory of one command is not seen by any other one, as on hosts apart.
        """
        script = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        inside = ["sh", "-c", script, self.names[host], *argv]
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
