"""Make the name store and the keys of a trial from its configuration."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from realsys.cluster.store.base import NameStore
from realsys.cluster.store.file_store import FileNameStore
from realsys.cluster.store.names import Names
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config

# One etcd call may take this long. It must end well before the lease that it may be renewing.
CALL_TIMEOUT_S = 5.0


def make_name_store(config: Config, paths: TrialPaths) -> NameStore:
    """Connect to the backend that ``config.cluster.name_store`` names. Raises NameStoreError."""
    settings = config.cluster.name_store
    if settings.backend == "file":
        return FileNameStore(Path(settings.root).resolve() if settings.root else paths.name_store)
    # Imported here: etcd's client and grpc take time to load and are needed for etcd only.
    from realsys.cluster.store.etcd_store import EtcdNameStore

    lease_s = config.cluster.lease_s
    call_timeout_s = min(CALL_TIMEOUT_S, lease_s / 3)
    return EtcdNameStore(settings.address, call_timeout_s=call_timeout_s, retry_timeout_s=lease_s)


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
