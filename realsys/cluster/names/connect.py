"""Make the name store and the keys of a trial from its configuration."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
from pathlib import Path

from realsys.cluster.names.contract import Names, NameStore
from realsys.cluster.names.file_store import FileNameStore
from realsys.cluster.network import bind_problem, is_loopback, split_host_port
from realsys.cluster.process import STORE_ADDRESS
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.schema_cluster import NameStoreConfig
from realsys.errors import ConfigError

# One etcd call may take this long. It must end well before the lease that it may be renewing.
CALL_TIMEOUT_S = 5.0
PASSWORD_VARIABLE = "REALSYS_ETCD_PASSWORD"


def make_name_store(
    config: Config, paths: TrialPaths, call_timeout_s: float = CALL_TIMEOUT_S, *, known: bool = False
) -> NameStore:
    """Connect to the backend that ``config.cluster.name_store`` names. Raises NameStoreError and ConfigError.

    ``known``: the launcher has reached it, so an etcd that does not answer is away, and is waited for.
    """
    settings = config.cluster.name_store
    if settings.backend == "file":
        return FileNameStore(Path(settings.root).resolve() if settings.root else paths.name_store)
    # Imported here: etcd's client and grpc take time to load and are needed for etcd only.
    from realsys.cluster.names.etcd_store import EtcdAccess, EtcdNameStore

    lease_s = config.cluster.lease_s
    if settings.start:
        access = EtcdAccess.by_one_file(paths.etcd_certificate)
    else:
        access = EtcdAccess(settings.ca, settings.cert, settings.key, settings.user, etcd_password(settings))
    return EtcdNameStore(store_address(config, paths), min(call_timeout_s, lease_s / 3), lease_s, access, known=known)


def store_address(config: Config, paths: TrialPaths) -> str:
    """Return the address of etcd. Of an own etcd on another machine, a worker has it in its environment."""
    if address := os.environ.get(STORE_ADDRESS):
        return address
    if is_elsewhere(config) and paths.store_address.exists():
        return paths.store_address.read_text("utf-8")
    return config.cluster.name_store.address


def is_elsewhere(config: Config) -> bool:
    """Return True if the run starts its etcd on its first node, whose address is not in the configuration."""
    settings = config.cluster.name_store
    return bool(settings.start and config.cluster.nodes and is_loopback(settings.address.rpartition(":")[0]))


def is_known(config: Config, paths: TrialPaths) -> bool:
    """Return True if the name store can be asked: its address is known, and an own etcd has its certificate."""
    if config.cluster.name_store.start and not paths.etcd_certificate.exists():
        return False
    return not is_elsewhere(config) or paths.store_address.exists()


def check_own_etcd(address: str) -> None:
    """Check that the run's own etcd can be started on this machine, at ``address``. Raises ConfigError."""
    here = socket.gethostname()
    if shutil.which("etcd") is None:
        problem = f"there is no program named etcd on the PATH of {here}: install etcd-server there"
        raise ConfigError("cluster.name_store.start", True, problem)
    if problem := bind_problem(*split_host_port(address)):
        remedy = "set another port, or cluster.name_store.start=false to use what listens there"
        raise ConfigError("cluster.name_store.address", address, f"cannot be bound on {here}: {problem}: {remedy}")


def etcd_password(settings: NameStoreConfig) -> str:
    """Return the password of ``settings.user``: from its file, else from the environment. Raises ConfigError."""
    field = "cluster.name_store.password_file"
    try:
        text = Path(settings.password_file).read_text("utf-8") if settings.password_file else ""
    except (OSError, UnicodeDecodeError) as exc:
        problem = getattr(exc, "strerror", None) or "must be UTF-8 text"
        raise ConfigError(field, settings.password_file, f"cannot be read: {problem}") from None
    password = text.strip() or os.environ.get(PASSWORD_VARIABLE, "")
    if settings.user and not password:
        problem = f"has no password for {settings.user!r}: name a file that holds it, or set {PASSWORD_VARIABLE}"
        raise ConfigError(field, settings.password_file, problem)
    return password


def trial_names(config: Config) -> Names:
    """Return the keys of this trial for the user that runs it.

    The user is found by uid, because the environment may differ between launchers of one user.
    """
    uid = os.getuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:  # containers run under a uid without a passwd entry
        user = f"uid{uid}"
    return Names(user, config.experiment, config.trial)
