"""Checks what only this machine can tell, before anything starts: addresses, etcd, weight files, disk space.

The checks over the configuration are in realsys.config.rules. Every error names the field to change.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from realsys.cluster.names.connect import check_own_etcd, make_name_store, trial_names
from realsys.cluster.network import bind_problem, is_loopback, take_address
from realsys.cluster.stream.sockets import private_folder
from realsys.config.dataflow import dataflow_of, role_settings
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.trial_sizes import disk_bytes, model_of
from realsys.errors import ConfigError, NameStoreError, StreamError
from realsys.model_files.config_json import read_model
from realsys.model_files.weight_headers import check_weights
from realsys.observe.screen.text_figures import size_text

_ETCD_TIMEOUT_S = 5.0
#: Shortest lease with etcd on another host. An election takes seconds, with a lost host or a slow disk tens of seconds.
ELECTION_LEASE_S = 60.0
_GPUS = "cluster.gpus_per_node"
_MOST_ON_CPUS = 100_000_000  # parameters of a model that may train on CPUs unasked


def check_here(config: Config, paths: TrialPaths, *, other_disk: bool = False) -> None:
    """Run all checks of this module; with ``other_disk`` without that of the disk. Raises ConfigError or ModelError."""
    if not config.cluster.nodes:  # else the addresses are those of other machines
        check_addresses(config)
    check_etcd(config, paths)
    for role in dataflow_of(config).roles:
        settings = role_settings(config, role)
        if settings.path:
            check_weights(Path(settings.path), read_model(Path(settings.path), settings.head))
    is_written = paths.config.exists() or config.evaluate_only  # an evaluation links to the weights that it serves
    if not other_disk and not is_written:
        check_disk(config, disk_bytes(config, dataflow_of(config)))


def check_gpus_are_given(config: Config, given: Collection[str]) -> Iterator[str]:
    """Yield a warning if nothing tells how many GPUs the nodes have. A large model is refused then.

    ``given``: keys of the command line and of chosen files. Raises ConfigError or ModelError.
    """
    cluster = config.cluster
    if not cluster.nodes or cluster.gpus_per_node or _GPUS in given:
        return
    remedy = f"say how many GPUs a node has: {_GPUS}=8, or =0 for CPUs"
    if (parameters := model_of(config).parameters) > _MOST_ON_CPUS:
        problem = f"is the default, and a model of {parameters / 1e9:.1f}B parameters would train on CPUs: {remedy}"
        raise ConfigError(_GPUS, 0, problem)
    yield f"warning: all processes run on CPUs: {remedy}"


def check_addresses(config: Config) -> None:
    """Try every address that the workers will bind, and the folder of their Unix sockets. Raises ConfigError."""
    cluster, port = config.cluster, config.manager.port
    host = take_address(config, dict(os.environ)).cluster.host
    if port and (problem := bind_problem(host, port)):
        remedy = "choose another port, or 0 for any free one"
        raise ConfigError("manager.port", port, f"cannot be bound on {host}: {problem}: {remedy}")
    if is_loopback(host):  # then the streams are Unix sockets
        try:
            private_folder()
        except StreamError as error:
            raise ConfigError("cluster.host", host, str(error)) from None
    if cluster.name_store.start:
        check_own_etcd(cluster.name_store.address)


def check_etcd(config: Config, paths: TrialPaths) -> None:
    """Read from the etcd that the run uses, unless it starts its own. Raises ConfigError."""
    cluster, settings = config.cluster, config.cluster.name_store
    if settings.backend != "etcd" or settings.start:
        return
    hosts = [address.rpartition(":")[0] for address in settings.address.split(",")]
    if cluster.machines > 1 and (loopback := next(filter(is_loopback, hosts), "")):
        problem = f"each of the {cluster.machines} nodes would look for etcd on itself ({loopback})"
        raise ConfigError("cluster.name_store.address", settings.address, f"{problem}: name the host that has it")
    # Of several nodes most are on another host than etcd, wherever it is.
    elsewhere = hosts[0] if cluster.machines > 1 else next((host for host in hosts if bind_problem(host, 0)), "")
    if elsewhere and cluster.lease_s < ELECTION_LEASE_S:
        problem = f"must be at least {ELECTION_LEASE_S:g} with etcd on another host ({elsewhere})"
        reason = "while its members elect a leader no lease is renewed, and the leases of all workers lapse together"
        raise ConfigError("cluster.lease_s", cluster.lease_s, f"{problem}: {reason}")
    store = None
    try:
        store = make_name_store(config, paths, min(_ETCD_TIMEOUT_S, cluster.connect_timeout_s))
        store.get_subtree(trial_names(config).heartbeats)
    except NameStoreError as error:
        raise ConfigError("cluster.name_store.address", settings.address, str(error)) from None
    finally:
        if store is not None:
            store.close()


def check_disk(config: Config, need: int) -> None:
    """Refuse a trial whose weights and checkpoints do not fit on the disk. Raises ConfigError."""
    free = free_bytes(config)
    if need > free:
        sizes = f"weights and checkpoints need about {size_text(need)}, {size_text(free)} are free"
        remedy = "name another disk, or lower checkpoint.keep or weights.keep_versions"
        raise ConfigError("fileroot", config.fileroot, f"{sizes}: {remedy}")


def disk_warnings(config: Config, paths: TrialPaths) -> list[str]:
    """Return a line if a new trial of other machines does not fit on this machine's disk, which may not be theirs."""
    if paths.config.exists():
        return []
    try:
        check_disk(config, disk_bytes(config, dataflow_of(config)))
    except ConfigError as error:
        return [f"warning: if the nodes have the same disk as this machine: {error}"]
    return []


def free_bytes(config: Config) -> int:
    """Return the free space of the disk that has ``fileroot``, or will have it."""
    root = Path(config.fileroot)
    return shutil.disk_usage(next(p for p in (root, *root.parents) if p.exists())).free
