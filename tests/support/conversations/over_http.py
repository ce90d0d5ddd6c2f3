"""Completion conversations through the gateway: an agent over HTTP, and a scripted engine with its habits."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import numpy as np

from realsys.data.tokenizer import TextTokenizer
from realsys.errors import ServerBusy
from realsys.generation.completion import Completion
from realsys.rollout.episode_session import EpisodeSession
from realsys.rollout.resumable_engine import Deliver, EngineCall
from realsys.types import Ticket
from tests.support.conversations.play import TOOLS, row_problems
from tests.support.serving.reward_pools import until

STOP = ";"
SAMPLED = ("a", "ab", "abb", "b")  # equal ones, and ones that begin others
STOPPED = ("c;", "cd;", ";")
CALLED = ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "a")
RETRY = {"x-stainless-retry-count": "1"}
ROUTES = {"chat": "chat/completions", "text": "completions", "tokens": "inference/v1/generate"}


@dataclass
class Sampled:
    """One completion. ``asked``: what the agent had sent for it; ``shown``: what the agent reads of it."""

    sent: list[int]
    completion: Completion
    text: str
    delivered: bool = False
    asked: Any = None
    shown: Any = None


@dataclass
class Engine:
    """Samples short texts, many of them equal. ``gate`` holds completions back; ``busy`` refuses the next call."""

    tokenizer: TextTokenizer
    random: Random
    texts: tuple[str, ...] = SAMPLED
    sampled: list[Sampled] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    busy: bool = False
    began: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, call: EngineCall, deliver: Deliver = lambda number, completion: None) -> list[Completion]:
        self.began.set()
        await self.gate.wait()
        if self.busy:
            self.busy = False
            raise ServerBusy("full")
        text = self.random.choice(self.texts)
        ids, reason = self.tokenizer.encode_text(text), "stop"
        if not text.endswith(STOP):
            ended = self.random.random() < 0.7
            ids, reason = ([*ids, self.tokenizer.eos_token_id], "stop") if ended else (ids, "length")
        first, number = sum(len(each.completion.tokens) for each in self.sampled), len(self.sampled)
        logprobs = -np.arange(first, first + len(ids), dtype=np.float32)
        versions = np.full(len(ids), number, np.int32)
        completion = Completion(np.array(ids, np.int32), logprobs, versions, reason, (("only", len(ids)),))
        self.sampled.append(Sampled(call.token_ids, completion, text))
        deliver(0, completion)
        return [completion]

    def discard(self, ticket: Ticket) -> None:
        pass


class Agent:
    """One conversation over HTTP. ``problems``: where the engine or the rows had something else."""

    def __init__(self, session: EpisodeSession, engine: Engine, client: httpx.AsyncClient, kind: str) -> None:
        self.session, self.engine, self.client, self.kind = session, engine, client, kind
        self.random = engine.random
        self.linear = True
        self.problems: list[str] = []
        self.tools = TOOLS if kind == "chat" and self.random.random() < 0.3 else []
        self.stops = not self.tools and kind != "tokens" and self.random.random() < 0.4
        engine.texts = CALLED if self.tools else SAMPLED + STOPPED * self.stops
        engine.gate.set()
        self.asked: Any = [] if kind != "text" else ""
        self.add(self.word())

    async def play(self) -> None:
        """Play some turns, then compare the rows."""
        for _ in range(self.random.randint(1, 5)):
            before = len(self.engine.sampled)
            reply = await self.turn()
            received = self.receive(before, reply)
            if self.random.random() < 0.2:
                await self.lose()
            self.go_on(self.random.choice(received))
        self.compare()

    async def turn(self) -> dict[str, Any]:
        """Ask once, as a client that meets errors, timeouts, and replies that get lost."""
        event, count = self.random.random(), 1
        if event < 0.15:
            self.engine.busy = True
            assert (await self.post()).status_code == 503
            headers = RETRY if self.random.random() < 0.5 else {}
            reply = await self.post(headers)
        elif event < 0.3:
            await self.give_up()
            self.engine.gate.set()
            reply = await self.post(RETRY)
        elif event < 0.4:
            before = len(self.engine.sampled)
            self.receive(before, (await self.post()).json())
            self.linear = False  # the agent samples the turn twice
            reply = await self.post()
        else:
            count = self.random.choice([1, 1, 1, 2])
            self.linear = self.linear and count == 1
            reply = await self.post(n=count)
        assert reply.status_code == 200, reply.text
        if self.random.random() < 0.1:  # the client believes that the reply was lost
            again = await self.post(RETRY, n=count)
            if again.json() != reply.json() and self.linear:
                self.problems.append("a retry got another reply")
        return dict(reply.json())

    async def lose(self) -> None:
        """Sample the same turn again, and leave before the completion comes."""
        sampled = len(self.engine.sampled)
        await self.give_up()
        self.engine.gate.set()
        await until(lambda: len(self.engine.sampled) > sampled)

    async def give_up(self) -> None:
        """Send a request and close the connection while the engine has it."""
        self.engine.gate.clear()
        self.engine.began.clear()
        call = asyncio.create_task(self.post())
        await self.engine.began.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(lambda: not self.session.capture.waiting)

    async def post(self, headers: dict[str, str] | None = None, n: int = 1) -> httpx.Response:
        body: dict[str, Any] = {"n": n, "max_tokens": 100, "return_token_ids": True} | (
            {"stop": [STOP]} if self.stops else {}
        )
        if self.kind == "chat":
            body |= {"messages": self.asked} | ({"tools": self.tools} if self.tools else {})
        elif self.kind == "text":
            body["prompt"] = self.asked
        else:
            body = {"token_ids": self.asked, "sampling_params": body}
        return await self.client.post(f"{self.session.base_url}/{ROUTES[self.kind]}", json=body, headers=headers)

    def receive(self, before: int, reply: dict[str, Any]) -> list[Sampled]:
        """Note the completions of a reply, and compare what the engine was sent with what the agent asked."""
        choices = reply["choices"]
        received = self.engine.sampled[before:][-len(choices) :]
        received.sort(key=lambda each: each.completion.tokens.tolist())
        choices.sort(key=lambda choice: choice["token_ids"])
        for sampled, choice in zip(received, choices, strict=True):
            assert sampled.completion.tokens.tolist() == choice["token_ids"]
            sampled.delivered, sampled.asked = True, self.asked
            sampled.shown = choice.get("message") or choice.get("text", choice.get("token_ids"))
            if not self.is_asked(sampled.sent):
                shown = self.engine.tokenizer.decode(sampled.sent)
                self.problems.append(f"asked {self.asked!r}, the engine was sent {shown!r}")
        return received

    def is_asked(self, sent: list[int]) -> bool:
        """Return True if the tokens show what the agent asked."""
        tokenizer = self.engine.tokenizer
        if self.kind == "tokens":
            return bool(sent == self.asked)
        if self.kind == "chat":
            return tokenizer.decode(sent) == tokenizer.decode(tokenizer.encode_chat(self.asked, self.tools))
        ends = tokenizer.eos_token_ids
        prompt = tokenizer.encode_prompt(self.asked, chat=False)
        return [token for token in sent if token not in ends] == prompt

    def go_on(self, kept: Sampled) -> None:
        """Send a completion back; a stop string is written again."""
        shown, stop = kept.shown, STOP if kept.text.endswith(STOP) else ""
        if self.kind == "chat":
            self.asked = [*self.asked, shown | {"content": (shown["content"] or "") + stop}]
            for call in shown.get("tool_calls") or ():
                self.asked.append({"role": "tool", "tool_call_id": call["id"], "content": self.word()})
        else:
            self.asked = self.asked + shown + stop if self.kind == "text" else [*self.asked, *shown]
        self.add(self.word())

    def add(self, word: str) -> None:
        if self.kind == "chat":
            self.asked = [*self.asked, {"role": "user", "content": word}]
        else:
            self.asked = self.asked + (word if self.kind == "text" else self.engine.tokenizer.encode_text(word))

    def word(self) -> str:
        return str(self.random.randrange(100))

    def compare(self) -> None:
        """Compare the rows with what the engine returned and the agent received."""
        capture = self.session.capture
        rows = capture.rows()
        for row in rows:
            self.problems += row_problems(row, self.engine.sampled)
        trained = Counter(float(value) for row in rows for value in row.logprobs)
        kept = [value for each in self.engine.sampled if each.delivered for value in each.completion.logprobs.tolist()]
        if trained != Counter(kept):
            self.problems.append("not every received token is trained once")
        if len(rows) != 1 + capture.metrics()["gateway/branches"]:
            self.problems.append(f"{len(rows)} rows, {capture.metrics()}")
        if self.linear and len(rows) != 1:
            self.problems.append(f"{len(rows)} rows of a linear conversation")
