"""The gateway alone, and before a real engine: ``python -m benchmarks.gateway``.

rate      episodes of 4 short turns against an engine that answers without delay: calls per CPU second of the server
          process, which runs the whole gateway (HTTP, JSON, template, record, reply) and nothing else
overhead  equal requests to /generate of the embedded engine and to /v1/chat/completions before it, one after the
          other in turn, with the tiny model: time of a call, and tokens per second of 8 concurrent ones
first     streams of the same requests: time to the first token of /generate, and to the first text of the gateway;
          time per token of the whole stream
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import uvloop

from benchmarks._table import report
from realsys.config.schema import EmbeddedConfig, GenerationConfig, TinyModelConfig
from realsys.data.arith import make_tiny_model, write_char_tokenizer
from realsys.data.tokenizer import TextTokenizer
from realsys.generation.client import GenerationClient, SamplingSpec
from realsys.generation.completion import Completion
from realsys.manager.messages import ScheduleReply, ScheduleRequest
from realsys.rollout.episode_session import Calls, EpisodeSession
from realsys.rollout.gateway.capture import Shared
from realsys.rollout.gateway.choices import Vocabulary
from realsys.rollout.gateway.gateway import LEAST_BODY, Gateway
from realsys.rollout.gateway.parser import parser_of
from realsys.rollout.gateway.sampling import CallLimits
from realsys.rollout.resumable_engine import Deliver, EngineCall, ResumableEngine
from realsys.types import Ticket

TURNS = 4
CONNECTIONS = 16
PROGRESS_S = 2.0
_TOKENS, _TEXT = (b'{"parts":[[',), (b'"delta":{"content":', b'"delta":{"reasoning_content":')
USER = {"role": "user", "content": "12+34="}
LIMITS = CallLimits(4096, 256, 64)


class Instant:
    """An engine that answers without delay with the same 16 tokens."""

    def __init__(self, tokens: list[int]) -> None:
        ids = np.array(tokens, np.int32)
        ones = np.ones(len(ids), np.int32)
        self._completion = Completion(ids, -ones.astype(np.float32), ones, "stop", (("a", len(ids)),))

    async def generate(self, call: EngineCall, deliver: Deliver = lambda number, completion: None) -> list[Completion]:
        completions = [self._completion] * call.spec.n
        for number, completion in enumerate(completions):
            deliver(number, completion)
        return completions

    def discard(self, ticket: Ticket) -> None:
        pass


class OneServer:
    """The manager's part."""

    def __init__(self, url: str) -> None:
        self._reply = ScheduleReply("only", url, 0)

    async def schedule(self, request: ScheduleRequest) -> ScheduleReply:
        return self._reply


