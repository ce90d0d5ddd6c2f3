"""The agent ``tool_use``: the model calls tools, and reads their results, until it answers without a call.

    prompt ──> completion ──tool calls?──no, cut off, last turn, no room──> end: the environment judges the last one
                  ^             └─ yes ──> results (mask False) ──┐
                  └──────────────────────────────────────────────┘

Only prompt and results are tokenised (`token-identity`): ``realsys.rollout.conversation``. How the model writes a tool
call is read by ``realsys.rollout.gateway.parser``.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from realsys.config.schema import Config
from realsys.config.trial_sizes import longest_sequence
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import AgentError, ConfigError, DataError
from realsys.generation.completion import Completion
from realsys.observe.spans import span
from realsys.rollout.agents import tools as tools_door
from realsys.rollout.agents.contract import AgentParts, Session
from realsys.rollout.agents.tools import Tool, ToolError
from realsys.rollout.conversation import Conversation
from realsys.rollout.environments import Task
from realsys.rollout.gateway.choices import NONE, read_choice
from realsys.rollout.gateway.dialect import Choice, GatewayCall
from realsys.rollout.gateway.parser import parser_of
from realsys.types import Episode

TEMPLATE_TOKENS = 64  # upper bound on the tokens that a chat template adds around the results of a turn
TOOL_S = 30.0  # default of ``tool_s``
MAX_CALLS = 64  # tool calls of one episode; further ones get an error as their result


@dataclass(slots=True)
class _Use:
    """Use of tools by one episode."""

    left_s: float
    calls: int = 0
    errors: int = 0

    def metrics(self, turns: int) -> dict[str, float]:
        return {"turns": float(turns), "tool_calls": float(self.calls), "tool_errors": float(self.errors)}


@dataclass(slots=True)
class _Talk:
    """Messages and tokens of one episode."""

    conversation: Conversation
    messages: list[dict[str, Any]]
    use: _Use
    completions: list[Completion] = field(default_factory=list)


class ToolUse:
    """Agent with tools.

    max_turns   completions
    max_result  bytes of one tool's result that the model reads
    tool_s      seconds that the tools of one episode may take together
    """

    def __init__(
        self,
        parts: AgentParts,
        tools: Sequence[str] = ("calculator",),
        max_turns: int = 4,
        max_result: int = 1000,
        tool_s: float = TOOL_S,
    ) -> None:
        """Build the tools. Raises ConfigError."""
        config = parts.config
        self._parts = parts
        self._max_turns = max_turns
        self._max_result = max_result
        self._tool_s = tool_s
        self._limit = longest_sequence(config)
        self._tools = tools_door.build(tools)
        self._descriptions = [tool.description for tool in self._tools.values()]
        gateway = config.rollout.gateway
        self._parser = parser_of(parts.tokenizer, gateway.tool_format, gateway.reasoning_format)

    @staticmethod
    def longest_row(
        config: Config,
        tools: Sequence[str] = ("calculator",),
        max_turns: int = 4,
        max_result: int = 1000,
        tool_s: float = TOOL_S,
    ) -> int:
        """Return ``rollout.agent_limits.max_tokens``; if it is 0, the tokens of ``max_turns`` completions with results.

        Raises ConfigError.
        """
        for name, value in (("max_turns", max_turns), ("max_result", max_result)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"rollout.agent_args.{name}", value, "must be an integer of at least 1")
        if type(tool_s) not in (int, float) or not 0 < tool_s < math.inf:
            raise ConfigError("rollout.agent_args.tool_s", tool_s, "must be a number of seconds above 0")
        prompt, completion = config.data.max_prompt_tokens, config.generation.sampling.max_new_tokens
        turns = max_turns * completion + (max_turns - 1) * (max_result + TEMPLATE_TOKENS)
        return config.rollout.agent_limits.max_tokens or prompt + turns

    @staticmethod
    def check(
        config: Config,
        tokenizer: TextTokenizer,
        tools: Sequence[str] = ("calculator",),
        max_turns: int = 4,
        max_result: int = 1000,
        tool_s: float = TOOL_S,
    ) -> None:
        """Raise ConfigError if a tool cannot work here, or the model's chat template cannot show or call tools."""
        built = tools_door.build(tools)
        try:
            _check_template(config, tokenizer, built)
        finally:
            _close(built.values())

    async def run(self, task: Task, session: Session) -> Episode:
        """Play turns until the model answers without a tool call, or a limit is reached."""
        messages = list(task.prompt.messages) or [{"role": "user", "content": task.prompt.text}]
        talk = _Talk(self._conversation(), messages, _Use(self._tool_s))
        while (choice := await self._turn(talk, session)) is not None:
            cut_off = choice.completion.finish_reason != "stop"
            if cut_off or not choice.tool_calls or len(talk.completions) == self._max_turns:
                break
            talk.messages.append(choice.message())
            for call in choice.tool_calls:
                with span("tool", task.unit, name=call["function"]["name"]):
                    talk.messages.append(await self._result(call, talk.use))
        if not talk.completions:
            raise AgentError(f"the prompt with the tools leaves no room in a row of {self._limit} tokens")
        turns = len(talk.completions)
        response = self._parts.response(talk.completions[-1], turn=turns - 1)
        judgement = await self._parts.environment.judge(task, response)
        metrics = judgement.metrics | talk.use.metrics(turns)
        return Episode(talk.conversation.rows(), judgement.reward, judgement.correct, metrics, judgement.answer)

    async def close(self) -> None:
        """End the tools."""
        _close(self._tools.values())

    def _conversation(self) -> Conversation:
        return Conversation(self._parts.tokenizer, self._parts.config.data.chat_template)

    async def _turn(self, talk: _Talk, session: Session) -> Choice | None:
        """Sample one completion. Returns None if the row has no room for another one."""
        plan = talk.conversation.plan(talk.messages, self._descriptions)
        room = self._limit - len(plan.tokens)
        if room <= 0:
            return None
        spec = session.spec
        if room < spec.max_new_tokens:
            spec = replace(spec, max_new_tokens=room, min_new_tokens=min(room, spec.min_new_tokens))
        completion = await session.generate(plan.tokens, spec)
        call = GatewayCall("chat", messages=talk.messages, tools=self._descriptions)
        name = f"turn-{len(talk.completions)}"
        choice = read_choice(self._parts.tokenizer, self._parser, call, plan.tokens, completion, name)
        node = talk.conversation.record(plan, completion, choice.message())
        talk.conversation.deliver(node)
        talk.completions.append(completion)
        return choice

    async def _result(self, call: dict[str, Any], use: _Use) -> dict[str, Any]:
        """Return the message with the result of a tool call. An error is a result, too: the model may learn from it."""
        use.calls += 1
        try:
            content = await self._call(call["function"], use)
        except ToolError as error:
            use.errors += 1
            content = str(error)
        cut = content.encode("utf-8", "replace")[: self._max_result].decode("utf-8", "ignore")
        return {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": cut}

    async def _call(self, function: dict[str, Any], use: _Use) -> str:
        """Call a tool. Its time begins when the calls of other episodes have left it room. Raises ToolError."""
        name = function["name"]
        if name not in self._tools:
            raise ToolError(f"error: there is no tool {name}")
        if use.left_s <= 0 or use.calls > MAX_CALLS:
            raise ToolError("error: no tool can be called any more")
        tool, arguments = self._tools[name], json.loads(function["arguments"])
        if (ready := getattr(tool, "ready", None)) is not None:
            await ready()
        begin = time.monotonic()
        try:
            async with asyncio.timeout(use.left_s) as timeout:
                return await tool.call(arguments, use.left_s)
        except TimeoutError:
            if not timeout.expired():  # the tool itself has raised it: a defect
                raise
            raise ToolError("error: the tool took too long") from None
        finally:
            use.left_s -= time.monotonic() - begin


def _close(tools: Any) -> None:
    for tool in tools:
        tool.close()


def _check_template(config: Config, tokenizer: TextTokenizer, tools: dict[str, Tool]) -> None:
    descriptions = [tool.description for tool in tools.values()]
    if not config.data.chat_template:
        raise ConfigError(
            "data.chat_template", False, "must be true for rollout.agent=tool_use, whose turns are messages"
        )
    try:
        shown = tokenizer.encode_prompt("x", tools=descriptions) != tokenizer.encode_prompt("x")
    except DataError as error:
        raise ConfigError("rollout.agent", config.rollout.agent, str(error)) from None
    if not shown:
        problem = "the model's chat template shows no tools: use a model whose template does"
        raise ConfigError("rollout.agent", config.rollout.agent, problem)
    gateway = config.rollout.gateway
    if parser_of(tokenizer, gateway.tool_format, gateway.reasoning_format).format == NONE:
        problem = "the model's chat template does not tell how it writes tool calls: choose a format by its name"
        raise ConfigError("rollout.gateway.tool_format", gateway.tool_format, problem)
