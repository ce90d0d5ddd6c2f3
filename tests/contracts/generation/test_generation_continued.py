"""Answers that outlive their server: two real server processes, one of which ends in the middle of them."""

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from realsys.config.schema import EmbeddedConfig, GenerationConfig
from realsys.generation.client import GenerationClient, Received, SamplingSpec
from realsys.generation.embedded.engine import build_engine
from realsys.generation.protocol import CONTINUES
from realsys.manager.messages import ScheduleReply, ScheduleRequest
from realsys.rollout.resumable_engine import EngineCall, ResumableEngine
from realsys.types import Ticket
from realsys.weights.disk.stage import DiskReader
from tests.support.serving.generation_models import make_model
from tests.support.serving.generation_servers import PROMPT, ServerUnderTest, check, drive, publish, serving
from tests.support.serving.sglang_server import needs_sglang, sglang_engine

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[3]
BOUND_S = 60.0
TICKET = Ticket("17", 0, prompt_index=0, n=2, seed=400)
LENGTH = 60
LONG = 2000  # tokens: many seconds of SGLang on a CPU
PAUSE_AFTER = 100  # tokens of both answers: in the middle of each


class Process:
    """A server that can pause in the middle of completions. ``which``: tokens until then, or ``sglang``."""

    def __init__(self, model_path, which=0):
        command = [sys.executable, "-m", "tests.support.serving.generation_process", str(model_path), str(which)]
        self._popen = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @property
    def url(self):
        """Once it is up. Call once."""
        return self._popen.stdout.readline().strip()

    def stop(self):
        self._popen.stdin.close()

    def kill(self):
        self._popen.kill()

    def kill_sglang(self):
        """Kill the process that samples; the server lives."""
        children = psutil.Process(self._popen.pid).children(recursive=True)
        next(child for child in children if any("sglang::scheduler" in word for word in child.cmdline())).kill()

    def join(self):
        self.stop()
        self._popen.wait(BOUND_S)
        self._popen.stdout.close()


class Places:
    """The manager's part: the first server until it is gone, then the second."""

    def __init__(self, urls):
        self.urls, self.requests = urls, list[ScheduleRequest]()
        self.gone = False

    async def schedule(self, request):
        self.requests.append(request)
        name = "second" if self.gone else "first"
        return ScheduleReply(name, self.urls[name], 0)


@pytest.fixture
def servers(tmp_path):
    models = {version: make_model("qwen2", tmp_path / f"hf{version}", seed=version) for version in (1, 2)}
    paths = {version: publish(tmp_path / "weights", version, tmp_path / f"hf{version}") for version in models}
    first, second = Process(tmp_path / "hf1", PAUSE_AFTER), Process(tmp_path / "hf2")
    try:
        yield first, second, models, paths
    finally:
        for process in (first, second):
            process.join()


class Watched(GenerationClient):
    """A client that shows what has arrived before the replies."""

    arrived: list[Received]

    async def generate(self, url, input_ids, spec, *, rid, seed, received=None):
        self.arrived.append(received)
        return await super().generate(url, input_ids, spec, rid=rid, seed=seed, received=received)


def generate(servers, chunk, end, progress_s=0.0):
    """Begin completions at the first server and end it in the middle; return them with the manager's requests.

    With ``progress_s`` the server ends once the client has all tokens that it sampled.
    """
    first, second, models, paths = servers

    async def test(_):
        client = Watched(BOUND_S, progress_s=progress_s)
        client.arrived = []
        try:
            return await roll_out(client)
        finally:
            await client.close()

    async def roll_out(client):
        places = Places({"first": first.url, "second": second.url})
        for name, version in (("first", 1), ("second", 2)):
            assert (await client.update_weights(places.urls[name], str(paths[version]), version, BOUND_S)).success
        spec = SamplingSpec(max_new_tokens=LENGTH, n=2, new_tokens_per_chunk=chunk)
        call = EngineCall(TICKET, "0.0", PROMPT, spec, TICKET.seed)
        rollout = asyncio.create_task(ResumableEngine(places, client).generate(call))
        async with asyncio.timeout(BOUND_S):
            while not (await client.server_info(places.urls["first"])).paused:
                assert not rollout.done()
            while progress_s and sum(len(one.tokens) for one in client.arrived[0].completions) < PAUSE_AFTER:
                await client.server_info(places.urls["first"])
            places.gone = True
            end(first)
            answers = await rollout
        server = ServerUnderTest("", models, paths, 0)
        for answer in answers:
            assert (len(answer.tokens), answer.finish_reason) == (LENGTH, "length")
            check(server, answer)  # every log-prob is of its version, over a prefix that this version computed
        return answers, places.requests

    return drive(test)


