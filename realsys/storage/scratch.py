"""Folders that processes have on disks in memory.

A process that is killed leaves its folder there, until the machine has no memory left. `realsys gc` removes a folder
that no process has locked.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

#: file in the folder that every user of it keeps locked
MEMBERS = "members"
PREFIX = "realsys-"


def occupy(folder: Path) -> int:
    """Lock ``folder`` until this process ends or closes the returned descriptor."""
    descriptor = os.open(folder / MEMBERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor
