"""The range of ports on which the processes of a trial listen."""

from __future__ import annotations

import re

from realsys.errors import ConfigError

FIELD = "cluster.ports"
_HIGHEST = 65535


def port_range(text: str) -> range:
    """Return the ports of ``low-high``; no port for "". Raises ConfigError."""
    if not text:
        return range(0)
    parts = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if parts is None:
        raise ConfigError(FIELD, text, "must be low-high, such as 20000-20999")
    low, high = map(int, parts.groups())
    if not 0 < low <= high <= _HIGHEST:
        raise ConfigError(FIELD, text, f"must be two ports between 1 and {_HIGHEST}, the lower one first")
    return range(low, high + 1)
