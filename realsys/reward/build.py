"""The verifiers of a RolloutWorker: its VerifierPool, or the reward services of the trial."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from realsys.config.schema import Config
from realsys.reward.pool import VerifierPool
from realsys.reward.service.dispatch import Bounds
from realsys.reward.service.reward_client import ServiceVerifiers
from realsys.reward.verifier_process import Limits
from realsys.reward.verifiers.base import Item, Verdict

if TYPE_CHECKING:
    from realsys.cluster.worker import WorkerContext


class Verifiers(Protocol):
    """The interface that VerifierPool and ServiceVerifiers share."""

    undecided: int

    @property
    def waiting(self) -> int: ...

    async def verify(self, name: str, item: Item) -> Verdict: ...

    async def check_answer(self, name: str, item: Item) -> str | None: ...

    def take_failures(self) -> dict[str, int]: ...

    async def close(self) -> None: ...


def make_pool(config: Config, *, judgements: int = 2) -> VerifierPool:
    """Return the verifier processes of one process of the trial."""
    reward, data = config.rollout.reward, config.data
    arguments = {data.verifier: data.verifier_args}
    return VerifierPool(reward.processes, Limits.of(reward), arguments, judgements=judgements)


async def open_verifiers(ctx: WorkerContext) -> Verifiers:
    """Return the verifiers that ``rollout.reward.services`` chooses, on the running event loop."""
    config = ctx.config
    if not config.rollout.reward.services:
        return make_pool(config)
    bounds = Bounds(config.cluster.connect_timeout_s, config.manager.rollout_lease_s)
    services = ServiceVerifiers(bounds, ctx.token, check_alive=ctx.check_alive)
    await services.follow(ctx.store, ctx.names.reward_services)
    return services
