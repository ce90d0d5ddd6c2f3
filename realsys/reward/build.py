"""The verifiers of a RolloutWorker: a pool of its own, the reward services of the trial, or a judge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from realsys.config.doors import JUDGE
from realsys.config.schema import Config
from realsys.reward.pool import VerifierPool
from realsys.reward.service.dispatch import Bounds
from realsys.reward.service.reward_client import ServiceVerifiers
from realsys.reward.verifier_process import Limits
from realsys.reward.verifiers.base import Item, Verdict

if TYPE_CHECKING:
    from realsys.cluster.worker import WorkerContext


class Verifiers(Protocol):
    """The interface that VerifierPool, ServiceVerifiers and LlmJudge share, for one event loop.

    ``waiting``: items that wait to be begun. ``undecided``: items without a verdict since the start.
    """

    @property
    def waiting(self) -> int: ...

    @property
    def undecided(self) -> int: ...

    async def verify(self, name: str, item: Item) -> Verdict:
        """Judge one completion. Raises RewardError if it has no verdict, NoVerifierError or StuckError if none has."""
        ...

    async def check_answer(self, name: str, item: Item) -> str | None:
        """Return why the row of an item, which has no completion, cannot be judged; None if it can."""
        ...

    def take_failures(self) -> dict[str, int]:
        """Return the items since the last call without a verdict or over a limit, by cause."""
        ...

    async def close(self) -> None: ...


def make_pool(config: Config, *, processes: int = 0, judgements: int = 2) -> VerifierPool:
    """Return the verifier processes of one process of the trial. ``processes`` 0: rollout.reward.processes."""
    reward, data = config.rollout.reward, config.data
    arguments = {data.verifier: data.verifier_args}
    return VerifierPool(processes or reward.processes, Limits.of(reward), arguments, judgements=judgements)


def own_verifiers(config: Config, *, processes: int = 0, sharers: int = 1) -> Verifiers:
    """Return the verifiers of a process that uses no service: a judge, or a pool of ``processes`` as above.

    ``sharers``: processes that share the limits of the judge. Raises ConfigError.
    """
    if config.data.verifier not in JUDGE.builtin:
        return make_pool(config, processes=processes)
    judge: Verifiers = JUDGE.load(config.data.verifier)(config, sharers)
    return judge


async def open_verifiers(ctx: WorkerContext) -> Verifiers:
    """Return the verifiers of a RolloutWorker, on the running event loop: services if ``rollout.reward.services``."""
    config = ctx.config
    if not config.rollout.reward.services:
        return own_verifiers(config, sharers=config.rollout.workers)
    bounds = Bounds(config.cluster.connect_timeout_s, config.manager.rollout_lease_s)
    services = ServiceVerifiers(bounds, ctx.token, check_alive=ctx.check_alive)
    await services.follow(ctx.store, ctx.names.reward_services)
    return services
