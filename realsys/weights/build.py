"""Factory of a process's weight transport. No torch."""

from __future__ import annotations

from realsys.config.doors import TRANSPORT
from realsys.config.schema import Config
from realsys.weights.base import Transport


def build(config: Config) -> Transport:
    """Make the transport that ``weights.transport`` names. Raises ConfigError."""
    transport: Transport = TRANSPORT.make(config.weights.transport, config, config.weights.transport_args)
    return transport
