"""An etcd cluster on loopback: several members, TLS, users."""

from __future__ import annotations

import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from realsys.cluster.names.etcd_store import EtcdAccess, import_etcd3
from tests.support.polling import suspend
from tests.support.processes.ports import lasting_ports

START_S = 60.0


@dataclass(frozen=True, slots=True)
class Certificates:
    """An authority, and a certificate for 127.0.0.1 that it signed, for servers and clients."""

    ca: Path
    cert: Path
    key: Path

    @classmethod
    def make(cls, folder: Path) -> Certificates:
        folder.mkdir()
        made = cls(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
        (folder / "config").write_text("[req]\ndistinguished_name=dn\n[dn]\n")
        _request(folder, made.ca, folder / "ca.key", "-subj", "/CN=authority", "-addext", "basicConstraints=CA:TRUE")
        signed = ("-CA", str(made.ca), "-CAkey", str(folder / "ca.key"))
        _request(folder, made.cert, made.key, *signed, "-subj", "/CN=etcd", "-addext", "subjectAltName=IP:127.0.0.1")
        return made


def _request(folder: Path, certificate: Path, key: Path, *arguments: str) -> None:
    """Make a key and its certificate, valid for two days."""
    make = "openssl req -x509 -days 2 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -batch"
    files = ["-config", str(folder / "config"), "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*make.split(), *files, *arguments], check=True, capture_output=True, timeout=60)


class EtcdCluster:
    """Members with their data in ``folder``. With ``certificates``, clients must show one of that authority."""

    def __init__(self, folder: Path, members: int = 3, certificates: Certificates | None = None) -> None:
        ports = lasting_ports(2 * members)
        self._folder = folder
        self._certificates = certificates
        self.addresses = [f"127.0.0.1:{port}" for port in ports[:members]]
        self._peers = [f"http://127.0.0.1:{port}" for port in ports[members:]]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> str:
        return ",".join(self.addresses)

    @property
    def access(self) -> EtcdAccess:
        files = self._certificates
        return EtcdAccess(str(files.ca), str(files.cert), str(files.key)) if files else EtcdAccess()

    def start(self) -> None:
        """Start all members, and wait until they have a leader."""
        for number in range(len(self.addresses)):
            self.start_member(number)
        self.leader()

    def leader(self) -> int:
        """Return the number of the member that leads."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for number in self._processes:
                try:
                    status = self._ask(number, "Maintenance", "Status", "StatusRequest")
                except grpc.RpcError:
                    continue
                if status.leader == status.header.member_id:
                    return number
        raise AssertionError(f"no leader: {(self._folder / 'etcd-0.log').read_text()}")

    def kill(self, number: int) -> None:
        process = self._processes.pop(number)
        process.kill()
        process.wait(60)

    def suspend(self, number: int) -> None:
        """Let a member hang; its connections stay."""
        suspend(self._processes[number])

    def resume(self, number: int) -> None:
        self._processes[number].send_signal(signal.SIGCONT)

    def close(self) -> None:
        for number in list(self._processes):
            self.kill(number)

    def require_users(self, user: str, password: str) -> None:
        """Make ``user``, who may do everything below ``realsys/``, and turn users on."""
        for name, secret in (("root", "root"), (user, password)):
            self._ask(0, "Auth", "UserAdd", "AuthUserAddRequest", name=name, password=secret)
            self._ask(0, "Auth", "RoleAdd", "AuthRoleAddRequest", name=name)
            self._ask(0, "Auth", "UserGrantRole", "AuthUserGrantRoleRequest", user=name, role=name)
        permission = {"permType": 2, "key": b"realsys/", "range_end": b"realsys0"}
        self._ask(0, "Auth", "RoleGrantPermission", "AuthRoleGrantPermissionRequest", name=user, perm=permission)
        self._ask(0, "Auth", "AuthEnable", "AuthEnableRequest")

    def _ask(self, number: int, service: str, method: str, request: str, **fields: Any) -> Any:
        rpc = import_etcd3().etcdrpc
        with self.access.channel(self.addresses[number]) as channel:
            stub = getattr(rpc, f"{service}Stub")(channel)
            return getattr(stub, method)(getattr(rpc, request)(**fields), timeout=5.0)

    def start_member(self, number: int) -> None:
        files, name = self._certificates, f"n{number}"
        client = f"{'https' if files else 'http'}://{self.addresses[number]}"
        cluster = ",".join(f"n{each}={peer}" for each, peer in enumerate(self._peers))
        command = ["etcd", f"--name={name}", f"--data-dir={self._folder / name}", f"--initial-cluster={cluster}"]
        command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
        command += [f"--listen-peer-urls={self._peers[number]}"]
        command += [f"--initial-advertise-peer-urls={self._peers[number]}"]
        command += ["--logger=zap", "--log-level=warn", f"--log-outputs={self._folder / f'etcd-{number}.log'}"]
        command += ["--unsafe-no-fsync", "--heartbeat-interval=100", "--election-timeout=1000"]
        if files:
            command += [f"--cert-file={files.cert}", f"--key-file={files.key}", f"--trusted-ca-file={files.ca}"]
            command += ["--client-cert-auth"]
        self._processes[number] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