def test_killed_server_costs_only_its_current_piece(servers):
    answers, requests = generate(servers, 20, Process.kill)
    for answer in answers:
        assert answer.versions.tolist() == [1] * 40 + [2] * 20
    assert [request.failed_server for request in requests] == [None, None, None, "first"]
    assert requests[-1].failure is not None and "connection failed" in requests[-1].failure


def test_killed_server_costs_nothing_that_had_arrived(servers):
    """One request for whole completions: the client has their tokens since the last line at the latest."""
    answers, requests = generate(servers, 0, Process.kill, progress_s=0.02)
    for answer in answers:
        assert answer.versions.tolist() == [1] * 50 + [2] * 10
        assert [tokens for _, tokens in answer.route] == [50, 10]
    assert [request.failed_server for request in requests] == [None, "first"]
    assert [request.max_new_tokens for request in requests] == [60, 10]


@pytest.mark.parametrize("progress_s", [0.0, 0.02])
def test_stopped_server_hands_over_unfinished_completions(servers, progress_s):
    answers, requests = generate(servers, 0, Process.stop, progress_s)
    assert sum(answer.versions.tolist().count(1) for answer in answers) >= PAUSE_AFTER
    for answer in answers:
        assert set(answer.versions.tolist()) == {1, 2}
    assert [request.failed_server for request in requests] == [None, None]


@pytest.mark.parametrize("kill", [Process.kill, Process.kill_sglang], ids=["server", "sglang"])
def test_killed_sglang_costs_only_its_last_tokens(tmp_path, kill):
    """Its tokens arrive while one request for the whole completion runs. Older ones are not lost with it."""
    needs_sglang()
    model = make_model("qwen2", tmp_path / "hf", seed=1)
    path = publish(tmp_path / "weights", 1, tmp_path / "hf")
    first, second = Process(tmp_path / "hf", "sglang"), Process(tmp_path / "hf")

    async def test(_):
        client = Watched(BOUND_S, progress_s=0.02)
        client.arrived = []
        places = Places({"first": first.url, "second": second.url})
        for url in places.urls.values():
            assert (await client.update_weights(url, str(path), 1, BOUND_S)).success
        call = EngineCall(TICKET, "0.0", PROMPT, SamplingSpec(max_new_tokens=LONG, n=2), TICKET.seed)
        rollout = asyncio.create_task(ResumableEngine(places, client).generate(call))
        async with asyncio.timeout(BOUND_S):
            while not client.arrived or min(len(one.tokens) for one in client.arrived[0].completions) < 50:
                assert not rollout.done()
                await client.server_info(places.urls["first"])
            places.gone = True
            arrived = [len(one.tokens) for one in client.arrived[0].completions]
            kill(first)
            answers = await rollout
        await client.close()
        assert [request.failed_server for request in places.requests] == [None, "first"]
        for answer, count in zip(answers, arrived, strict=True):
            (_, kept), (name, rest) = answer.route
            assert (kept >= count, name, kept + rest) == (True, "second", LONG)
            check(ServerUnderTest("", {1: model}, {}, 0), answer)

    try:
        drive(test)
    finally:
        for process in (first, second):
            process.join()


@pytest.mark.parametrize("backend", ["embedded", "sglang"])
def test_continuation_is_taken_before_new_prompts(tmp_path, backend):
    """The server samples one completion at a time, and the continuation is the last to come."""
    make_model("qwen2", tmp_path / "hf", seed=1)
    if backend == "sglang":
        needs_sglang()
        engine = sglang_engine(
            tmp_path / "hf", "generation.sglang.args={'context-length': 4096, 'max-running-requests': 1}"
        )
    else:
        limits = EmbeddedConfig(max_running=1, context_length=4096)
        engine = build_engine(tmp_path / "hf", GenerationConfig(embedded=limits), DiskReader().stage)
    ended = []

    async def test(client):
        async def sample(name, tokens, priority=0):
            spec = SamplingSpec(max_new_tokens=tokens, priority=priority)
            await client.generate(url, PROMPT, spec, rid=name, seed=1)
            ended.append(name)

        async with asyncio.TaskGroup() as group, asyncio.timeout(BOUND_S):
            for queued, call in enumerate([("running", LONG), ("a", 8), ("b", 8), ("continues", 8, CONTINUES)]):
                group.create_task(sample(*call))
                while (load := await client.server_info(url)).queued < queued or not load.running:
                    assert not ended

    with serving(engine) as url:
        drive(test)
    assert ended == ["running", "continues", "a", "b"]
