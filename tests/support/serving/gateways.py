"""Episodes with an address: the gateway over a real engine with the chat form of the tiny model, or a scripted one."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import openai
from safetensors.torch import load_file, save_file

from realsys.config.schema import EmbeddedConfig, GenerationConfig, TinyModelConfig
from realsys.data.arith import make_tiny_model, write_char_tokenizer
from realsys.data.tokenizer import TextTokenizer
from realsys.generation.client import GenerationClient
from realsys.generation.completion import Completion
from realsys.generation.threaded import ThreadedEngine
from realsys.manager.messages import ScheduleReply, ScheduleRequest
from realsys.rollout.episode_session import Calls, CompletionEngine, EpisodeSession
from realsys.rollout.gateway.gateway import Gateway, gateway_of
from realsys.rollout.group_player import sampling_spec
from realsys.rollout.resumable_engine import Deliver, EngineCall, ResumableEngine
from realsys.types import Ticket
from tests.support.processes.config_trees import changed

BOUND_S = 300.0  # only a hang takes so long
TICKET = Ticket("17", 0, prompt_index=0, n=2, seed=400)
SETTINGS = ("data.chat_template=true", "data.max_prompt_tokens=400", "generation.sampling.max_new_tokens=24")
USER = {"role": "user", "content": "1+1="}


def make_chat_model(root: Path, seed: int = 0) -> Path:
    """Write the chat form of the tiny model with random weights."""
    tiny = TinyModelConfig(chat=True, hidden_size=32, num_hidden_layers=1, intermediate_size=48)
    make_tiny_model(tiny, root, seed=seed)
    write_char_tokenizer(root, chat=True)
    return root


def make_sharp_chat_model(root: Path) -> Path:
    """Write the chat form of the tiny model such that it prefers some tokens: a temperature then matters."""
    make_chat_model(root)
    tensors = load_file(root / "model.safetensors")
    tensors["lm_head.weight"] *= 40.0
    save_file(tensors, root / "model.safetensors", {"format": "pt"})
    return root


CALL = '{"name": "add", "arguments": {"a": 1}}'
_END = "<|im_end|>"
#: token -> tokens that the chain model samples after it, with equal probability
CHAIN = {
    "\n": ["<think>", "h", "\n", "5"],
    "<think>": ["h", "\n", "5"],
    "h": ["m", "i", " ", "<"],
    "m": [" ", "</think>", "h", "\n"],
    "i": [" ", "5", "<tool_call>", _END],
    " ": ["h", "5", " ", "<tool_call>"],
    "5": ["</think>", " ", "h", _END],
    "<": ["h", "/", "<tool_call>"],
    "/": ["h", "<think>"],
    "</think>": ["\n", "h", "<tool_call>"],
    "<tool_call>": [CALL, CALL, "h"],
    CALL: ["</tool_call>", "</tool_call>", "<"],
    "</tool_call>": [_END, "\n", "<tool_call>"],
}


def make_chain_model(root: Path) -> Path:
    """Write a chat model whose next token depends on the one before it alone: it reasons, stops and calls tools."""
    make_chat_model(root)
    file = root / "tokenizer.json"
    written = json.loads(file.read_text("utf-8"))
    ids = written["model"]["vocab"]
    ids[CALL.replace(" ", "Ġ")] = ids.pop("ÿ")  # of a byte that no text has
    file.write_text(json.dumps(written), "utf-8")
    own = {text: ids[text.replace(" ", "Ġ").replace("\n", "Ċ")] for text in (*CHAIN, _END)}
    tensors = load_file(root / "model.safetensors")
    for name, tensor in tensors.items():  # only embedding and head are left
        tensor.fill_(1.0 if "norm" in name else 0.0)
    for place, (text, following) in enumerate(CHAIN.items()):
        tensors["model.embed_tokens.weight"][own[text], place] = 1.0
        for each in following:
            tensors["lm_head.weight"][own[each], place] = 2.0  # times the norm of 32 numbers, 5.7
    save_file(tensors, root / "model.safetensors", {"format": "pt"})
    return root


@dataclass
class PauseAfter:
    """Pauses an engine after ``steps`` further steps, if they are not 0, until the test resumes it."""

    steps: int = 0

    def watch(self, engine: ThreadedEngine) -> None:
        if self.steps:
            self.steps -= 1
            engine._paused = not self.steps


@contextmanager
def chat_server(model: Path, pauses: PauseAfter | None = None) -> Iterator[str]:
    """Run the embedded engine behind HTTP, with the model as version 0; gives the URL."""
    from realsys.generation.embedded.engine import build_engine
    from realsys.weights.disk.stage import DiskReader
    from tests.support.serving.generation_servers import publish, serving

    config = GenerationConfig(embedded=EmbeddedConfig(max_running=8, max_queued=32, context_length=512))
    engine = build_engine(model, config, DiskReader(everything=True).stage)
    with tempfile.TemporaryDirectory() as folder, serving(engine) as url:
        assert engine.update(str(publish(Path(folder), 0, model)), 0).result(BOUND_S).success
        engine._on_step = None if pauses is None else lambda core: pauses.watch(engine)
        yield url


class _Place:
    """The manager's part: there is one server."""

    def __init__(self, url: str) -> None:
        self._reply = ScheduleReply("only", url, 0)

    async def schedule(self, request: ScheduleRequest) -> ScheduleReply:
        return self._reply


