"""The verifiers of a process: verifier processes of its own or the trial's reward services, and the trial's judges."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from realsys.config.doors import JUDGE, VERIFIER
from realsys.config.evaluation_sets import verifier_arguments, verifier_field
from realsys.config.schema import Config
from realsys.reward.dispatch import DispatchBounds
from realsys.reward.pool import ItemLimits, VerifierPool, Verifiers
from realsys.reward.reward_client import ServiceVerifiers
from realsys.reward.verifiers.contract import Item, Verdict

if TYPE_CHECKING:
    from realsys.cluster.worker import WorkerContext


class VerifiersByName(Verifiers):
    """Some verifiers by their names, and ``others`` for all further names."""

    def __init__(self, by_name: Mapping[str, Verifiers], others: Verifiers) -> None:
        self._by_name, self._others = by_name, others
        self._all = [*by_name.values(), others]

    @property
    def waiting(self) -> int:
        return sum(each.waiting for each in self._all)

    @property
    def undecided(self) -> int:  # type: ignore[override]
        return sum(each.undecided for each in self._all)

    def take_failures(self) -> dict[str, int]:
        return dict(sum((Counter(each.take_failures()) for each in self._all), Counter()))

    async def verify(self, name: str, item: Item) -> Verdict:
        return await self._by_name.get(name, self._others).verify(name, item)

    async def check_answer(self, name: str, item: Item) -> str | None:
        return await self._by_name.get(name, self._others).check_answer(name, item)

    async def close(self) -> None:
        await asyncio.gather(*(each.close() for each in self._all))


def make_pool(config: Config, *, processes: int = 0, judgements: int = 2) -> VerifierPool:
    """Return verifier processes. ``processes``: their number; 0: rollout.reward.processes. Raises ConfigError."""
    reward, arguments = config.rollout.reward, verifier_arguments(config)
    for name in arguments:
        # This machine may not be the launcher's.
        VERIFIER.at(verifier_field(config, name)).check_settings(name, arguments[name], config)
    return VerifierPool(processes or reward.processes, ItemLimits.of(reward), arguments, judgements=judgements)


def own_verifiers(config: Config, *, processes: int = 0) -> Verifiers:
    """Return the verifiers of a process that judges alone. ``processes``: as in ``make_pool``. Raises ConfigError."""
    return _with_judges(config, make_pool(config, processes=processes), sharers=1)


async def open_verifiers(ctx: WorkerContext) -> Verifiers:
    """Return the verifiers of a RolloutWorker: ``rollout.reward.services`` chooses. Raises ConfigError."""
    config = ctx.config
    others: Verifiers
    if config.rollout.reward.services:
        bounds = DispatchBounds(config.cluster.connect_timeout_s, config.manager.rollout_lease_s)
        others = services = ServiceVerifiers(bounds, ctx.token, check_alive=ctx.check_alive)
        await services.follow(ctx.store, ctx.names.reward_services)
    else:
        others = make_pool(config)
    return _with_judges(config, others, sharers=config.rollout.workers)


def _with_judges(config: Config, others: Verifiers, sharers: int) -> Verifiers:
    """``sharers``: processes of the trial that share the limits of a judge."""
    names = [name for name in verifier_arguments(config) if name in JUDGE.builtin]
    judges: dict[str, Verifiers] = {name: JUDGE.load(name)(config, sharers) for name in names}
    return VerifiersByName(judges, others) if judges else others
