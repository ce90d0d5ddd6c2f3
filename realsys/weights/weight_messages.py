"""Requests and replies about the weights of a role, between the MasterWorker and the ModelWorkers."""

from __future__ import annotations

from typing import Any

import msgspec


class CopyWeightsRequest(msgspec.Struct):
    """Copy this rank's share of ``role``'s weights (HF names) to host memory, as version ``version``.

    Training continues after the reply. Any number of SaveWeightsRequest and DigestWeightsRequest may follow.
    """

    role: str
    version: int


class SaveWeightsRequest(msgspec.Struct):
    """Write this rank's copy of version ``version`` of ``role``'s weights, while later requests are served.

    ``plan``: made by the weight transport's publisher, read by its writers
    (``realsys.weights.contract``).
    """

    role: str
    version: int
    plan: Any = None


class DigestWeightsRequest(msgspec.Struct):
    """Compute the checksums of this rank's copy of version ``version``, and write nothing."""

    role: str
    version: int


class SaveWeightsReply(msgspec.Struct):
    """Reply to a SaveWeightsRequest or a DigestWeightsRequest.

    report     made by this rank's writer of the weight transport, read by its publisher; None: nothing was written
    worker     index of the ModelWorker
    checksums  HF name -> xxh3-64 of the tensor's bytes, hex
    """

    report: Any = None
    seconds: float = 0.0
    worker: int = 0
    checksums: dict[str, str] = {}
