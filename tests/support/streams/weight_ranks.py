"""The ranks of an actor, as a Publisher calls them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from realsys.model_calls import Empty
from realsys.train.requests import CopyWeightsRequest, DigestWeightsRequest, SaveWeightsReply, SaveWeightsRequest


@dataclass
class WeightRanks:
    """Ranks whose writing is ``save``. ``copied``: the versions of which they were asked for a copy."""

    save: Callable[[SaveWeightsRequest], Awaitable[list[SaveWeightsReply]]]
    copied: list[int] = field(default_factory=list)

    async def copy_weights(self, request: CopyWeightsRequest) -> list[Empty]:
        self.copied.append(request.version)
        return [Empty()]

    async def save_weights(self, request: SaveWeightsRequest) -> list[SaveWeightsReply]:
        assert self.copied[-1] == request.version, "the copy of an earlier version is overwritten"
        return await self.save(request)

    async def digest_weights(self, request: DigestWeightsRequest) -> list[SaveWeightsReply]:
        assert self.copied[-1] == request.version, "the copy of an earlier version is overwritten"
        return [SaveWeightsReply(None, checksums={"weight": f"{request.version}"})]
