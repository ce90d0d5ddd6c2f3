"""Weights per request: each is sampled with the version that it names, beside others, and fails alone."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from realsys.config.backend_rules import backend_rules
from realsys.config.schema import EmbeddedConfig, GenerationConfig
from realsys.errors import GenerationError, ServerBusy
from realsys.generation.backend import ONE_NODE, Backend, EngineParts, GenerationEngine, make_backend
from realsys.generation.client import Received, SamplingSpec
from realsys.generation.embedded.adapters import AdapterEngines
from realsys.generation.embedded.decoder import read_tensors
from realsys.generation.embedded.engine import EmbeddedEngine, build_engine
from realsys.generation.protocol import AdapterWeights, SamplingParams
from realsys.generation.sglang import backend as sglang_backend
from realsys.generation.weight_folder import FolderWriter
from realsys.train.worker.weight_saver import checksums_of
from realsys.weights.contract import StagedWeights
from realsys.weights.disk import manifest
from realsys.weights.disk.stage import DiskReader, stage
from realsys.weights.disk.writer import ShardWriter
from realsys.weights.host_copies import SharedCopies
from realsys.weights.host_reader import HostReader
from realsys.weights.low_rank import AdaptedTensors, factors_of
from tests.support.processes.config_trees import changed
from tests.support.serving.generation_models import make_model
from tests.support.serving.generation_servers import (
    BOUND_S,
    CONTEXT,
    EOS,
    HEADS,
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
from tests.support.serving.sglang_server import needs_sglang, needs_vllm

SPEC = SamplingSpec(max_new_tokens=24, n=2)
SERVE = ["train.loop=serve", "train.lora.rank=2"]
OWN = "tests.contracts.generation.test_generation_adapters:OwnBackend"


class OwnBackend(Backend):
    """A user's backend, whose engine has no adapters."""

    def build(self, parts: EngineParts) -> GenerationEngine:
        raise NotImplementedError


@dataclass
class Adapted:
    """An embedded server with adapters. ``reads``: how often each version was read; ``gate``: shut, reads wait."""

    url: str
    engine: GenerationEngine
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
    with_progress(functools.partial(streamed, server=server, version=2))


async def streamed(client, server: Adapted, version: int) -> None:
    seen: list[int] = []
    received = Received(1, on_tokens=seen.append)
    spec, adapter = SamplingSpec(max_new_tokens=200), server.adapter(version)
    [answer] = await client.generate(server.url, PROMPT, spec, rid="s", seed=3, received=received, adapter=adapter)
    assert seen
    arrived = received.completions[0]
    assert arrived.tokens.tolist() == answer.tokens[: len(arrived.tokens)].tolist()
    assert set(arrived.versions.tolist()) == {version}


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


# ---- low-rank adapters in an engine that adds them to the weights that it has


