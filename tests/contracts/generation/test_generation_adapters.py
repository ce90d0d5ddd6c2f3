"""Weights per request: each is sampled with the version that it names, beside others, and fails alone."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from realsys.config.schema import EmbeddedConfig, GenerationConfig
from realsys.errors import GenerationError, ServerBusy
from realsys.generation.client import SamplingSpec
from realsys.generation.embedded.adapters import AdapterEngines
from realsys.generation.embedded.engine import EmbeddedEngine, build_engine
from realsys.generation.protocol import AdapterWeights, SamplingParams
from realsys.weights.contract import StagedWeights
from realsys.weights.disk.stage import DiskReader, stage
from tests.support.serving.generation_servers import (
    BOUND_S,
    CONTEXT,
    LONG,
    PROMPT,
    Versions,
    check,
    drive,
    embedded_server,
    flip,
    publish,
    raw,
    serving,
    shard_of,
    with_progress,
)

SPEC = SamplingSpec(max_new_tokens=24, n=2)


@dataclass
class Adapted:
    """An embedded server with adapters. ``reads``: how often each version was read; ``gate``: shut, reads wait."""

    url: str
    engine: AdapterEngines
    models: dict[int, object]
    paths: dict[int, Path]
    reads: Counter[int]
    gate: threading.Event

    def adapter(self, version: int) -> AdapterWeights:
        return AdapterWeights(f"tenant-{version}", version, str(self.paths[version]))


def main_engine(model: Path) -> EmbeddedEngine:
    config = GenerationConfig(embedded=EmbeddedConfig(max_running=4, max_queued=12, context_length=CONTEXT))
    return build_engine(model, config, DiskReader(everything=True).stage)


@contextmanager
def adapted(versions: Versions, **limits: float) -> Iterator[Adapted]:
    reads, gate = Counter[int](), threading.Event()
    gate.set()

    def read(locator: str, version: int) -> StagedWeights:
        assert gate.wait(BOUND_S)
        reads[version] += 1
        return stage(Path(locator), version)

    engine = AdapterEngines(main_engine(versions.paths[-1]), read, **limits)
    with serving(engine) as url:
        try:
            yield Adapted(url, engine, versions.models, versions.paths, reads, gate)
        finally:
            gate.set()


@pytest.fixture
def server(versions: Versions) -> Iterator[Adapted]:
    with adapted(versions) as made:
        yield made


async def sampled(client, server: Adapted, version: int | None, seed: int = 7, spec: SamplingSpec = SPEC):
    """Completions of a version; None: of the weights that the server has loaded."""
    adapter = None if version is None else server.adapter(version)
    return await client.generate(server.url, PROMPT, spec, rid="", seed=seed, adapter=adapter)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not holds():  # noqa: ASYNC110  (engines tell their load when asked)
            await asyncio.sleep(0.01)


def test_tenants_sample_as_a_server_of_their_version(server, versions):
    """At the same time, many times each, over two updates of the weights in training; each version is read once."""
    alone = {}
    for version in (1, 2, 0):

        async def of_its_own(client, version=version):
            url = lonely.url
            assert (await client.update_weights(url, str(versions.paths[version]), version, BOUND_S)).success
            return [await client.generate(url, PROMPT, SPEC, rid="", seed=seed) for seed in range(4)]

        with embedded_server(versions) as lonely:
            alone[version] = drive(of_its_own)

    async def test(client):
        assert (await client.update_weights(server.url, str(versions.paths[0]), 0, BOUND_S)).success
        order = [(version, seed) for seed in range(4) for version in (1, 2, None)]
        answers = await asyncio.gather(*(sampled(client, server, version, seed) for version, seed in order))
        for number in (3, 4):  # the weights of 1 and 2
            assert (await client.update_weights(server.url, str(versions.paths[number]), number, BOUND_S)).success
        again = await asyncio.gather(*(sampled(client, server, version, 0) for version in (1, 2)))
        return {**dict(zip(order, answers, strict=True)), (1, 0.0): again[0], (2, 0.0): again[1]}

    for (version, seed), made in drive(test).items():
        for answer, expected in zip(made, alone[version or 0][int(seed)], strict=True):
            assert answer.tokens.tolist() == expected.tokens.tolist()
            assert np.abs(answer.logprobs - expected.logprobs).max() <= 1e-5
            assert set(answer.versions.tolist()) == {version or 0}
            check(server, answer)
    assert server.reads == {1: 1, 2: 1}


def test_first_requests_of_a_tenant_load_it_once(server):
    """They wait, and so show nothing, while the weights are read; others are sampled meanwhile."""
    server.gate.clear()

    async def test(client):
        waiting = [asyncio.create_task(sampled(client, server, 1, seed)) for seed in range(3)]
        await until(lambda: server.engine.info().queued == 3 * SPEC.n)
        await sampled(client, server, None)
        assert not any(task.done() for task in waiting)
        server.gate.set()
        for answers in await asyncio.gather(*waiting):
            check(server, answers[0])
            assert set(answers[0].versions.tolist()) == {1}

    with_progress(test)
    assert server.reads == {1: 1}


def test_idle_tenant_gives_way_to_another(versions):
    """The one that was idle longest is closed; its tokens still count, and it comes back."""
    with adapted(versions, most=2) as server:

        async def test(client):
            tokens = 0
            for version in (1, 2, 1, 5, 1, 2):
                answers = await sampled(client, server, version)
                check(server, answers[0])
                tokens += sum(len(answer.tokens) for answer in answers)
            return tokens, await client.server_info(server.url)

        tokens, info = drive(test)
        assert server.reads == {1: 1, 2: 2, 5: 1}
        assert len(server.engine._adapters) == 2
        assert info.generated_tokens == tokens and info.running == info.queued == 0


def test_tenant_waits_while_all_others_are_busy(versions):
    with adapted(versions, most=1, wait_s=0.2) as server:

        async def test(client):
            await client.pause(server.url, "in_place")
            busy = asyncio.create_task(sampled(client, server, 1))
            await until(lambda: server.reads[1] == 1)
            with pytest.raises(ServerBusy, match="adapter 'tenant-2': 1 others have requests"):
                await sampled(client, server, 2)
            server.engine._wait_s = BOUND_S
            waiting = asyncio.create_task(sampled(client, server, 2))
            await until(lambda: server.engine.info().queued >= SPEC.n)
            await client.resume(server.url)
            check(server, (await busy)[0])
            check(server, (await waiting)[0])

        drive(test)


def test_damaged_version_is_an_error_of_its_requests(server, versions, tmp_path):
    """The error names what is wrong. Everybody else goes on, and so does the tenant once the version is repaired."""
    path = publish(tmp_path, 6, versions.paths[-1])
    server.paths = {**versions.paths, 6: path, 7: tmp_path / "gone"}

    async def test(client):
        flip(shard_of(path))
        others = [asyncio.create_task(sampled(client, server, version, spec=LONG)) for version in (1, None)]
        for version, reason in ((6, "corrupt"), (7, "gone")):
            for _ in range(2):
                with pytest.raises(GenerationError, match=f"status 400: adapter 'tenant-{version}': .*{reason}") as one:
                    await sampled(client, server, version)
                assert not one.value.retryable
        flip(shard_of(path))
        assert set((await sampled(client, server, 6))[0].versions.tolist()) == {6}
        for answers in await asyncio.gather(*others):
            check(server, answers[0])
        shutil.rmtree(path)
        assert await sampled(client, server, 6)  # it is loaded
        with pytest.raises(GenerationError, match="input_ids contains token"):
            await client.generate(server.url, [10**6], SPEC, rid="", seed=1, adapter=server.adapter(1))

    drive(test)


@pytest.mark.parametrize("everything", [False, True])
def test_abort_ends_requests_of_tenants(server, everything):
    """One that runs keeps its tokens; one whose weights are still read has none, and the reply has its version."""

    async def test(client):
        async def begin(version, rid):
            body = {"input_ids": PROMPT, "rid": rid, "adapter": {**_fields(server.adapter(version))}}
            return await raw(server, "/generate", body | {"sampling_params": {"max_new_tokens": 480, "n": 1}})

        await sampled(client, server, 1)
        await client.pause(server.url, "in_place")
        server.gate.clear()
        tasks = [asyncio.create_task(begin(version, f"of-{version}")) for version in (1, 2)]
        await until(lambda: server.engine.info().queued == 2)
        if everything:
            await client.pause(server.url, "abort")
        else:
            for version in (1, 2):
                await client.abort(server.url, f"of-{version}")
        for version, task in zip((1, 2), tasks, strict=True):
            status, reply = await task
            assert status == 200 and reply["meta_info"]["finish_reason"]["type"] == "abort"
            assert reply["meta_info"]["weight_version"] == str(version)
        server.gate.set()
        await client.resume(server.url)
        for version in (1, 2, None):
            assert await sampled(client, server, version)

    drive(test)


def test_tenants_sleep_and_wake_with_the_server(server, versions, tmp_path):
    """Their requests go on with the tokens that they have; a version that has gone meanwhile ends its requests."""
    gone = publish(tmp_path, 6, versions.paths[-1])
    server.paths = {**versions.paths, 6: gone}

    async def test(client):
        assert (await client.update_weights(server.url, str(versions.paths[0]), 0, BOUND_S)).success
        await client.pause(server.url, "in_place")
        runs = [asyncio.create_task(sampled(client, server, version)) for version in (1, None, 6)]
        await until(lambda: server.reads == {1: 1, 6: 1} and server.engine.info().queued == 3 * SPEC.n)
        await client.sleep(server.url)
        shutil.rmtree(gone)
        await client.resume(server.url)
        late = asyncio.create_task(sampled(client, server, 2))
        await until(lambda: server.engine.info().queued == 4 * SPEC.n)
        assert server.reads[2] == 0
        await client.wake(server.url)
        assert (await client.update_weights(server.url, str(versions.paths[0]), 0, BOUND_S)).success
        for task in (*runs[:2], late):
            check(server, (await task)[0])
        with pytest.raises(GenerationError) as ended:
            await runs[2]
        assert ended.value.retryable
        assert server.reads == {1: 2, 2: 1, 6: 2}

    drive(test)


def test_stream_of_a_tenant_has_its_tokens_and_version(server):
    async def test(client):
        from realsys.generation.client import Received

        seen: list[int] = []
        received = Received(1, on_tokens=seen.append)
        spec = SamplingSpec(max_new_tokens=200)
        adapter = server.adapter(2)
        [answer] = await client.generate(server.url, PROMPT, spec, rid="s", seed=3, received=received, adapter=adapter)
        assert seen
        arrived = received.completions[0]
        assert arrived.tokens.tolist() == answer.tokens[: len(arrived.tokens)].tolist()
        assert set(arrived.versions.tolist()) == {2}

    with_progress(test)


def test_engine_without_adapters_refuses_them(versions):
    with embedded_server(versions) as server:

        async def test(client):
            adapter = AdapterWeights("t", 1, str(versions.paths[1]))
            with pytest.raises(GenerationError, match="status 400: this server samples only from") as refused:
                await client.generate(server.url, PROMPT, SPEC, rid="", seed=1, adapter=adapter)
            assert not refused.value.retryable

        drive(test)


def test_close_ends_waiting_requests_retryably(versions):
    gate = threading.Event()

    def read(locator: str, version: int) -> StagedWeights:
        assert gate.wait(BOUND_S)
        return stage(Path(locator), version)

    engine = AdapterEngines(main_engine(versions.paths[-1]), read)
    engine.start()
    waiting = engine.generate("a", PROMPT, SamplingParams(), adapter=AdapterWeights("t", 1, str(versions.paths[1])))
    closing = threading.Thread(target=engine.close)
    closing.start()
    with pytest.raises(GenerationError, match="stopping") as error:
        waiting.result(BOUND_S)
    assert error.value.retryable
    gate.set()
    closing.join(BOUND_S)
    assert not closing.is_alive() and not engine._loader.is_alive()


def _fields(adapter: AdapterWeights) -> dict[str, object]:
    return {"key": adapter.key, "version": adapter.version, "locator": adapter.locator}
