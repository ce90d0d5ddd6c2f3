"""Play held-out tasks with your agent and verifier, one after the other in one process, without training.

Print each conversation as it goes, the rows that would be trained, the reward, and errors with file and line. Exit code
1 if a task failed.

    held-out prompt ──> agent.run ──generate──> Shown ──> server in this process
                           │                      └── prints what the model got and sampled, call by call
                           └── Episode: rows and reward, or the error with its place

One task is played at a time: the first conversation appears within seconds, and lines of two conversations never mix.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from rich.text import Text

from realsys.cluster.http_server import HttpServer
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.data.prompts import Prompt, PromptDataset
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import ConfigError, GenerationError, RealsysError, WeightsError
from realsys.generation.backend import EngineParts, make_backend
from realsys.generation.client import GenerationClient
from realsys.generation.completion import Completion
from realsys.generation.protocol import UNSYNCED
from realsys.launch.commands.evaluate import planned_evaluation
from realsys.launch.commands.options import add_config_dir, count
from realsys.launch.commands.samples import printable
from realsys.launch.evaluation_target import Choices, find_target
from realsys.launch.prepare import make_inputs
from realsys.manager.messages import ScheduleReply, ScheduleRequest
from realsys.observe.samples.step_samples import VERDICTS, token_kinds
from realsys.observe.screen.terminal import Terminal
from realsys.observe.screen.text_figures import worth_showing
from realsys.reward.open_verifiers import own_verifiers
from realsys.rollout import agents, environments
from realsys.rollout.episode_session import CompletionEngine
from realsys.rollout.gateway.gateway import check as check_gateway
from realsys.rollout.gateway.gateway import gateway_of
from realsys.rollout.group_player import GroupPlayer, group_player
from realsys.rollout.resumable_engine import Deliver, EngineCall, ResumableEngine
from realsys.types import Episode, Row, Ticket, sampling_seed

_MODEL = "model.path="
_START_S = 60.0  # bound on the start of the HTTP server
_SPLIT = "eval"

Say = Callable[[Text | str], None]


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="+", metavar="WORD", help="folder of a model or trial, or model.path=DIR; and overrides"
    )
    parser.add_argument("--tasks", type=count, metavar="N", default=4, help="held-out tasks (default: %(default)s)")
    parser.add_argument(
        "--server",
        metavar="URL",
        help="sample from this server, realsys's or SGLang's, which serves the model; start none",
    )
    parser.add_argument("--step", type=int, metavar="N", help="weights of this step of the trial (default: the last)")
    add_config_dir(parser, "your configuration files, as for run")


def run(args: Namespace) -> int:
    """Play tasks and print them. Return 1 if one failed, else 0. Raises RealsysError for bad input."""
    tasks: int = args.tasks
    if tasks < 1:
        raise ConfigError("--tasks", tasks, "must be at least 1")
    target, overrides = _target(args.overrides)
    if not any(text.startswith("evaluation.problems=") for text in overrides):
        overrides.append(f"evaluation.problems={tasks}")
    planned = planned_evaluation(find_target(target, args.step), Choices(overrides, args.config_dir))
    console = Terminal(highlight=False, emoji=False)

    def say(text: Text | str) -> None:
        console.print(text, soft_wrap=True, markup=False)

    say(f"playing held-out tasks with {planned.config.model.path}, agent {planned.config.rollout.agent}")
    with tempfile.TemporaryDirectory(prefix="realsys-") as scratch:
        paths = TrialPaths(Path(scratch))
        paths.data.mkdir()
        make_inputs(planned.config, paths)
        return asyncio.run(_play_tasks(planned.config, paths, tasks, args.server, say))


def _target(words: list[str]) -> tuple[str, list[str]]:
    """Return what names the model, and the overrides."""
    if words and "=" not in words[0]:
        return words[0], words[1:]
    named = [text for text in words if text.startswith(_MODEL)]
    if not named:
        raise ConfigError("model.path", "", "give a model folder or a trial as the first word, or model.path=DIR")
    return named[-1].removeprefix(_MODEL), [text for text in words if text not in named]


async def _play_tasks(config: Config, paths: TrialPaths, tasks: int, server: str | None, say: Say) -> int:
    tokenizer = TextTokenizer(paths.base_model(config))
    agents.check(config, tokenizer)
    check_gateway(config, tokenizer)
    prompts = PromptDataset(config, paths, tokenizer)
    rewards, count = list[float](), min(tasks, prompts.size(_SPLIT))
    async with _player(config, paths, tokenizer, server, say) as player:
        for number in range(count):
            prompt = prompts.prompt(_SPLIT, number)
            say(Text(f"\ntask {number}", style="bold"))
            ticket = Ticket(f"{number:012d}", 0, number, split=_SPLIT, seed=sampling_seed(config.seed, number))
            if (episode := await _played(player, ticket, prompt, say)) is not None:
                rewards.append(episode.reward)
    mean = f", mean reward {sum(rewards) / len(rewards):g}" if rewards else ""
    say(f"\n{count} played, {count - len(rewards)} failed{mean}")
    return int(len(rewards) < count)


async def _played(player: GroupPlayer, ticket: Ticket, prompt: Prompt, say: Say) -> Episode | None:
    """Play one task, print its episode and return it; None if it failed."""
    try:
        [episode] = (await player.play(ticket, prompt)).ended
    except RealsysError as error:
        say(Text(f"  failed     {type(error).__name__}: {printable(str(error))}", style="red"))
        return None
    finally:
        say(f"  reference  {printable(prompt.answer)}")
    for text in episode_lines(episode):
        say(text)
    return episode


def episode_lines(episode: Episode) -> Iterator[str]:
    """Yield a line for each row that would be trained, and the reward with the parts of the verifier."""
    for number, row in enumerate(episode.rows):
        yield f"  row {number}      {_row(row)}"
    parts = [f"{episode.reward:g}", VERDICTS[episode.correct]]
    parts += [] if episode.answer is None else [f"answer {printable(episode.answer)}"]
    parts += [f"{name} {episode.metrics[name]:g}" for name in worth_showing(episode.metrics)]
    parts += [f"{value:g} at token {place}" for row in episode.rows for place, value in row.rewards]
    yield f"  reward     {', '.join(parts)}"


def _row(row: Row) -> str:
    """Return ``34 tokens, 20 trained: prompt 0-9, trained 10-29, context 30-33; stop``."""
    kinds = token_kinds(row.loss_mask, 0)
    starts = [place for place, kind in enumerate(kinds) if not place or kind != kinds[place - 1]]
    names = {"sampled": "trained"}
    runs = [
        f"{names.get(kinds[start], kinds[start])} {start}" + (f"-{end - 1}" if end - 1 > start else "")
        for start, end in zip(starts, [*starts[1:], len(kinds)], strict=True)
    ]
    return f"{len(kinds)} tokens, {row.loss_tokens} trained: {', '.join(runs)}; {row.finish_reason}"


class Shown:
    """An engine that prints each call: the tokens that the model had not seen yet, and the completions."""

    def __init__(self, engine: CompletionEngine, tokenizer: TextTokenizer, say: Say) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._say = say
        self._ticket = ""
        self._seen: list[list[int]] = []  # histories of the ticket, with their completions

    async def generate(self, call: EngineCall, deliver: Deliver = lambda number, completion: None) -> list[Completion]:
        completions = await self._engine.generate(call, deliver)
        if call.ticket.unit != self._ticket:
            self._ticket, self._seen = call.ticket.unit, []
        before = max((len(ids) for ids in self._seen if call.token_ids[: len(ids)] == ids), default=0)
        label = "prompt     " if not self._seen else "context    " if before else "branch     "
        self._say(Text(f"  {label}").append(printable(self._tokenizer.decode(call.token_ids[before:])), style="dim"))
        for completion in completions:
            ids = completion.tokens.tolist()
            self._seen.append([*call.token_ids, *ids])
            self._say(Text("  sampled    ").append(printable(self._tokenizer.decode(ids)), style="cyan"))
        return completions

    def discard(self, ticket: Ticket) -> None:
        self._engine.discard(ticket)


class _Client(GenerationClient):
    """A client of a server whose weights have no version here: its tokens get 0, so that rows can be made."""

    async def generate(self, *args: Any, **named: Any) -> list[Completion]:
        made = await super().generate(*args, **named)
        return [replace(each, versions=np.zeros_like(each.versions), kv_versions=None) for each in made]


class _OneServer:
    """The decisions of a manager that has one server."""

    def __init__(self, url: str) -> None:
        self._place = ScheduleReply("generation_server/0", url, UNSYNCED)

    async def schedule(self, request: ScheduleRequest) -> ScheduleReply:
        return self._place


@contextlib.asynccontextmanager
async def _player(
    config: Config, paths: TrialPaths, tokenizer: TextTokenizer, server: str | None, say: Say
) -> AsyncIterator[GroupPlayer]:
    """Start the agent, its gateway, the verifiers and without ``server`` an engine in this process; close them."""
    async with contextlib.AsyncExitStack() as stack:
        url, token = (server.rstrip("/"), None) if server else await _started(config, paths, stack)
        client = _Client.of(config.generation, token, lambda: None)
        stack.push_async_callback(client.close)
        if server:
            try:
                await client.model_info(url, _START_S)
            except GenerationError as error:
                raise ConfigError("--server", url, f"does not answer as a generation server: {error}") from None
        verifiers = own_verifiers(config, processes=1)
        stack.push_async_callback(verifiers.close)
        gateway = gateway_of(config, tokenizer)
        stack.push_async_callback(gateway.close)
        agent = agents.build(config, tokenizer, environments.build(config, tokenizer, verifiers))
        stack.push_async_callback(agent.close)
        calls = Shown(ResumableEngine(_OneServer(url), client), tokenizer, say)
        yield group_player(config, agent, calls, tokenizer.eos_token_ids, gateway)


async def _started(config: Config, paths: TrialPaths, stack: contextlib.AsyncExitStack) -> tuple[str, str]:
    """Start a server in this process. Return its address and token."""
    from realsys.generation.server import build_app

    stops: list[Callable[[], None]] = []
    parts = EngineParts(config, paths.base_model(config), 0, _no_update, _no_update, lambda _: None, stops.append)
    engine = make_backend(config).build(parts)
    stack.callback(engine.close)
    await asyncio.to_thread(engine.start)
    token = secrets.token_hex(16)
    http = HttpServer(build_app(engine, token=token))
    http.start(_START_S)
    stack.callback(http.close)
    return http.url, token


def _no_update(locator: str, *_: object, **__: object) -> NoReturn:
    raise WeightsError(f"{locator}: the weights of this server never change")