class Tenants:
    """Versions of tenants on one base: 0 has B = 0, those from 1 to ``LAST`` differ. 20 is of another base."""

    LAST, RANK, SCALE = 12, 2, 1.5

    def __init__(self, root: Path) -> None:
        self.model = root / "model"
        base, other = (
            make_model("qwen2", path, seed=seed, eos=EOS, **HEADS | {"intermediate_size": 96})  # SGLang: 32 times n
            for seed, path in ((31, self.model), (32, root / "other"))
        )
        frozen = read_tensors(self.model)
        share, writer, before = AdaptedTensors(frozen, {}, {}, self.RANK, self.SCALE), ShardWriter(), ""
        random = torch.Generator().manual_seed(1)
        self.models, self.paths = {-1: base, 0: base, 20: other}, {-1: self.model}
        for version in range(self.LAST + 1):
            for name, weight in frozen.items():
                if "proj.weight" in name:
                    a, b = (torch.randn(shape, generator=random) for shape in ((2, weight.shape[1]), (len(weight), 2)))
                    share.factors = {**share.factors, name: factors_of(a, b * 0.05 * (version > 0))}
            tmp = manifest.prepare(root, version, "test")
            written = writer.write(tmp / "model-00001-of-00001.safetensors", share, before, checksums_of(share))
            self.paths[version] = manifest.commit(
                tmp, version=version, incarnation="test", step=version, shards=[written], model_dir=self.model
            )
            before = self.paths[version].name
            if version:
                self.models[version] = copy.deepcopy(base)
                self.models[version].load_state_dict(dict(share), strict=False)
        self.paths[20] = publish(root, 20, root / "other")


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Tenants:
    return Tenants(tmp_path_factory.mktemp("tenants"))


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def native(request, tenants: Tenants, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    with real_engine(request.param, tenants, tmp_path_factory.mktemp("host")) as server:
        yield server


@contextmanager
def real_engine(name: str, tenants: Tenants, root: Path) -> Iterator[Adapted]:
    """SGLang or vLLM."""
    {"vllm": needs_vllm, "sglang": needs_sglang}[name]()
    reader = HostReader(SharedCopies(root, tenants.model, [root]))
    args = {
        "vllm": "generation.backend_args={args: {max-model-len: 512}}",
        "sglang": "generation.sglang.args={context-length: 512}",
    }
    config = changed(f"generation.backend={name}", *SERVE, args[name])
    write = FolderWriter(reader, tenants.model).write
    parts = EngineParts(config, tenants.model, 0, reader.stage, write, print, lambda stop: None)
    engine = make_backend(config).build(dataclasses.replace(parts, write_adapters=reader.write_adapters))
    with serving(engine) as url:
        # Its thread for files is there from now on.
        asyncio.run_coroutine_threadsafe(asyncio.to_thread(int), engine._loop._loop).result(BOUND_S)
        yield Adapted(url, engine, tenants.models, tenants.paths, Counter(), threading.Event())
    reader.close()


def test_one_batch_has_requests_of_many_tenants(native, tenants, tmp_path):
    """From the start, and after an update; greedy tokens are those of the embedded engine, log-probs to 1e-3."""
    server = native
    greedy = SamplingSpec(max_new_tokens=24, temperature=0.0)

    async def test(client):
        for version in (1, None, 2):  # with the weights that it was started with
            check(server, (await sampled(client, server, version))[0])
        await update(client, server, 0)
        order = [(version, seed) for seed in range(3) for version in (1, 2, 0, 3, None)]
        answers = await asyncio.gather(*(sampled(client, server, version, seed) for version, seed in order))
        for (version, _), made in zip(order, answers, strict=True):
            for answer in made:
                check(server, answer)
                assert set(answer.versions.tolist()) == {version or 0}
        return [(await sampled(client, server, version, spec=greedy))[0] for version in (1, 2, 3, 0)]

    natively = drive(test)
    reader = HostReader(SharedCopies(tmp_path, tenants.model, [tmp_path]))
    with serving(AdapterEngines(main_engine(tenants.model), reader.read)) as url:
        embedded = dataclasses.replace(server, url=url)

        async def same(client):
            return [(await sampled(client, embedded, version, spec=greedy))[0] for version in (1, 2, 3, 0)]

        for answer, expected in zip(natively, drive(same), strict=True):
            assert answer.tokens.tolist() == expected.tokens.tolist()
            assert np.abs(answer.logprobs - expected.logprobs).max() <= 1e-3
    reader.close()


def test_engine_holds_some_tenants_at_a_time(native, tenants):
    """More than it has room for, twice, all at the same time."""
    server = native

    async def test(client):
        await update(client, server, 0)
        versions = list(range(tenants.LAST + 1)) * 2
        for version, made in zip(
            versions, await asyncio.gather(*(sampled(client, server, each) for each in versions)), strict=True
        ):
            check(server, made[0])
            assert set(made[0].versions.tolist()) == {version}
        adapters = server.engine._traffic.adapters
        assert len(adapters._adapters) <= adapters.most
        idle = next(version for version in versions if server.adapter(version) not in adapters._adapters)
        for loaded in adapters._adapters.values():
            loaded.users.add("a request that does not end")
        adapters.wait_s, before = 0.2, adapters.wait_s
        with pytest.raises(ServerBusy, match=f"adapter 'tenant-{idle}': 8 others have requests"):
            await sampled(client, server, idle)
        adapters.wait_s = before
        loaded.users.clear()
        check(server, (await sampled(client, server, idle))[0])
        for loaded in adapters._adapters.values():
            loaded.users.clear()

    drive(test)


def test_engine_refuses_a_tenant_alone(native, tenants, tmp_path):
    """One whose version is damaged, not found, or on other weights than those that the server has."""
    server = dataclasses.replace(native, paths={**tenants.paths, 21: tmp_path / "gone"})

    async def test(client):
        await update(client, server, 0)
        damaged = next(tenants.paths[5].glob("model-*"))
        server.engine._traffic.adapters._adapters.clear()
        flip(damaged)
        for version, reason in ((5, "corrupt"), (21, "gone"), (20, "is not that of the weights that the server has")):
            with pytest.raises(GenerationError, match=f"status 400: adapter 'tenant-{version}': .*{reason}") as one:
                await sampled(client, server, version)
            assert not one.value.retryable
        flip(damaged)
        check(server, (await sampled(client, server, 5))[0])
        # Other weights are loaded: a tenant that was served a moment ago is refused, until its own are back.
        await update(client, server, 20)
        check(server, (await sampled(client, server, None))[0])
        with pytest.raises(GenerationError, match="is not that of the weights that the server has"):
            await sampled(client, server, 5)
        await update(client, server, 0)
        check(server, (await sampled(client, server, 5))[0])

    drive(test)


def test_update_and_abort_meet_tenants(native):
    """An update of the same weights under another number cuts nothing; an abort ends one with what it has."""
    server = native

    async def test(client):
        await update(client, server, 0)
        running = asyncio.create_task(sampled(client, server, 2, spec=LONG))
        await update(client, server, 0)
        check(server, (await running)[0])
        await client.pause(server.url, "in_place")
        body = {"input_ids": PROMPT, "rid": "one", "adapter": _fields(server.adapter(1))}
        task = asyncio.create_task(raw(server, "/generate", body | {"sampling_params": {"max_new_tokens": 480}}))
        await until(lambda: "one" in server.engine._traffic)
        await client.abort(server.url, "one")
        status, reply = await task
        assert status == 200 and reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert reply["meta_info"]["weight_version"] == "1"
        await client.resume(server.url)

    drive(test)


def test_stream_from_an_engine_has_the_version_of_its_tenant(native):
    with_progress(functools.partial(streamed, server=native, version=2))


def test_engine_that_was_restarted_loads_its_tenants_again(tenants, tmp_path):
    """Before its first update it has the model that it was started with."""

    async def test(client):
        await update(client, server, 0)
        check(server, (await sampled(client, server, 1))[0])
        run = server.engine._traffic.run
        run.child.kill()
        await until(lambda: server.engine._traffic.run not in (None, run))
        for version in (1, None):
            check(server, (await sampled(client, server, version))[0])

    with real_engine("sglang", tenants, tmp_path) as server:
        drive(test)


async def update(client, server: Adapted, version: int) -> None:
    """Update the weights that the server has, also to an older version."""
    reader = server.engine._updater._materialise.__self__.reader
    reader.offer(str(server.paths[version]), (), True)
    result = await client.update_weights(server.url, str(server.paths[version]), version, BOUND_S)
    assert result.success, result.message


@pytest.mark.parametrize(
    ("settings", "serves"),
    [
        ("generation.backend=embedded", True),
        ("generation.backend=vllm", True),
        ("generation.backend=vllm train.lora.rank=513", False),
        ("generation.backend=sglang", True),
        ("generation.backend=sglang model.tiny.intermediate_size=80", False),
        (f"generation.backend={OWN}", False),
    ],
)
def test_backend_says_why_it_cannot_serve_adapters(settings, serves):
    config = changed("train.loop=serve", "train.lora.rank=2", *settings.split())
    assert (backend_rules(config).adapters() == "") is serves


def test_engines_have_adapters_only_for_a_training_service(tmp_path):
    """The options of other runs are as before. Both make room for the rank, and for requests without an adapter."""
    make_model("qwen2", tmp_path / "model")

    def flags(backend: str, *settings: str) -> str:
        config = changed(f"generation.backend={backend}", *settings)
        if backend == "vllm":
            launch = make_backend(config).launch(tmp_path / "model", index=0, tokenizer=False)
        else:
            launch = sglang_backend._launch(tmp_path / "model", config, 0, ONE_NODE, None)
        command, environment = launch.command(1), launch.environment({})
        assert ("VLLM_ALLOW_RUNTIME_LORA_UPDATING" in environment) == (backend == "vllm" and "--enable-lora" in command)
        return " ".join(command)

    for backend in ("vllm", "sglang"):
        for settings in ([], SERVE[:1], SERVE[1:]):
            assert "lora" not in flags(backend, *settings)
    assert "--enable-lora --max-lora-rank 32 --max-loras 8" in flags("vllm", SERVE[0], "train.lora.rank=20")
    found = flags("sglang", SERVE[0], "train.lora.rank=20", "train.lora.targets=[qkv,down]")
    assert "--max-lora-rank 20 --lora-target-modules q_proj k_proj v_proj down_proj --max-loras-per-batch 9" in found


def _fields(adapter: AdapterWeights) -> dict[str, object]:
    return {"key": adapter.key, "version": adapter.version, "locator": adapter.locator}
