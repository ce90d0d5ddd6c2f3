"""The verifiers of a process: verifier processes of its own or the trial's reward services, and the trial's judges."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING

import msgspec

from realsys.cluster.failpoint import failpoint
from realsys.cluster.http_client import CallFailed, HttpClient
from realsys.cluster.lease import CheckAlive, unleased
from realsys.cluster.names.contract import NameStore, Tree, Watch
from realsys.config.doors import JUDGE, VERIFIER
from realsys.config.evaluation_sets import verifier_arguments, verifier_field
from realsys.config.schema import Config
from realsys.errors import MALFORMED, NoVerifierError, RewardError
from realsys.reward.dispatch import Dispatch, DispatchBounds, Send, Settled
from realsys.reward.pool import ItemLimits, VerifierPool, Verifiers
from realsys.reward.verifier_protocol import (
    CONNECT_S,
    CPU_TIME,
    MAX_ITEM,
    REFUSED,
    RESOURCES,
    SILENCE_S,
    NoVerdict,
    NoVerifier,
    VerifierWork,
    VerifyReply,
    VerifyRequest,
)
from realsys.reward.verifiers.contract import Item, Verdict
from realsys.types import ServerAddress

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


# ---- ServiceVerifiers: the verifiers of the trial's reward services, with the interface of VerifierPool
#
#  verify ──> Dispatch (pure) ──Send──> POST to a service ──lines, reply──> Dispatch ──Settled──> future of the caller
#                ^                                             │ 503, broken connection, silence
#  name store ───┴── clock <───────────────────────────────────┘
#
# consumes    items, the registrations of services, their replies
# waits for   a service with room; the bounds are those of Dispatch
# unblocked   by a reply, by a registration, by the timer of ``Dispatch.due``
# produces    a verdict, RewardError or NoVerifierError for each item


log = logging.getLogger(__name__)

_CLOSED = "the client of the reward services is closed"
_REPLY: msgspec.json.Decoder[VerifyReply] = msgspec.json.Decoder(VerifyReply)
_ADDRESS: msgspec.json.Decoder[ServerAddress] = msgspec.json.Decoder(ServerAddress)
#: statuses that another service would answer, too: malformed, wrong token, too large
_FINAL = (400, 401, 404, 413)


class ServiceVerifiers(Verifiers):
    """Sends items to reward services. For one event loop."""

    def __init__(
        self,
        bounds: DispatchBounds,
        token: str | None,
        *,
        check_alive: CheckAlive = unleased,
        silence_s: float = SILENCE_S,
    ) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._dispatch = Dispatch(bounds, Random(), self._loop.time())
        self._http = HttpClient(token, check_alive=check_alive, faults=_fault)
        self._silence_s = silence_s
        self._numbers = itertools.count()
        self._futures: dict[int, asyncio.Future[Verdict]] = {}
        self._sending: dict[int, asyncio.Task[None]] = {}  # number of a Send -> its request
        self._timer: asyncio.Handle | None = None
        self._acts_soon = False
        self._watch: Watch | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        """Number of items that no service has taken yet."""
        return self._dispatch.waiting

    async def follow(self, store: NameStore, root: str) -> None:
        """Use the services that are registered below ``root``, from now on."""

        def changed(tree: Tree) -> None:  # called on a thread of the store
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.registered, tree)

        self._watch = await asyncio.to_thread(store.watch, root, changed)

    def registered(self, tree: Tree) -> None:
        """Use these services: key -> JSON ServerAddress. An entry that cannot be read is left out."""
        addresses = {}
        for key, value in tree.items():
            try:
                address = _ADDRESS.decode(value)
            except MALFORMED as error:
                log.error("name store: %s is not the address of a reward service: %s", key, error)
            else:
                addresses[address.name] = address.url, address.incarnation
                log.info("%s is at %s", address.name, address.url)
        self._dispatch.registered(addresses)
        self._wake()

    async def close(self) -> None:
        """End all requests. Items without a verdict get a NoVerifierError."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for future in self._futures.values():
            if not future.done():
                future.set_exception(NoVerifierError(_CLOSED))
        requests = list(self._sending.values())
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await self._http.close()
        if self._watch is not None:
            await asyncio.to_thread(self._watch.close)

    async def judge(self, work: VerifierWork, item: bytes) -> Verdict:
        if len(item) > MAX_ITEM:
            problem = f"an item for verifier {work.name} has {len(item)} bytes, a reward service takes {MAX_ITEM}"
            raise RewardError(f"{problem}: set rollout.reward.services=0", RESOURCES)
        if self._closed:
            raise NoVerifierError(_CLOSED)
        number = next(self._numbers)
        future: asyncio.Future[Verdict] = self._loop.create_future()
        self._futures[number] = future
        self._dispatch.add(number, work, item, self._loop.time())
        self._wake()
        try:
            return await future
        finally:
            del self._futures[number]
            aborted = self._dispatch.drop(number)  # nothing to drop unless the caller was cancelled
            if (request := self._sending.get(-1 if aborted is None else aborted)) is not None:
                request.cancel()

    # ---- shell of the dispatch

    def _wake(self) -> None:
        """Act behind all callers that are ready to run in this turn of the event loop."""
        if not self._acts_soon and not self._closed:
            self._acts_soon = True
            self._loop.call_soon(self._act)

    def _act(self) -> None:
        """Send and expire items, and set the timer for the next time."""
        self._acts_soon = False
        if self._timer is not None:
            self._timer.cancel()
        if self._closed:
            return
        now = self._loop.time()
        self._settle(self._dispatch.expire(now))
        for send in self._dispatch.take(now):
            request = self._loop.create_task(self._request(send), name=f"verify at {send.instance.name}")
            self._sending[send.number] = request
            request.add_done_callback(lambda _, number=send.number: self._sending.pop(number))  # type: ignore[misc]
        due = self._dispatch.due(now)
        self._timer = None if due is None else self._loop.call_at(due, self._act)

    async def _request(self, send: Send) -> None:
        """Make one request; report its end to the dispatch."""
        instance, clock = send.instance, self._loop.time
        items = [msgspec.Raw(entry.item) for entry in send.entries.values()]
        body = VerifyRequest(send.work.name, items, send.work.check)

        def take(data: bytes) -> None:
            self._settle(self._dispatch.decided(send.number, _REPLY.decode(data).decided, clock()))
            self._wake()

        url = f"{instance.url}/verify"
        ended: list[Settled] = []
        try:
            take(await self._http.call(url, body, self._silence_s, CONNECT_S, take))
            ended = self._dispatch.lost(send.number, "it left items out of its reply", clock(), died=False)
        except MALFORMED as error:
            ended = self._dispatch.lost(send.number, f"its reply cannot be read: {error}", clock(), died=False)
        except CallFailed as failed:
            ended = self._failed(send, failed, clock())
        except Exception as error:  # a defect must not leave the callers waiting; it is theirs to report
            log.exception("verify at %s failed", instance.name)
            ended = self._dispatch.rejected(send.number, f"the client failed: {type(error).__name__}: {error}")
        self._settle(ended)
        self._wake()

    def _failed(self, send: Send, failed: CallFailed, now: float) -> list[Settled]:
        name = send.instance.name
        if failed.status == 503 and failed.retry_after_s:
            self._dispatch.refused(send.number, failed.retry_after_s, failed.reason, now)
            return []
        if failed.status in _FINAL:
            return self._dispatch.rejected(send.number, f"{name} refused the request: {failed}")
        log.warning("%s: %s; its %d items go to another service", name, failed, len(send.entries))
        died = not (failed.status or failed.timed_out or failed.unreachable)
        return self._dispatch.lost(send.number, str(failed), now, died=died)

    def _settle(self, settled: list[Settled]) -> None:
        """Hand outcomes to their callers."""
        for end in settled:
            future, outcome = self._futures[end.number], end.outcome
            if end.over_limit:
                self.failures[CPU_TIME] += 1
            if isinstance(outcome, NoVerdict) and outcome.cause != REFUSED:
                self.failures[outcome.cause] += 1
                self.undecided += 1
            if future.done():  # the caller was cancelled in this turn of the event loop
                continue
            if isinstance(outcome, Verdict):
                future.set_result(outcome)
            elif isinstance(outcome, NoVerifier):
                future.set_exception(NoVerifierError(outcome.message))
            else:
                future.set_exception(RewardError(outcome.message, outcome.cause))


def _fault(replied: bool) -> str:
    return failpoint("reward.reply") if replied else failpoint("reward.call")
