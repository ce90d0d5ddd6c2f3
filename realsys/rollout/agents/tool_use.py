"""The agent ``tool_use``: the model calls tools, and reads their results, until it answers without a call.

    prompt ──> completion ──tool calls?──no, cut off, last turn, no room──> end: the environment judges the last one
                  ^             └─ yes ──> results (mask False) ──┐
                  └──────────────────────────────────────────────┘

Only prompt and results are tokenised (`token-identity`): ``realsys.rollout.conversation``. How the model writes a tool
call is read by ``realsys.rollout.gateway.parser``.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
import operator
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec.structs import replace

from realsys.config.doors import TOOL
from realsys.config.schema import Config
from realsys.config.trial_sizes import longest_sequence
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import AgentError, ConfigError, DataError
from realsys.generation.completion import Completion
from realsys.observe.spans import span
from realsys.reward.sandbox.sandbox import Sandbox
from realsys.reward.sandbox.settings import INSTALL, Output, RunLimits
from realsys.rollout.agents.contract import AgentParts, Session
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
        self._tools = build(tools)
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
        built = build(tools)
        try:
            descriptions = [tool.description for tool in built.values()]
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
                problem = (
                    "the model's chat template does not tell how it writes tool calls: choose a format by its name"
                )
                raise ConfigError("rollout.gateway.tool_format", gateway.tool_format, problem)
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


# ---- tools that the model calls in the agent ``tool_use``: contract, choice, calculator, Python
#
# Names of tools: ``realsys.config.doors``.


class ToolError(Exception):
    """The call is wrong. Its message is the result that the model reads."""


class Tool(Protocol):
    """A tool. One object per RolloutWorker serves many episodes. A class without constructor arguments.

    A tool with places for few calls may have ``async ready()``, which waits until one is free. ``call`` follows without
    a pause in between. The wait takes no time from the episode.
    """

    description: dict[str, Any]  # form of OpenAI's API: type, function (name, description, parameters)

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Return the result as the model reads it. ``arguments`` are the model's: any JSON object.

        Raises ToolError; any other exception fails the episode. The call is cancelled after ``timeout_s``.
        """
        ...

    def close(self) -> None:
        """End the processes and threads of the tool."""
        ...


def describe(name: str, text: str, **parameters: str) -> dict[str, Any]:
    """Return the description of a tool whose ``parameters`` (name -> meaning) are all required texts."""
    properties = {name: {"type": "string", "description": meaning} for name, meaning in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}


def text_argument(arguments: dict[str, Any], name: str) -> str:
    """Return a text argument. Raises ToolError if the model did not give it."""
    value = arguments.get(name)
    if not isinstance(value, str):
        raise ToolError(f"error: the argument {name} must be a text")
    return value


# ---- choice of tools


def build(names: Sequence[str]) -> dict[str, Tool]:
    """Build the tools that ``rollout.agent_args.tools`` names; the model calls them by the names of their descriptions.

    Raises ConfigError, also for a tool that cannot work on this machine.
    """
    if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            TOOL.field, names, f"must be a list of tools: {', '.join(TOOL.builtin)}, or package.module:Class"
        )
    tools: dict[str, Tool] = {}
    for name in names:
        loaded = TOOL.load(name)
        with TOOL.guard(name, "cannot be built"):
            tool: Tool = loaded()
        if tool.description["function"]["name"] in tools:
            raise ConfigError(TOOL.field, names, f"{name} has the name of another tool: name each tool once")
        tools[tool.description["function"]["name"]] = tool
    return tools


# ---- calculator: arithmetic of numbers, without running code. Its time and its numbers are bounded


MAX_CHARACTERS = 1000
MAX_BITS = 4096  # longest integer
MAX_DEPTH = 100

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class Calculator:
    """Tool with + - * / // % ** and parentheses."""

    description = describe("calculator", "Computes an arithmetic expression.", expression="such as (3+5)*2")

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Return the value of ``expression``."""
        return calculate(text_argument(arguments, "expression"))

    def close(self) -> None:
        """There is nothing to end."""


def calculate(expression: str) -> str:
    """Return the value of an expression. Raises ToolError."""
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"error: more than {MAX_CHARACTERS} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body, 0)
    except ZeroDivisionError:
        raise ToolError("error: division by zero") from None
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
        raise ToolError("error: not an arithmetic expression") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("error: the number is too large")
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def _value(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise ToolError("error: too many parentheses")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand, depth + 1))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left, depth + 1), _value(node.right, depth + 1)
        power = isinstance(node.op, ast.Pow) and isinstance(left, int) and isinstance(right, int)
        if power and int(left).bit_length() * abs(right) > MAX_BITS:  # computing it would take long
            raise ToolError("error: the number is too large")
        result = _BINARY[type(node.op)](left, right)
        if isinstance(result, complex):
            raise ToolError("error: the root of a negative number")
        return _bounded(result)
    raise ToolError("error: not an arithmetic expression")


def _bounded(value: Any) -> Number:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolError("error: the number is too large")
    number: Number = value
    return number


# ---- python: runs a program in the sandbox and returns its output


MEMORY_MB = 512.0
_SHORTEST_S = 0.1


class Python:
    """Tool that runs Python programs. They see no file of the trial, no network, and nothing of each other."""

    description = describe(
        "python", "Runs a Python program and returns what it prints.", code="the whole program, with print"
    )

    def __init__(self) -> None:
        """Raise ConfigError if this machine cannot isolate programs."""
        if shutil.which("bwrap") is None:
            problem = f"python needs a sandbox, and bwrap is not found: {INSTALL}, or leave python out"
            raise ConfigError("rollout.agent_args.tools", "python", problem)
        self._places = max(2, os.cpu_count() or 2)  # programs that run at a time
        self._running = 0
        self._ended = asyncio.Event()
        self._threads = ThreadPoolExecutor(self._places, "python-tool")
        self._own = threading.local()  # a sandbox belongs to one thread
        self._sandboxes: list[Sandbox] = []

    async def ready(self) -> None:
        """Wait for a free thread. Programs of other episodes hold each one for their bounded time."""
        while self._running >= self._places:
            self._ended.clear()
            await self._ended.wait()

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Return what the program ``code`` prints, and the last line of its error."""
        code, loop = text_argument(arguments, "code"), asyncio.get_running_loop()
        program = loop.run_in_executor(self._threads, self._run, code, timeout_s)
        self._running += 1
        program.add_done_callback(self._end)
        return await asyncio.shield(program)  # a call that is cancelled leaves its thread busy

    def close(self) -> None:
        """End the sandboxes, and with them all programs."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for sandbox in self._sandboxes:
            sandbox.close()

    def _end(self, _: asyncio.Future[str]) -> None:
        self._running -= 1
        self._ended.set()

    def _run(self, code: str, timeout_s: float) -> str:
        if not hasattr(self._own, "sandbox"):
            self._own.sandbox = Sandbox()
            self._sandboxes.append(self._own.sandbox)
        seconds = max(_SHORTEST_S, timeout_s)
        limits = RunLimits(cpu_s=seconds, wall_s=seconds, memory_mb=MEMORY_MB)
        output: Output = self._own.sandbox.run(code, b"", limits)
        printed = output.stdout.decode("utf-8", "replace")
        if not output.ended.reason:
            return printed
        lines = output.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = lines[-1] if output.ended.reason == "crashed" and lines else f"limit reached: {output.ended.reason}"
        raise ToolError(f"{printed}error: {reason}")