class Recorded:
    """An engine that keeps what another one was sent and returned."""

    def __init__(self, engine: CompletionEngine) -> None:
        self._engine = engine
        self.calls: list[EngineCall] = []
        self.returned: list[tuple[list[int], Completion]] = []  # (input, completion)
        self.began = asyncio.Event()

    async def generate(self, call: EngineCall, deliver: Deliver = lambda number, completion: None) -> list[Completion]:
        self.calls.append(call)
        self.began.set()
        completions = await self._engine.generate(call, deliver)
        self.returned += [(call.token_ids, completion) for completion in completions]
        return completions

    def discard(self, ticket: Ticket) -> None:
        self._engine.discard(ticket)


@dataclass
class Scripted:
    """An engine that answers with the tokens of ``texts``, in turn; ``gate`` holds them back; ``errors`` come first."""

    tokenizer: TextTokenizer
    texts: list[str] = field(default_factory=lambda: ["2"])
    errors: list[Exception] = field(default_factory=list)
    gate: asyncio.Event | None = None
    cancelled: int = 0
    answered: int = 0

    async def generate(self, call: EngineCall, deliver: Deliver = lambda number, completion: None) -> list[Completion]:
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.errors:
            raise self.errors.pop(0)
        completions = [self._completion(call) for _ in range(call.spec.n)]
        for number, completion in enumerate(completions):
            deliver(number, completion)
        return completions

    def discard(self, ticket: Ticket) -> None:
        pass

    def _completion(self, call: EngineCall) -> Completion:
        text = self.texts[self.answered % len(self.texts)]
        self.answered += 1
        ids = [*self.tokenizer.encode_text(text), self.tokenizer.eos_token_id][: call.spec.max_new_tokens]
        ones = np.ones(len(ids), np.int32)
        reason = "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"
        return Completion(np.array(ids, np.int32), -ones.astype(np.float32), 7 * ones, reason, (("only", len(ids)),))


@dataclass
class Opened:
    """One episode with its address."""

    gateway: Gateway
    calls: Calls
    session: EpisodeSession
    engine: Recorded
    config: object
    clients: list[openai.AsyncOpenAI] = field(default_factory=list)

    def sdk(self, **settings: object) -> openai.AsyncOpenAI:
        """Return OpenAI's own client of the episode."""
        options = {"base_url": self.session.base_url, "api_key": self.session.api_key, "max_retries": 0} | settings
        self.clients.append(openai.AsyncOpenAI(**options))
        return self.clients[-1]

    def another(self, episode: int = 1) -> EpisodeSession:
        return EpisodeSession(self.calls, episode, self.gateway)

    def row_tokens(self) -> list[list[int]]:
        return [row.tokens.tolist() for row in self.session.capture.rows()]


@asynccontextmanager
async def opened(engine: CompletionEngine, tokenizer: TextTokenizer, *settings: str) -> AsyncIterator[Opened]:
    """Open an episode over ``engine``. ``settings``: overrides of the configuration."""
    config = changed(*SETTINGS, *settings)
    recorded = Recorded(engine)
    gateway = gateway_of(config, tokenizer)
    calls = Calls(recorded, TICKET, sampling_spec(config.generation.sampling, tokenizer.eos_token_ids))
    session = EpisodeSession(calls, 0, gateway)
    episode = Opened(gateway, calls, session, recorded, config)
    try:
        async with asyncio.timeout(BOUND_S):
            yield episode
    finally:
        for client in episode.clients:
            await client.close()
        await session.close()
        await calls.close()
        await gateway.close()


@asynccontextmanager
async def over_server(url: str, tokenizer: TextTokenizer, *settings: str) -> AsyncIterator[Opened]:
    """Open an episode over a generation server."""
    client = GenerationClient(timeout_s=BOUND_S, progress_s=0.2)
    try:
        async with opened(ResumableEngine(_Place(url), client), tokenizer, *settings) as episode:
            yield episode
    finally:
        await client.close()


async def post(episode: Opened, route: str, body: object, **options: object) -> httpx.Response:
    """Send one request with httpx; ``route`` follows base_url."""
    async with httpx.AsyncClient(timeout=BOUND_S) as client:
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return await client.post(f"{episode.session.base_url}/{route}", **content, **options)
