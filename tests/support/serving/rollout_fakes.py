"""The network ends of a rollout, in memory: a manager and generation servers that a test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from realsys.generation.client import Generated, SamplingSpec
from realsys.generation.received import PartsOfOne, Received
from realsys.manager.messages import (
    AllocateReply,
    AllocateRequest,
    FinishReply,
    FinishRequest,
    ScheduleReply,
    ScheduleRequest,
    TouchReply,
    TouchRequest,
)
from realsys.rollout.partial import Call, Deliver
from realsys.types import FinishReason, Group, Ticket

STEP = 1000  # a fake server's k-th token after ``length`` input tokens is STEP + length + k


def generated(input_len: int, count: int, version: int, reason: FinishReason) -> Generated:
    """Tokens that say where in the sequence they were sampled, log-probs that say by which version."""
    tokens = np.arange(STEP + input_len, STEP + input_len + count, dtype=np.int32)
    return Generated(tokens, np.full(count, -0.5 - version, np.float32), np.full(count, version, np.int32), reason)


@dataclass
class Request:
    """One request a server got."""

    url: str
    input_ids: list[int]
    spec: SamplingSpec
    rid: str
    seed: int


@dataclass
class FakeServers:
    """``script`` is consumed one entry per request: what to answer, or what to raise.

    ``arrived``: tokens of each completion that arrive before an error. ``working``: what a server says of itself.
    """

    script: list[object]
    calls: list[Request] = field(default_factory=list)
    arrived: int = 0
    working: bool = False
    asked: list[str] = field(default_factory=list)

    async def works(self, url: str) -> bool:
        self.asked.append(url)
        return self.working

    async def generate(
        self,
        url: str,
        input_ids: Sequence[int],
        spec: SamplingSpec,
        *,
        rid: str,
        seed: int,
        received: Received | None = None,
    ) -> list[Generated]:
        self.calls.append(Request(url, list(input_ids), spec, rid, seed))
        await asyncio.sleep(0)
        step = self.script.pop(0)
        if isinstance(step, Exception):
            if received is not None:
                tokens = [generated(len(input_ids), self.arrived, 0, "abort") for _ in range(spec.n)]
                received.completions = [
                    PartsOfOne(one.tokens.tolist(), one.logprobs.tolist(), one.versions.tolist()) for one in tokens
                ]
            raise step
        assert isinstance(step, list)
        return [generated(len(input_ids), *answer) for answer in step]


@dataclass
class FakeScheduler:
    """Names servers a, b, c, ... in turn; raises what ``error`` says."""

    requests: list[ScheduleRequest] = field(default_factory=list)
    error: Exception | None = None

    async def schedule(self, request: ScheduleRequest) -> ScheduleReply:
        if self.error is not None:
            raise self.error
        name = chr(ord("a") + len(self.requests) % 26)
        self.requests.append(request)
        return ScheduleReply(name, f"http://{name}", 0)


class FakeManager:
    """Hands out what a test puts in; says when a finish has come."""

    def __init__(self) -> None:
        self.grants: asyncio.Queue[list[Ticket]] = asyncio.Queue()
        self.allocations: list[AllocateRequest] = []
        self.touched: asyncio.Queue[TouchRequest] = asyncio.Queue()
        self.finished: asyncio.Queue[FinishRequest] = asyncio.Queue()
        self.finish_error: Exception | None = None
        self.known = True

    async def allocate(self, request: AllocateRequest) -> AllocateReply:
        self.allocations.append(request)
        tickets = await self.grants.get()
        assert len(tickets) <= request.max_tickets
        return AllocateReply(tickets)

    async def touch(self, request: TouchRequest) -> TouchReply:
        self.touched.put_nowait(request)
        return TouchReply()

    async def finish(self, request: FinishRequest) -> FinishReply:
        if self.finish_error is not None:
            raise self.finish_error
        self.finished.put_nowait(request)
        return FinishReply(self.known)


class FakePusher:
    """A pusher that keeps the groups, or raises ``error``."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.error: Exception | None = None

    async def push(self, group: Group) -> None:
        if self.error is not None:
            raise self.error
        self.groups.append(group)


@dataclass
class FakeEngine:
    """The engine of a GroupPlayer: answers a call with ``length`` tokens that tell seed and number of the completion.

    ``errors``: call name -> exception that it raises; ``held``: names of calls that wait for ``gate``.
    """

    length: int = 3
    errors: dict[str, Exception] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[Call] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    async def generate(self, call: Call, deliver: Deliver | None = None) -> list[Generated]:
        self.calls.append(call)
        try:
            await (self.gate.wait() if call.name in self.held else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.cancelled.append(call.name)
            raise
        if call.name in self.errors:
            raise self.errors[call.name]
        completions = [self.completion(call.seed + k) for k in range(call.spec.n)]
        for k, completion in enumerate(completions):
            if deliver is not None:
                deliver(k, completion)
        return completions

    def completion(self, seed: int) -> Generated:
        tokens = (seed + np.arange(self.length) * 1000).astype(np.int32)
        ones = np.ones(self.length, np.int32)
        return Generated(tokens, -ones.astype(np.float32), 7 * ones, "stop", (("a", self.length),))

    def discard(self, ticket: Ticket) -> None:
        self.forgotten.append(ticket.ticket_id)
