"""The name store of a run that starts its own: becomes etcd at the configured address, with its data in the trial.

The process is replaced by etcd, so that signals reach etcd itself. The kernel's order to die with the parent stays.

Where a batch system sends SIGTERM to every process of a job, etcd ends with it, and the last checkpoint of the run
needs etcd. There this process stays, and starts etcd again until its agent stops it. The keys are in etcd's data.

Only here is it known whether this machine can run etcd: with several machines the launcher may be on another one.

etcd and all of its clients have one certificate, which is also its own authority. etcd takes a client only with it, and
a client trusts only an etcd that has it. A process that can read the file is a member of the trial; no other process
reads or writes a key of etcd.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from realsys.cluster import prctl
from realsys.cluster.files import write_secret
from realsys.cluster.names.connect import check_own_etcd, store_address
from realsys.cluster.network import PORTS, free_ports, split_host_port
from realsys.cluster.process import (
    RUN_ID,
    SHIELDED,
    StopSignals,
    configure_logging,
    die_with_parent,
    record_of,
    write_error,
)
from realsys.config.paths import TrialPaths, read_config
from realsys.errors import ConfigError

log = logging.getLogger(__name__)

_LIFETIME = datetime.timedelta(days=3650)
#: address of etcd as its only peer
_LOOPBACK = "127.0.0.1"


def keep(argv: list[str]) -> int:
    """Run etcd until this process gets a signal to stop, or etcd fails. Returns the exit code."""
    signals = StopSignals(threading.Event())
    signals.install()
    while True:
        # etcd dies with this process, also if that is killed.
        etcd = subprocess.Popen(argv, preexec_fn=lambda: prctl.die_with_parent(signal.SIGKILL, None))
        signals.on_stop(etcd.terminate)
        code = etcd.wait()
        if signals.stop.is_set():
            return 0
        if code not in (0, -signal.SIGTERM):
            return code
        log.info("etcd was ended by a signal to all processes of the job; it is started again")


def command(address: str, peer: str, data: Path, member: str, tls: Sequence[str] = ()) -> list[str]:
    """Return argv of etcd with one member of this name. ``peer`` is unused, but etcd does not start without it.

    ``tls``: flags with its certificates.
    """
    scheme = "https" if tls else "http"
    client, peer = f"{scheme}://{address}", f"{scheme}://{peer}"
    return [
        "etcd",
        f"--name={member}",
        f"--data-dir={data}",
        f"--initial-cluster={member}={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--listen-peer-urls={peer}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        *tls,
        "--logger=zap",
        "--log-level=warn",
        "--log-outputs=stderr",
        # The keys belong to live processes, so they need not survive a crash of the machine.
        "--unsafe-no-fsync",
        # Short elections: etcd grants no lease shorter than one and a half of them.
        "--heartbeat-interval=50",
        "--election-timeout=500",
    ]


def ensure_certificate(path: Path, host: str) -> Path:
    """Make the certificate and its key for ``host``, in one PEM file that only this user can read, if it is missing.

    The launcher removes the file before a run. When etcd starts again in a run, the certificate stays, because running
    clients have read it. Returns a file with the certificate alone: etcd refuses one that also has a key as that of
    its authority.
    """
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "etcd of a realsys trial")])
        now = datetime.datetime.now(datetime.UTC)
        # etcd passes requests over HTTP to itself, as a client with its own certificate.
        usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))  # the clocks of two hosts may differ
            .not_valid_after(now + _LIFETIME)
            .add_extension(x509.SubjectAlternativeName({_name(host), _name(_LOOPBACK)}), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .sign(key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        write_secret(path, certificate.public_bytes(pem) + private)
    authority = path.with_suffix(".ca.pem")
    write_secret(authority, x509.load_pem_x509_certificate(path.read_bytes()).public_bytes(serialization.Encoding.PEM))
    return authority


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def main() -> NoReturn:
    parser = argparse.ArgumentParser(
        prog="python -m realsys.workers.name_store", description="The name store of a trial."
    )
    parser.add_argument("--trial-dir", type=Path, required=True, help="folder that holds the trial's config.json")
    parser.add_argument("--index", type=int, required=True, help="0")
    arguments = parser.parse_args()
    configure_logging(f"name_store/{arguments.index}")
    die_with_parent()
    paths = TrialPaths(arguments.trial_dir.resolve())
    config = read_config(paths.config)
    os.environ[PORTS] = config.cluster.ports
    address = store_address(config, paths)
    try:
        check_own_etcd(address)
        authority = ensure_certificate(paths.etcd_certificate, split_host_port(address)[0])
    except ConfigError as error:
        log.critical("%s", error)
        write_error(paths.errors, record_of("name_store", arguments.index, error))
        sys.exit(error.exit_code)
    peer = f"127.0.0.1:{free_ports(1)[0]}"
    # take only clients and peers with this certificate
    files = {"cert": paths.etcd_certificate, "key": paths.etcd_certificate, "trusted-ca": authority}
    flags = [flag for kind, path in files.items() for flag in (f"--{kind}-file={path}", f"--peer-{kind}-file={path}")]
    tls = [*flags, "--client-cert-auth", "--peer-client-cert-auth"]
    argv = command(address, peer, paths.own_etcd, os.environ.get(RUN_ID, "realsys"), tls)
    if SHIELDED in os.environ:
        sys.exit(keep(argv))
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main()
