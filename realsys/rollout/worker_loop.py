"""The loop of a RolloutWorker.

    allocate ──tickets──> one task per ticket: prompt ──> n episodes ──> push to a DP head ──> finish
       ^                                                       │ too few succeeded, no signal     │
       └── capacity is free again <─── finish: failed, rejected or filtered, with its reason <────┘

consumes    tickets
waits for   free capacity, then for a grant of the manager (a held call, no polling)
unblocked   by the end of a rollout, by a grant, or by ``stop``
produces    groups on the push-pull stream, and one finish per ticket

It has no state that a restart must recover: the manager reissues the tickets that were running.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from realsys.cluster.failpoint import failpoint
from realsys.cluster.process import resident_bytes
from realsys.cluster.stream.push_pull import Pusher
from realsys.data.prompts import PromptDataset
from realsys.errors import RealsysError, RewardError, StuckError
from realsys.manager.client import ManagerClient, RolloutSuperseded
from realsys.manager.ledger.events import Outcome
from realsys.manager.messages import (
    MAX_TICKETS,
    MAX_WAIT_S,
    AllocateRequest,
    Answer,
    FinishRequest,
    TouchRequest,
)
from realsys.observe import spans
from realsys.observe.spans import span
from realsys.reward.pool import Verifiers
from realsys.rollout.group_player import GroupPlayer, Played, one_line
from realsys.rollout.stores import EvaluationStore
from realsys.types import Episode, Group, Ticket

log = logging.getLogger(__name__)

QUIET_S = 600.0  # if rollouts run and none ends for this time, the log has a warning


@dataclass(frozen=True, slots=True)
class RolloutLoopParts:
    """The collaborators of the loop."""

    manager: ManagerClient
    player: GroupPlayer
    prompts: PromptDataset
    pusher: Pusher
    verifiers: Verifiers
    evaluations: EvaluationStore


class _Stopped(Exception):
    """Signal that ends the loop's tasks after ``stop``."""


