"""Which server reads a version from the shared storage, and which from a host that has it. Pure.

    a server of its host has or reads it  ──> now: the servers of a host share one copy
    a host has it and sends it to none    ──> from there
    fewer hosts than allowed read storage ──> from storage
    otherwise                             ──> wait, until a host has it, or ``patience_s`` is over

A host sends to one host at a time, at full speed: the number of hosts that have the version doubles in each round.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from realsys.manager.routing.server_table import Server
from realsys.types import PublishedVersion

STORAGE: tuple[str, ...] = ()  # sources of a server that reads the shared storage


@dataclass(frozen=True, slots=True)
class FanOut:
    """Limits of the way of a version to the hosts.

    storage_readers  hosts that read a version from the shared storage at a time; 0: all of them
    patience_s       time that a server waits for a host to read from; then it reads the storage
    """

    storage_readers: int = 0
    patience_s: float = 60.0

    def sources(self, server: Server, servers: Iterable[Server], published: PublishedVersion) -> tuple[str, ...] | None:
        """Return the URLs of the copies that a server may read, ``STORAGE`` for none, or None if it must wait."""
        host = server.address.host
        if not self.storage_readers or not server.address.copies:
            return STORAGE
        copies: dict[str, str] = {}  # host that has the version -> URL of its copy
        reading: dict[str, str] = {}  # host that reads it -> URL from which, or ""
        for other in servers:
            if other.verified == published and other.address.copies and not other.quarantined:
                copies.setdefault(other.address.host, other.address.copies)
            elif other.target == published:
                reading.setdefault(other.address.host, other.source)
        if host in copies or host in reading:
            return STORAGE
        free = sorted(set(copies.values()) - set(reading.values()))
        if free:
            return (free[0],)
        from_storage = sum(not source for source in reading.values())
        return STORAGE if from_storage < self.storage_readers else None