class Connection:
    """One HTTP connection that stays open. A client with more comfort would take the CPU that is measured."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader, self._writer, self._host = reader, writer, host

    @classmethod
    async def open(cls, url: str) -> Connection:
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 24)
        return cls(reader, writer, parts.netloc)

    def _send(self, path: str, body: object) -> None:
        content = msgspec.json.encode(body)
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        self._writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)

    async def first(self, path: str, body: object, marks: tuple[bytes, ...]) -> tuple[float, float]:
        """Return the seconds until one of ``marks`` is in the reply, and those until its end."""
        begin, seen, first = time.perf_counter(), b"", 0.0
        self._send(path, body)
        while not seen.endswith(b"\r\n0\r\n\r\n"):
            if not (piece := await self._reader.read(1 << 16)):
                raise RuntimeError(f"{path}: the connection was closed after {seen[-300:]!r}")
            seen += piece
            if not first and any(mark in seen for mark in marks):
                first = time.perf_counter() - begin
        return first, time.perf_counter() - begin

    async def post(self, path: str, body: object) -> Any:
        self._send(path, body)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(answer.split(b"content-length:")[1].split(b"\r\n")[0])
        reply = msgspec.json.decode(await self._reader.readexactly(length))
        if not answer.startswith(b"http/1.1 200"):
            raise RuntimeError(f"{path}: {reply}")
        return reply

    def close(self) -> None:
        self._writer.close()


def make_model(root: Path, positions: int = 1024) -> Path:
    make_tiny_model(TinyModelConfig(chat=True, max_position_embeddings=positions), root, seed=1)
    write_char_tokenizer(root, chat=True)
    # A random model samples any byte. Most of them are a part of a character, which is no text to show yet.
    file = root / "tokenizer.json"
    tokenizer = json.loads(file.read_text("utf-8"))
    names = (f"{a}{b}" for a in string.ascii_lowercase for b in string.ascii_lowercase)
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {
        text if text.isascii() or text in "ĠĊ" else next(names): number for text, number in vocabulary.items()
    }
    file.write_text(json.dumps(tokenizer), "utf-8")
    return root


def gateway_over(tokenizer: TextTokenizer) -> Gateway:
    parser = parser_of(tokenizer)
    shared = Shared(tokenizer, lambda: parser, Vocabulary(tokenizer), LIMITS, "policy", 60.0)
    return Gateway(shared, max_body=LEAST_BODY)


async def serve_instant(model: Path, episodes: int) -> None:
    """Serve ``episodes`` episodes. Lines on stdout: the addresses, then CPU seconds for each line of stdin."""
    tokenizer = TextTokenizer(model)
    gateway = gateway_over(tokenizer)
    engine = Instant([*tokenizer.encode_text("34+12#46=46;ok"), tokenizer.eos_token_id])
    spec = SamplingSpec(max_new_tokens=64)
    sessions = [EpisodeSession(Calls(engine, Ticket(str(k), 0, 0), spec), 0, gateway) for k in range(episodes)]
    gc.freeze()  # as ``worker_main`` does
    print(json.dumps([session.base_url for session in sessions]), flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        print(time.process_time(), flush=True)
    await gateway.close()


async def play(urls: list[str]) -> None:
    """Play episodes, one after the other on each connection."""
    waiting = list(urls)

    async def one() -> None:
        connection = await Connection.open(urls[0])
        while waiting:
            path, messages = urlsplit(waiting.pop()).path, [USER]
            for _ in range(TURNS):
                reply = await connection.post(f"{path}/chat/completions", {"model": "m", "messages": messages})
                messages += [reply["choices"][0]["message"], USER]
        connection.close()

    await asyncio.gather(*(one() for _ in range(CONNECTIONS)))


def measure_rate(model: Path, episodes: int, repeats: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.gateway", "--serve", str(model), "--episodes", str(episodes * repeats)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        urls, rows = json.loads(server.stdout.readline()), []
        for k in range(repeats):
            before, begin = _cpu(server), time.perf_counter()
            uvloop.run(play(urls[k * episodes : (k + 1) * episodes]))
            seconds, cpu = time.perf_counter() - begin, _cpu(server) - before
            calls = episodes * TURNS
            rows.append({"calls_per_cpu_s": calls / cpu, "calls_per_s": calls / seconds, "cpu_us": 1e6 * cpu / calls})
        server.stdin.close()
    best = sorted(rows, key=lambda row: row["calls_per_cpu_s"])[len(rows) // 2]
    return [{"part": "rate", **{name: round(value, 1) for name, value in best.items()}}]


def _cpu(server: subprocess.Popen[str]) -> float:
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write("\n")
    server.stdin.flush()
    return float(server.stdout.readline())


def serve_engine(model: Path) -> None:
    """Run the embedded engine until stdin ends; its URL is the first line of stdout."""
    from realsys.cluster.http_server import HttpServer
    from realsys.generation.embedded.engine import build_engine
    from realsys.generation.server import build_app
    from realsys.weights.disk.stage import DiskReader

    config = GenerationConfig(embedded=EmbeddedConfig(max_running=8, max_queued=32, context_length=1024))
    engine = build_engine(model, config, DiskReader(everything=True).stage)
    http = HttpServer(build_app(engine))
    engine.start()
    http.start()
    print(http.url, flush=True)
    sys.stdin.read()
    engine.close()
    http.close()


async def measure_overhead(url: str, model: Path, tokens: int, requests: int, part: str | None) -> list[dict[str, Any]]:
    """Compare calls of the engine at ``url`` with and without the gateway. ``part``: overhead or first; None: both."""
    tokenizer = TextTokenizer(model)
    client = GenerationClient(timeout_s=300.0, progress_s=PROGRESS_S)
    gateway = gateway_over(tokenizer)
    try:
        spec = SamplingSpec(max_new_tokens=tokens, min_new_tokens=tokens)
        calls = Calls(ResumableEngine(OneServer(url), client), Ticket("1", 0, 0), spec)
        rows = []
        for parallel in (1, 8) if part != "first" else ():
            # A connection that sends nothing for a minute is closed, so each part opens its own.
            sides = await _sides(url, tokenizer, gateway, calls, parallel)
            rows.append(await _compare(sides, parallel, requests))
        for parallel in (1, 8) if part != "overhead" else ():
            rows.append(await _first_text(url, tokenizer, gateway, calls, parallel, requests))
        return rows
    finally:
        await gateway.close()
        await client.close()


_NUMBERS = iter(range(10**9))  # of episodes, whose calls need ids of their own
Ask = Callable[[], Awaitable[int]]


async def _sides(
    url: str, tokenizer: TextTokenizer, gateway: Gateway, calls: Calls, parallel: int
) -> dict[str, list[Ask]]:
    """Return two ways to get a completion, for each of the connections. Each gives the number of its tokens."""
    ids = tokenizer.encode_chat([USER])
    seeds = iter(range(10**9))

    def direct(connection: Connection) -> Ask:
        async def ask() -> int:
            body = {"input_ids": ids, "sampling_params": calls.spec.params(next(seeds)), "return_logprob": True}
            return len((await connection.post("/generate", body))["output_ids"])

        return ask

    def through(connection: Connection) -> Ask:
        async def ask() -> int:
            session = EpisodeSession(calls, next(_NUMBERS), gateway)
            session._number = 1  # a merged first call is another mechanism
            path = urlsplit(session.base_url).path
            reply = await connection.post(f"{path}/chat/completions", {"model": "m", "messages": [USER]})
            await session.close()
            return int(reply["usage"]["completion_tokens"])

        return ask

    opened = Connection.open
    host = gateway.open(EpisodeSession(calls, 0, gateway)).base_url
    return {
        "generate": [direct(await opened(url)) for _ in range(parallel)],
        "gateway": [through(await opened(host)) for _ in range(parallel)],
    }


async def _compare(sides: dict[str, list[Ask]], parallel: int, requests: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in sides}
    rounds = max(12, requests // parallel)
    for k in range(rounds + 2):
        for name in sides if k % 2 else reversed(list(sides)):
            begin = time.perf_counter()
            counts = await asyncio.gather(*(ask() for ask in sides[name]))
            if k >= 2:
                times[name].append((time.perf_counter() - begin) / sum(counts))
    ratios = [there / here for here, there in zip(times["generate"], times["gateway"], strict=True)]
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "part": f"overhead, {parallel} at a time",
        "generate_us_per_token": round(1e6 * medians["generate"], 1),
        "gateway_us_per_token": round(1e6 * medians["gateway"], 1),
        "overhead": round(medians["gateway"] / medians["generate"] - 1, 4),
        "median_ratio": round(statistics.median(ratios), 4),
    }


async def _first_text(
    url: str, tokenizer: TextTokenizer, gateway: Gateway, calls: Calls, parallel: int, requests: int
) -> dict[str, Any]:
    """Compare streams of the engine with and without the gateway."""
    ids, seeds = tokenizer.encode_chat([USER]), iter(range(10**9))
    host = gateway.open(EpisodeSession(calls, 0, gateway)).base_url
    times: dict[str, list[tuple[float, float]]] = {"generate": [], "gateway": []}

    async def direct(connection: Connection) -> None:
        body = {"input_ids": ids, "sampling_params": calls.spec.params(next(seeds)), "return_logprob": True}
        stream = {"progress_s": PROGRESS_S, "stream": True}
        times["generate"].append(await connection.first("/generate", body | stream, _TOKENS))

    async def through(connection: Connection) -> None:
        session = EpisodeSession(calls, next(_NUMBERS), gateway)
        session._number = 1
        path = f"{urlsplit(session.base_url).path}/chat/completions"
        body = {"model": "m", "messages": [USER], "stream": True}
        times["gateway"].append(await connection.first(path, body, _TEXT))
        await session.close()

    sides = [(direct, [await Connection.open(url) for _ in range(parallel)])]
    sides += [(through, [await Connection.open(host) for _ in range(parallel)])]
    for k in range(max(12, requests // parallel) + 2):
        if k == 2:  # after the first calls of both
            times["generate"].clear()
            times["gateway"].clear()
        for ask, connections in sides if k % 2 else reversed(sides):
            await asyncio.gather(*map(ask, connections))
    first = {name: 1e3 * statistics.median(value for value, _ in pairs) for name, pairs in times.items()}
    whole = {name: 1e3 * statistics.median(value for _, value in pairs) for name, pairs in times.items()}
    return {
        "part": f"first text, {parallel} at a time",
        "generate_first_ms": round(first["generate"], 2),
        "gateway_first_ms": round(first["gateway"], 2),
        "first_ratio": round(first["gateway"] / first["generate"], 2),
        "generate_whole_ms": round(whole["generate"], 1),
        "gateway_whole_ms": round(whole["gateway"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", type=Path, help="run as the server of the part rate")
    parser.add_argument("--engine", type=Path, help="run as the engine of the part overhead")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--part", choices=["rate", "overhead", "first"])
    arguments = parser.parse_args()
    if arguments.serve:
        uvloop.run(serve_instant(arguments.serve, arguments.episodes))
        return
    if arguments.engine:
        serve_engine(arguments.engine)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        rows: list[dict[str, Any]] = []
        if arguments.part in ("rate", None):
            rows += measure_rate(model, arguments.episodes, arguments.repeats)
        if arguments.part != "rate":
            command = [sys.executable, "-m", "benchmarks.gateway", "--engine", str(model)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
                assert engine.stdout is not None
                url = engine.stdout.readline().strip()
                rows += uvloop.run(measure_overhead(url, model, arguments.tokens, arguments.requests, arguments.part))
                engine.communicate()
    meta = {"episodes": arguments.episodes, "turns": TURNS, "repeats": arguments.repeats, "tokens": arguments.tokens}
    if arguments.part is None:
        report("gateway", rows, meta)
    else:
        print(rows)


if __name__ == "__main__":
    main()