class RolloutLoop:
    """Loop that keeps up to ``max_groups`` groups of ``group_size`` episodes running.

    Capacity is counted in episodes, so that an evaluation, with one episode per problem, uses all of it.
    """

    def __init__(
        self,
        parts: RolloutLoopParts,
        worker: str,
        *,
        max_groups: int,
        group_size: int,
        incarnation: str = "",
        touch_s: float = 60.0,
    ) -> None:
        """``touch_s``: seconds between two renewals of the leases of the running attempts."""
        self._parts = parts
        self._worker = worker
        self._incarnation = incarnation
        self._group_size = group_size
        self._touch_s = touch_s
        self._attempts: set[tuple[str, int]] = set()  # running
        self._free = max_groups * group_size  # episodes
        self._freed = asyncio.Event()
        self._quiet_since = 0.0  # end of the last rollout, or begin of the only ones
        self.running = 0  # rollouts in progress
        self.accepted = 0
        self.failed = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Run until ``stop``. Raises errors that must end the process: no manager, or a wrong token."""
        try:
            async with asyncio.TaskGroup() as tasks:  # the first error, or the stop, cancels all others
                tasks.create_task(_stop(stop), name="stop")
                tasks.create_task(self._touch(), name="touch")
                await self._feed(tasks)
        except ExceptionGroup as errors:
            for error in errors.exceptions:
                if not isinstance(error, _Stopped):
                    raise error from None

    async def _feed(self, tasks: asyncio.TaskGroup) -> None:
        """Request as many tickets as there is capacity for, and start a task for each, for ever."""
        while True:
            if self._free < self._group_size:
                self._freed.clear()
                await self._freed.wait()
                continue
            begin = time.monotonic()
            count = min(self._free // self._group_size, MAX_TICKETS)
            request = AllocateRequest(self._worker, count, MAX_WAIT_S, incarnation=self._incarnation)
            with span("allocate", wanted=count) as allocate:
                reply = await self._parts.manager.allocate(request)
                allocate.facts |= {"tickets": len(reply.tickets)} if reply.tickets else {"reason": reply.reason}
            if not reply.tickets and time.monotonic() - begin < min(MAX_WAIT_S, reply.retry_after_s):
                # A manager that is stopping does not hold the call: without a delay this loop would spin.
                await asyncio.sleep(reply.retry_after_s)
            for ticket in reply.tickets:
                self._start(ticket, tasks)

    async def _touch(self) -> None:
        """Renew the leases of all running attempts, for ever: a tool may run for longer than a lease."""
        while True:
            await asyncio.sleep(self._touch_s)
            if self._attempts:
                await self._parts.manager.touch(TouchRequest(self._worker, sorted(self._attempts), resident_bytes()))
                self._warn_if_quiet()

    def _warn_if_quiet(self) -> None:
        quiet_s = time.monotonic() - self._quiet_since
        if quiet_s < QUIET_S:
            return
        self._quiet_since += quiet_s
        log.warning(
            "no rollout has ended for %.0f s, and %d run: their completions are long, or an agent, a tool or a server "
            "hangs; rollout.agent_limits.episode_timeout_s bounds an episode",
            quiet_s,
            self.running,
        )

    def _start(self, ticket: Ticket, tasks: asyncio.TaskGroup) -> None:
        self._free -= ticket.n
        self._quiet_since = self._quiet_since if self.running else time.monotonic()
        self.running += 1
        attempt = ticket.ticket_id, ticket.attempt
        self._attempts.add(attempt)

        begin = spans.now()

        def ended(_: asyncio.Task[None]) -> None:
            facts = {"kind": ticket.kind, "version": ticket.version, "episodes": ticket.n}
            spans.add("rollout", begin, spans.now(), ticket.unit, **facts)
            self._free += ticket.n
            self._quiet_since = time.monotonic()
            self.running -= 1
            self._attempts.discard(attempt)
            self._freed.set()

        task = tasks.create_task(self._rollout(ticket), name=f"rollout {ticket.ticket_id}")
        task.add_done_callback(ended)

    async def _rollout(self, ticket: Ticket) -> None:
        """Run one ticket from prompt to finish. Raises StuckError, and errors of reporting the finish."""
        stuck: StuckError | None = None
        outcome: Outcome = "failed"
        try:
            played = await self._produce(ticket)
        except RolloutSuperseded as error:
            log.info("ticket %s attempt %d: %s", ticket.ticket_id, ticket.attempt, error)
            return
        except RealsysError as error:
            log.warning("ticket %s attempt %d failed: %s", ticket.ticket_id, ticket.attempt, one_line(str(error)))
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, RewardError) and ticket.kind == "train":
                outcome = "rejected"  # a further attempt would have no verdict either
            stuck = error if isinstance(error, StuckError) else None
        except Exception as error:  # the request boundary: a defect fails its ticket, with the traceback here
            log.exception("ticket %s attempt %d failed", ticket.ticket_id, ticket.attempt)
            reason = f"{type(error).__name__}: {error}"
        else:
            self.accepted += 1
            failpoint("rollout.finish")
            await self._finish(ticket, "filtered" if played.dropped else "accepted", played.dropped, played)
            return
        self.failed += 1
        await self._finish(ticket, outcome, reason, Played([]))
        if stuck is not None:
            raise stuck

    async def _produce(self, ticket: Ticket) -> Played:
        """Play the episodes, and push a training group unless it is dropped: its DP head has stored it when this
        returns.
        """
        started = time.time()
        failpoint("rollout.running")
        await self._parts.prompts.arrival(ticket.split, ticket.prompt_index)
        prompt = self._parts.prompts.prompt(ticket.split, ticket.prompt_index)
        played = await self._parts.player.play(ticket, prompt)
        if played.errors:
            first = played.errors[0]
            log.warning(
                "ticket %s: %d of %d episodes failed: %s", ticket.ticket_id, len(played.errors), ticket.n, first
            )
        if played.dropped:
            return played
        if ticket.kind == "train":
            group = Group(
                ticket,
                played.episodes,
                self._worker,
                started=started,
                finished=time.time(),
                extra=played.extra,
                errors=played.errors,
            )
            failpoint("rollout.push")
            with span("push", ticket.unit):
                await self._parts.pusher.push(group)
        if ticket.kind == "eval":
            for episode in played.episodes:
                await self._parts.evaluations.store(ticket, prompt, episode, self._worker)
        return played

    async def _finish(self, ticket: Ticket, outcome: Outcome, reason: str, played: Played) -> None:
        correct, judged = played.verdicts if ticket.kind == "train" else (0, 0)
        request = FinishRequest(
            ticket.ticket_id,
            ticket.attempt,
            self._worker,
            outcome,
            one_line(reason),
            [answer_of(ticket, episode) for episode in played.episodes],
            tokens_by_server(played.ended),
            self._parts.verifiers.waiting,
            self._parts.verifiers.undecided,
            # Of any ticket, also of one that was superseded and has no finish.
            self._parts.player.take_lost_tokens(),
            self._parts.verifiers.take_failures(),
            correct,
            judged,
            resident_bytes(),
        )
        with span("finish", ticket.unit, outcome=outcome):
            reply = await self._parts.manager.finish(request)
        if not reply.known:
            log.info("ticket %s attempt %d: superseded before it finished", ticket.ticket_id, ticket.attempt)


async def _stop(stop: asyncio.Event) -> None:
    await stop.wait()
    raise _Stopped


def answer_of(ticket: Ticket, episode: Episode) -> Answer:
    """Build the manager's record of an episode. ``finish_reason`` is that of the first row that was cut off."""
    reasons = [row.finish_reason for row in episode.rows]
    versions = [version for row in episode.rows for version in row.version_span or ()]
    return Answer(
        reward=episode.reward,
        correct=episode.correct,
        length=episode.loss_tokens,
        finish_reason=next((reason for reason in reasons if reason != "stop"), "stop"),
        version_min=min(versions, default=ticket.version),
        version_max=max(versions, default=ticket.version),
        metrics=episode.metrics if ticket.kind == "eval" else {},
    )


def tokens_by_server(episodes: Sequence[Episode]) -> dict[str, int]:
    """Count the tokens that each server sampled, from the rows with a route."""
    counts: Counter[str] = Counter()
    for episode in episodes:
        for row in episode.rows:
            for server, count in row.route:
                counts[server] += count
    return dict(counts)
