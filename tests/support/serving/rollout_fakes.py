"""An engine and an agent of a GroupPlayer, in memory, that a test scripts."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from realsys.generation.completion import Completion
from realsys.rollout.agents.contract import Session
from realsys.rollout.environments import Judgement, Response, Task
from realsys.rollout.episodes import RowBuilder
from realsys.rollout.resumable_engine import Deliver, EngineCall
from realsys.types import Episode, Ticket


@dataclass
class FakeEngine:
    """The engine of a GroupPlayer: answers a call with ``length`` tokens that tell seed and number of the completion.

    ``errors``: call name -> exception that it raises; ``held``: names of calls that wait for ``gate``.
    """

    length: int = 3
    errors: dict[str, Exception] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[EngineCall] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    async def generate(self, call: EngineCall, deliver: Deliver | None = None) -> list[Completion]:
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

    def completion(self, seed: int) -> Completion:
        tokens = (seed + np.arange(self.length) * 1000).astype(np.int32)
        ones = np.ones(self.length, np.int32)
        return Completion(tokens, -ones.astype(np.float32), 7 * ones, "stop", (("a", self.length),))

    def discard(self, ticket: Ticket) -> None:
        self.forgotten.append(ticket.ticket_id)


class Game:
    """An environment with steps whose steps return ``judgements`` in order; it notes its calls."""

    def __init__(self, parts: object = None, observation: str | None = None, judgements: Sequence[Judgement] = ()):
        self.observation, self.judgements = observation, list(judgements)
        self.calls: list[str] = []  # of all episodes

    async def reset(self, task: Task) -> str | None:
        self.calls.append(f"reset {task.episode}")
        return self.observation

    async def step(self, task: Task, response: Response) -> Judgement:
        self.calls.append(f"step {task.episode}: {response.text}")
        return self.judgements.pop(0)

    async def close(self, task: Task) -> None:
        self.calls.append(f"close {task.episode}")


class ScriptedAgent:
    """An agent that makes ``calls`` calls in one row. ``errors``: episode -> what it raises after them."""

    def __init__(
        self,
        calls: int = 1,
        errors: dict[int, BaseException] | None = None,
        prompts: dict[int, list[int]] | None = None,
    ) -> None:
        self.calls = calls
        self.errors = errors or {}
        self.prompts = prompts or {}  # episode -> its first tokens, if they are not the prompt's

    async def run(self, task: Task, session: Session) -> Episode:
        row = RowBuilder(self.prompts.get(task.episode, task.prompt.ids))
        for number in range(self.calls):
            row.completion(await session.generate(row.tokens))
            row.context([100 + number])
        if task.episode in self.errors:
            raise self.errors[task.episode]
        return Episode([row.row()], float(task.episode))
