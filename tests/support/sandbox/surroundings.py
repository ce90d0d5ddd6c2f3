"""The outside of a sandbox, as attacks look for it: files, servers, secrets, processes. It notes what reaches it."""

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ENVIRONMENT = "REALSYS_CANARY"  # variable of the test process, and so of the verifier process
SHARED_FOLDERS = ("/", "/tmp", "/var/tmp", "/dev/shm", "/run", "/etc", "/usr", "/usr/bin", "/opt", "/root")
_IPC_KEY = 0x7EA15  # key in the attack files/leaves_shared_memory
_SOURCE = """
import types
def _syscall(number, *arguments):
    import ctypes
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return call(ctypes.c_long(number), *words)
def _others():
    import os
    try:
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    except OSError:
        pids = set(range(1, 100))
    return sorted({*pids, *OUTSIDE.pids, os.getppid()} - {0, os.getpid()})
OUTSIDE = types.SimpleNamespace(syscall=_syscall, others=_others, **{values!r})
"""


@dataclass
class Outside:
    """Files of a trial in ``folder``, and servers that note who knocks. ``opened`` opens and closes it."""

    folder: Path
    knocks: list[str] = field(default_factory=list)
    mark: str = field(default_factory=lambda: f"mark-{secrets.token_hex(6)}")

    def open(self) -> None:
        self.files = [self.folder / name for name in ("token", "config.yaml", "train.jsonl")]
        for file in self.files:
            file.write_text("as it was\n")
        self._before = self._state()
        self._stop = threading.Event()
        self._tcp = socket.create_server(("0.0.0.0", 0))
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("127.0.0.1", 0))
        self._path, self._abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self._path.bind(str(self.folder / "socket"))
        self._abstract.bind(f"\0{self.mark}")
        servers = {"tcp": self._tcp, "udp": self._udp, "unix": self._path, "abstract": self._abstract}
        self._threads = [threading.Thread(target=self._serve, args=pair) for pair in servers.items()]
        for thread in self._threads:
            thread.start()

    def source(self) -> str:
        """Return Python source that defines ``OUTSIDE`` for an attack."""
        values = {
            "mark": self.mark,
            "files": [str(file) for file in self.files],
            "address": _own_address(),
            "tcp": self._tcp.getsockname()[1],
            "udp": self._udp.getsockname()[1],
            "unix": str(self.folder / "socket"),
            "abstract": self.mark,
            "environment": ENVIRONMENT,
            "pids": sorted(self.processes()),
        }
        return _SOURCE.replace("{values!r}", repr(values))

    def processes(self) -> set[int]:
        """Return the numbers of this process and all below it."""
        own = psutil.Process()
        return {own.pid, *(child.pid for child in own.children(recursive=True))}

    def changes(self) -> list[str]:
        """Return what differs from the time of ``open``."""
        after = self._state()
        changed = [
            f"{what}: {self._before[what]} is now {after[what]}" for what in after if after[what] != self._before[what]
        ]
        return changed + [f"a knock at the {name} server" for name in self.knocks]

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for server in (self._tcp, self._udp, self._path, self._abstract):
            server.close()

    def _serve(self, name: str, server: socket.socket) -> None:
        server.settimeout(0.1)
        if name in ("unix", "abstract"):
            server.listen()
        while not self._stop.is_set():
            try:
                if name == "udp":
                    _, sender = server.recvfrom(64)
                    server.sendto(b"who is there?", sender)
                else:
                    server.accept()[0].close()
            except TimeoutError:
                continue
            self.knocks.append(name)

    def _state(self) -> dict[str, object]:
        files = {str(file): _file_state(file) for file in self.files}
        marked = [f"{folder}/{self.mark}" for folder in SHARED_FOLDERS if os.path.lexists(f"{folder}/{self.mark}")]
        kinds = {kind: Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:] for kind in ("shm", "sem", "msg")}
        left = [kind for kind, lines in kinds.items() if any(line.split()[0] == str(_IPC_KEY) for line in lines)]
        names = sorted(path.name for path in self.folder.iterdir() if path.name != "socket")
        system = {"host name": socket.gethostname(), "files of the trial": names, "marked files": marked, "ipc": left}
        return {**files, **system}


@contextlib.contextmanager
def opened(outside: Outside) -> Iterator[Outside]:
    outside.open()
    try:
        yield outside
    finally:
        outside.close()


def _file_state(file: Path) -> object:
    try:
        status = file.stat()
        return file.read_text(), status.st_mode, status.st_nlink, status.st_mtime_ns
    except OSError as error:
        return error.strerror


def _own_address() -> str:
    """Return an address of this machine that is not loopback, if it has one."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return address.address
    return "127.0.0.1"
