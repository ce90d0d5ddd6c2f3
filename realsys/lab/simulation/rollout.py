"""Cost model of a RolloutWorker: it asks for tickets, has their groups sampled, pushes them and reports the end.

allocate ──ticket──> schedule ──> pieces on a server ──enough have ended──> judge ──> push ──> finish
                        ^  │ a chunk is full, or the server failed            └─ no signal ──────^
                        └──┘ each unfinished completion continues from its tokens
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Protocol

from realsys.algorithm.token_losses import NOT_KEPT, OVER_SAMPLED
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.lab.simulation.clock import Account, Clock
from realsys.lab.simulation.manager import ManagerMachine, allocate_request
from realsys.lab.simulation.scenarios import LengthSettings, SimSettings
from realsys.lab.simulation.servers import DecodePiece, EngineRequest, SimulatedEngine
from realsys.manager.messages import (
    AllocateReply,
    Answer,
    FinishReply,
    FinishRequest,
    NoServer,
    Refusal,
    ScheduleReply,
    ScheduleRequest,
    TouchRequest,
)
from realsys.manager.operations import ALLOCATE, FINISH, SCHEDULE, TOUCH
from realsys.rollout.episodes import kept_episodes, reason_to_drop
from realsys.rollout.resumable_engine import LAST_DELAY_S, MAX_FAILURES
from realsys.train.record_files import read_record, recorded_steps
from realsys.types import SampleMeta, Ticket

NO_SERVER_TIMEOUT_S = 600.0
TOUCH_S = 60.0  # between two renewals of leases


@dataclass(slots=True)
class SimulatedCompletion:
    """One episode: ``length`` tokens in the end, ``versions`` of those sampled so far."""

    length: int
    correct: bool
    versions: dict[int, int] = field(default_factory=dict)
    sampled: int = 0

    @property
    def ended(self) -> bool:
        return self.sampled == self.length

    @property
    def reward(self) -> float:
        return 5.0 if self.correct else -5.0


@dataclass(slots=True, eq=False)
class GroupRun:
    """One attempt at a ticket. Its tokens are open until it is ``over``."""

    ticket: Ticket
    worker: str
    completions: list[SimulatedCompletion]
    started: float
    over: bool = False
    arrived: float = 0.0
    request: EngineRequest | None = None
    engine: SimulatedEngine | None = None
    server: str = ""
    failures: int = 0
    waiting_since: float = 0.0
    failed: tuple[str, str] | None = None  # server, failure
    verdicts: tuple[int, int] = (0, 0)  # correct, judged

    @property
    def tokens(self) -> int:
        return sum(completion.sampled for completion in self.completions)

    def samples(self) -> list[SampleMeta]:
        """Return the metadata of its rows, as a DP head announces them."""
        ticket = self.ticket
        rows = []
        for k, completion in enumerate(self.completions):
            rows.append(
                SampleMeta(
                    f"{ticket.ticket_id}.{ticket.attempt}/{k}.0",
                    ticket.ticket_id,
                    ticket.attempt,
                    completion.length,
                    completion.length,
                    completion.reward,
                    False,
                    min(completion.versions),
                    max(completion.versions),
                    0,
                    trainer_incarnation=ticket.trainer_incarnation,
                    episode=k,
                    group_rows=len(self.completions),
                    correct=completion.correct,
                    version_tokens=sorted(completion.versions.items()) if len(completion.versions) > 1 else [],
                    reissues=ticket.reissues,
                )
            )
        return rows


class RolloutSurroundings(Protocol):
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

    def engine(self, server: str) -> SimulatedEngine | None: ...

    def push(self, group: GroupRun, stored: Callable[[], None]) -> None: ...

    def waste(self, group: GroupRun, reason: str) -> None: ...


class Worker:
    """One incarnation of a RolloutWorker."""

    def __init__(self, world: RolloutSurroundings, name: str, incarnation: str) -> None:
        self.name = name
        self.incarnation = incarnation
        self.up = True
        self._world = world
        self._n = world.config.rollout.sampled_episodes
        self._size = world.config.rollout.group_size
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
        lengths, rewards = world.lengths.draw(ticket), Random(ticket.seed + 1)
        success = success_rate(world.sim, world.config.seed, ticket.prompt_index)
        completions = [SimulatedCompletion(length, rewards.random() < success) for length in lengths]
        group = GroupRun(ticket, self.name, completions, world.clock.now)
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
            chunk = self._world.config.generation.sampling.new_tokens_per_chunk
            pieces = []
            for index, completion in enumerate(group.completions):
                left = completion.length - completion.sampled
                if left:
                    pieces.append(DecodePiece(index, min(left, chunk or left)))
            before = sum(group.completions[piece.index].sampled for piece in pieces)
            group.request = EngineRequest(
                pieces, self._world.sim.prompt_tokens + before, lambda request: self._moved(group, request)
            )
            group.engine.submit(group.request)

    def _again(self, group: GroupRun) -> None:
        if not group.over:
            self._schedule(group)

    def _moved(self, group: GroupRun, request: EngineRequest) -> None:
        """Pieces have ended. When enough completions have, the others are cancelled; when all pieces have, they go on.

        The first that end make the group: those of one moment in the order of their numbers.
        """
        account = self._world.account
        sampled, request.sampled = request.sampled, []
        for piece, versions in sampled:
            completion = group.completions[piece.index]
            completion.sampled += piece.tokens
            account.sampled += piece.tokens
            for version, tokens in versions.items():
                completion.versions[version] = completion.versions.get(version, 0) + tokens
        ended = [each for each in group.completions if each.sampled == each.length]  # a property is slow here
        size = self._size if group.ticket.kind == "train" else group.ticket.n
        if len(ended) >= size:
            if request.left:
                assert group.engine is not None
                self._lose(OVER_SAMPLED, group.engine.cancel(request))
            group.request = None
            self._leave_out(group, ended[:size], OVER_SAMPLED)
            self._world.clock.after(self._world.sim.judge_s, self._judged, group)
        elif not request.left:
            group.request = None
            self._schedule(group)

    def _leave_out(self, group: GroupRun, kept: list[SimulatedCompletion], reason: str) -> None:
        """Waste the completions of a group that are not ``kept``."""
        before, group.completions = group.tokens, kept
        if wasted := before - group.tokens:
            self._world.account.wasted[reason] += wasted

    def _lose(self, reason: str, tokens: int) -> None:
        """Count tokens of a server that belong to no completion."""
        self._world.account.sampled += tokens
        self._world.account.wasted[reason] += tokens

    def server_died(self, group: GroupRun, lost: int) -> None:
        """Continue after the death of its server. ``lost``: tokens that it had sampled and not returned."""
        assert group.request is not None
        self._lose("server lost", lost)
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

    def groups_on(self, engine: SimulatedEngine) -> list[GroupRun]:
        """Return the groups with a request on ``engine``."""
        return [g for g in self._groups if g.engine is engine and g.request is not None]

    # -- end -----------------------------------------------------------------------------------------------------------

    def _judged(self, group: GroupRun) -> None:
        if group.over or not self.up:
            return
        if group.ticket.kind != "train":
            self._finish(group, "accepted", "")
            return
        config, completions = self._world.config, group.completions
        group.verdicts = sum(completion.correct for completion in completions), len(completions)
        if reason := reason_to_drop(completions, config.train.ppo.filter):
            self._finish(group, "filtered", reason)
            return
        rewards = [completion.reward for completion in completions]
        kept = kept_episodes(rewards, config.rollout.keep, group.ticket.seed)
        self._leave_out(group, [completions[k] for k in kept], NOT_KEPT)
        self._world.push(group, lambda: self._stored(group))

    def _stored(self, group: GroupRun) -> None:
        if self.up:
            self._finish(group, "accepted", "")

    def _finish(self, group: GroupRun, outcome: str, reason: str) -> None:
        world = self._world
        answers = []
        if outcome == "accepted":
            answers = [Answer(5.0, True, c.length, "stop", min(c.versions), max(c.versions)) for c in group.completions]
        if outcome != "accepted":
            world.waste(group, reason if outcome == "filtered" else "failed")
        elif group.ticket.kind == "eval":
            world.waste(group, "evaluation")
        ticket_id, attempt = group.ticket.ticket_id, group.ticket.attempt
        request = FinishRequest(ticket_id, attempt, self.name, outcome, reason, answers)  # type: ignore[arg-type]
        request.correct, request.judged = group.verdicts
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
            self._lose(reason, group.engine.cancel(group.request))
            group.request = None
        if group.arrived == 0.0:
            world.waste(group, reason)
        if group in self._groups:
            del self._groups[group]
            self._free += group.ticket.n
            self.ask()


def success_rate(sim: SimSettings, seed: int, prompt_index: int) -> float:
    """Return the share of right completions of a prompt: its logit is normally distributed over the prompts."""
    if not sim.difficulty or sim.success in (0.0, 1.0):
        return sim.success
    logit = math.log(sim.success / (1.0 - sim.success)) + sim.difficulty * Random(f"{seed} {prompt_index}").gauss(0, 1)
    return 1.0 / (1.0 + math.exp(-logit))


# ---- lengths of completions: drawn from a formula or from a recorded trial
#
# Every length is a quantile of a normal score z = sqrt(p) * prompt + sqrt(1 - p) * episode, where p is the
# ``prompt_share``. So the same prompt is long again when it is issued again, in any distribution.


class Lengths:
    """Draws the lengths of a ticket's completions: a function of seed, prompt and the ticket's own seed."""

    def __init__(self, settings: LengthSettings, seed: int) -> None:
        """Raises ConfigError if a recorded trial has no records."""
        self._settings = settings
        self._seed = seed
        self._prompt = math.sqrt(settings.prompt_share)
        self._episode = math.sqrt(1.0 - settings.prompt_share)
        self._mu = math.log(settings.mean) - settings.sigma**2 / 2
        self._values = recorded_lengths(settings.trial) if settings.kind == "trial" else settings.values

    def draw(self, ticket: Ticket) -> list[int]:
        """Return the tokens of each of the ``ticket.n`` completions."""
        prompt = self._prompt * Random(self._seed << 32 | ticket.prompt_index).gauss(0.0, 1.0)
        gauss = Random(ticket.seed).gauss
        factor = self._growth(int(ticket.ticket_id)) if ticket.kind == "train" else 1.0
        return [self._quantile(prompt + self._episode * gauss(0.0, 1.0), factor) for _ in range(ticket.n)]

    def _growth(self, number: int) -> float:
        """Return the factor of the lengths of a train ticket: it grows by the same share from ticket to ticket."""
        s = self._settings
        passed = (number - s.grows_from) / max(1, s.grows_to - s.grows_from)
        return float(s.growth ** min(1.0, max(0.0, passed)))

    def _quantile(self, score: float, factor: float) -> int:
        s = self._settings
        if s.kind == "lognormal":
            tokens = math.exp(self._mu + s.sigma * score)
        elif s.kind == "constant":
            tokens = s.mean
        else:
            below = 0.5 * math.erfc(-score / math.sqrt(2.0))
            if s.kind == "pareto":
                ratio = (s.shortest / s.longest) ** s.exponent
                tokens = s.shortest * (1.0 - below * (1.0 - ratio)) ** (-1.0 / s.exponent)
            elif s.kind == "uniform":
                tokens = s.shortest + below * (s.longest - s.shortest)
            else:
                tokens = self._values[min(int(below * len(self._values)), len(self._values) - 1)]
        return max(s.shortest, min(int(factor * tokens), s.longest))


def recorded_lengths(trial: str) -> list[int]:
    """Return the sampled tokens of every episode in a trial's records, sorted. Raises ConfigError without records."""
    root = TrialPaths(Path(trial)).records
    episodes: dict[tuple[str, int, int], int] = {}
    for folder in recorded_steps(root).values():
        for sample in (sample for group in read_record(folder).groups for sample in group):
            key = sample.ticket_id, sample.attempt, sample.episode
            episodes[key] = sample.episode_tokens or sample.loss_tokens
    if not episodes:
        problem = f"no recorded step under {root}: run the trial with record.keep_steps above 0"
        raise ConfigError("sim.lengths.trial", trial, problem)
    return sorted(episodes.values())
