"""Cost model of a RolloutWorker: it asks for tickets, has their groups sampled, pushes them and reports the end.

allocate ──ticket──> schedule ──> pieces on a server ──all done──> judge ──> push ──> finish
                        ^  │ a chunk is full, or the server failed
                        └──┘ each unfinished completion continues from its tokens
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from realsys.config.schema import Config
from realsys.manager.messages import (
    AllocateReply,
    Answer,
    FinishReply,
    FinishRequest,
    ScheduleReply,
    ScheduleRequest,
    TouchRequest,
)
from realsys.manager.operations import ALLOCATE, FINISH, SCHEDULE, TOUCH
from realsys.manager.refusals import NoServer, Refusal
from realsys.rollout.partial import LAST_DELAY_S, MAX_FAILURES
from realsys.simulate.account import Account
from realsys.simulate.clock import Clock
from realsys.simulate.costs.length_models import Lengths
from realsys.simulate.costs.server_costs import Engine, EngineRequest, Piece
from realsys.simulate.manager_machine import ManagerMachine, allocate_request
from realsys.simulate.scenarios import SimSettings
from realsys.types import SampleMeta, Ticket

NO_SERVER_TIMEOUT_S = 600.0
TOUCH_S = 60.0  # between two renewals of leases


@dataclass(slots=True)
class Completion:
    """One episode: ``length`` tokens in the end, ``versions`` of those sampled so far."""

    length: int
    versions: dict[int, int] = field(default_factory=dict)
    sampled: int = 0


@dataclass(slots=True, eq=False)
class GroupRun:
    """One attempt at a ticket. Its tokens are open until it is ``over``."""

    ticket: Ticket
    worker: str
    completions: list[Completion]
    started: float
    over: bool = False
    arrived: float = 0.0
    request: EngineRequest | None = None
    engine: Engine | None = None
    server: str = ""
    failures: int = 0
    waiting_since: float = 0.0
    failed: tuple[str, str] | None = None  # server, failure

    @property
    def tokens(self) -> int:
        return sum(completion.sampled for completion in self.completions)

    def samples(self, success: float) -> list[SampleMeta]:
        """Return the metadata of its rows, as a DP head announces them."""
        ticket, rewards = self.ticket, Random(self.ticket.seed + 1)
        rows = []
        for k, completion in enumerate(self.completions):
            correct = rewards.random() < success
            rows.append(
                SampleMeta(
                    f"{ticket.ticket_id}.{ticket.attempt}/{k}.0",
                    ticket.ticket_id,
                    ticket.attempt,
                    completion.length,
                    completion.length,
                    5.0 if correct else -5.0,
                    False,
                    min(completion.versions),
                    max(completion.versions),
                    0,
                    trainer_incarnation=ticket.trainer_incarnation,
                    episode=k,
                    group_rows=len(self.completions),
                    correct=correct,
                    version_tokens=sorted(completion.versions.items()) if len(completion.versions) > 1 else [],
                    reissues=ticket.reissues,
                )
            )
        return rows


class Surroundings(Protocol):
    """Everything around a worker."""

    clock: Clock
    account: Account
    manager: ManagerMachine
    lengths: Lengths
    config: Config
    sim: SimSettings
    open: set[GroupRun]  # attempts whose tokens are open
    agent_failures: int  # groups that fail next
    false_reports: int  # rollouts that report a server that is well next

    def engine(self, server: str) -> Engine | None: ...

    def push(self, group: GroupRun, stored: Callable[[], None]) -> None: ...

    def waste(self, group: GroupRun, reason: str) -> None: ...


class Worker:
    """One incarnation of a RolloutWorker."""

    def __init__(self, world: Surroundings, name: str, incarnation: str) -> None:
        self.name = name
        self.incarnation = incarnation
        self.up = True
        self._world = world
        self._n = world.config.rollout.group_size
        self._free = world.config.rollout.max_concurrent * self._n  # episodes
        self._asked = 0
        self._asking = False
        world.clock.after(TOUCH_S, self._touch)
        self._groups: dict[GroupRun, None] = {}  # a set in the order of the starts

    def ask(self) -> None:
        """Request as many tickets as there is capacity for."""
        if not self.up or self._asking or self._free < self._n:
            return
        self._asking = True
        self._asked += 1
        request = allocate_request(self.name, self._free // self._n, self._asked, self.incarnation)
        self._world.manager.call(ALLOCATE, request, self._granted)

    def die(self) -> None:
        """End without a word: its requests are aborted."""
        self.up = False
        self._world.manager.hang_up(self.name)
        for group in list(self._groups):
            self._cancel(group, "worker lost")

    def _touch(self) -> None:
        """Renew the leases of all running attempts."""
        if self.up:
            running = [(group.ticket.ticket_id, group.ticket.attempt) for group in self._groups]
            if running:
                self._world.manager.call(TOUCH, TouchRequest(self.name, sorted(running)), lambda _: None)
            self._world.clock.after(TOUCH_S, self._touch)

    def _granted(self, reply: AllocateReply) -> None:
        if not self.up:
            return
        self._asking = False
        account = self._world.account
        account.largest_grant = max(account.largest_grant, len(reply.tickets))
        for ticket in reply.tickets:
            self._start(ticket)
        self.ask()

    def _start(self, ticket: Ticket) -> None:
        world = self._world
        lengths = world.lengths.draw(ticket)
        group = GroupRun(ticket, self.name, [Completion(length) for length in lengths], world.clock.now)
        self._free -= ticket.n
        self._groups[group] = None
        world.open.add(group)
        if ticket.kind == "train":
            world.account.grants[self.name] += 1
            world.account.drawn.extend(lengths)
        if world.agent_failures:
            world.agent_failures -= 1
            self._finish(group, "failed", "agent: simulated error")
            return
        self._schedule(group)

    # -- sampling ------------------------------------------------------------------------------------------------------

    def _schedule(self, group: GroupRun) -> None:
        world = self._world
        pending = [c for c in group.completions if c.sampled < c.length]
        sampled = max(c.sampled for c in pending)
        limit = world.sim.lengths.longest
        failed, group.failed = group.failed, None
        group.waiting_since = group.waiting_since or world.clock.now
        request = ScheduleRequest(
            group.ticket.ticket_id,
            group.ticket.attempt,
            prompt_len=world.sim.prompt_tokens + sampled,
            max_new_tokens=max(1, limit - min(c.sampled for c in pending)),
            n=len(pending),
            failed_server=failed[0] if failed else None,
            failure=failed[1] if failed else None,
            prefix=[group.ticket.prompt_index],
            call="0.0",
        )
        world.manager.call(SCHEDULE, request, lambda reply: self._placed(group, reply))

    def _placed(self, group: GroupRun, reply: ScheduleReply | Refusal) -> None:
        world = self._world
        if group.over:
            return
        waited = world.clock.now - group.waiting_since
        if isinstance(reply, NoServer):
            if waited > NO_SERVER_TIMEOUT_S:
                self._finish(group, "failed", "GenerationError: no generation server")
            else:
                world.clock.after(LAST_DELAY_S, self._again, group)
            return
        if isinstance(reply, Refusal):
            self._cancel(group, "superseded")
            return
        world.account.wait("server", waited)
        group.waiting_since = 0.0
        group.server, group.engine = reply.server, world.engine(reply.server)
        if world.false_reports:
            world.false_reports -= 1
            self._failed(group, "cannot connect: simulated")
        elif group.engine is None or not group.engine.up:
            world.clock.after(world.sim.call_s, self._failed, group, "connection refused")
        else:
            self._submit(group, group.engine)

    def _again(self, group: GroupRun) -> None:
        if not group.over:
            self._schedule(group)

    def _submit(self, group: GroupRun, engine: Engine) -> None:
        chunk = self._world.config.generation.sampling.new_tokens_per_chunk
        pieces = []
        for index, completion in enumerate(group.completions):
            left = completion.length - completion.sampled
            if left:
                pieces.append(Piece(index, min(left, chunk or left)))
        before = sum(group.completions[piece.index].sampled for piece in pieces)
        group.request = EngineRequest(pieces, self._world.sim.prompt_tokens + before, lambda _: self._sampled(group))
        engine.submit(group.request)

    def _sampled(self, group: GroupRun) -> None:
        """All pieces have ended."""
        assert group.request is not None
        request, group.request = group.request, None
        self._collect(group, request)
        if any(c.sampled < c.length for c in group.completions):
            self._schedule(group)
        else:
            self._world.clock.after(self._world.sim.judge_s, self._judged, group)

    def _collect(self, group: GroupRun, request: EngineRequest) -> None:
        account = self._world.account
        for piece, versions in request.sampled:
            completion = group.completions[piece.index]
            completion.sampled += piece.tokens
            account.sampled += piece.tokens
            for version, tokens in versions.items():
                completion.versions[version] = completion.versions.get(version, 0) + tokens

    def server_died(self, group: GroupRun, lost: int) -> None:
        """Continue after the death of its server. ``lost``: tokens that it had sampled and not returned."""
        assert group.request is not None
        account = self._world.account
        ended = sum(piece.tokens for piece, _ in group.request.sampled)  # the reply was not sent yet
        account.sampled += lost + ended
        account.wasted["server lost"] += lost + ended
        group.request = None
        self._failed(group, "connection closed")

    def _failed(self, group: GroupRun, why: str) -> None:
        if group.over:
            return
        group.failures += 1
        group.failed = group.server, why
        if group.failures > MAX_FAILURES:
            self._finish(group, "failed", f"GenerationError: {group.failures} failures")
        else:
            self._schedule(group)

    def groups_on(self, engine: Engine) -> list[GroupRun]:
        """Return the groups with a request on ``engine``."""
        return [g for g in self._groups if g.engine is engine and g.request is not None]

    # -- end -----------------------------------------------------------------------------------------------------------

    def _judged(self, group: GroupRun) -> None:
        if group.over or not self.up:
            return
        if group.ticket.kind == "train":
            self._world.push(group, lambda: self._stored(group))
        else:
            self._finish(group, "accepted", "")

    def _stored(self, group: GroupRun) -> None:
        if self.up:
            self._finish(group, "accepted", "")

    def _finish(self, group: GroupRun, outcome: str, reason: str) -> None:
        world = self._world
        answers = []
        if outcome == "accepted":
            answers = [Answer(5.0, True, c.length, "stop", min(c.versions), max(c.versions)) for c in group.completions]
        if outcome == "failed":
            world.waste(group, "failed")
        elif group.ticket.kind == "eval":
            world.waste(group, "evaluation")
        ticket_id, attempt = group.ticket.ticket_id, group.ticket.attempt
        request = FinishRequest(ticket_id, attempt, self.name, outcome, reason, answers)  # type: ignore[arg-type]
        world.manager.call(FINISH, request, lambda reply: self._finished(group, reply))

    def _finished(self, group: GroupRun, reply: FinishReply) -> None:
        if group in self._groups and self.up:
            del self._groups[group]
            self._world.account.wait("group", self._world.clock.now - group.started)
            self._free += group.ticket.n
            self.ask()

    def _cancel(self, group: GroupRun, reason: str) -> None:
        """End an attempt that is not to be reported."""
        world = self._world
        if group.request is not None and group.engine is not None:
            lost = group.engine.cancel(group.request)
            ended = sum(piece.tokens for piece, _ in group.request.sampled)
            world.account.sampled += lost + ended
            world.account.wasted[reason] += lost + ended
            group.request = None
        if group.arrived == 0.0:
            world.waste(group, reason)
        if group in self._groups:
            del self._groups[group]
            self._free += group.ticket.n
            self.ask()
