"""The engine over SGLang, with a program in its place that answers like it: start, death, versions, updates."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file

from realsys.errors import GenerationError, WeightsError
from realsys.generation.backend import Change
from realsys.generation.limits import Limits
from realsys.generation.protocol import SamplingParams
from realsys.generation.sglang import keeper as keepers
from realsys.generation.sglang.engine import Settings, SglangEngine
from realsys.generation.sglang.update import Materialised, check_shapes
from tests import sglang_stand_in

SHAPES = {"a": (2, 3), "b": (4,)}
STALLING = SamplingParams(max_new_tokens=10, temperature=0.5)
WAIT_S = 30.0


@dataclass(frozen=True)
class StandIn:
    """In place of arguments.Launch."""

    flags: tuple[str, ...] = ()
    model_path: Path = Path("/models/base")

    def command(self, port: int) -> list[str]:
        return [sys.executable, sglang_stand_in.__file__, *self.flags, "--port", str(port)]

    def environment(self) -> dict[str, str]:
        return dict(os.environ)


def materialise(source: Path, version: int, target: Path) -> Materialised:
    """What the worker does, without manifests: the folder's name says what is wrong with it."""
    if source.name == "corrupt":
        raise WeightsError(f"{source} is corrupt")
    target.mkdir(parents=True)
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    if source.name == "partial":
        del tensors["b"]
    save_file(tensors, target / "model.safetensors")
    if source.name == "broken":
        (target / "broken").touch()
    return Materialised(target, {"verify_s": 0.25})


Make = Callable[..., tuple[SglangEngine, "queue.SimpleQueue[Change]"]]


@pytest.fixture
def make() -> Iterator[Make]:
    engines: list[SglangEngine] = []

    def build(*flags: str, start: bool = True, **settings: object) -> tuple[SglangEngine, queue.SimpleQueue[Change]]:
        changes: queue.SimpleQueue[Change] = queue.SimpleQueue()
        limits = Limits(vocabulary=97, eos=(96,), context=64, answers=8, tokenizer=False, model_path="/models/base")
        bounds = ("start_timeout_s", "request_timeout_s", "load_timeout_s", "silence_timeout_s")
        values = {**dict.fromkeys(bounds, WAIT_S), "max_restarts": 2}
        engine = SglangEngine(
            StandIn(flags),
            limits,
            SHAPES,
            materialise,
            Settings(**{**values, "first_backoff_s": 0.01, **settings}),
            changes.put,
        )
        if start:
            engine.start()
            engines.append(engine)
            assert changes.get(timeout=WAIT_S) == Change(0)
        return engine, changes

    yield build
    for engine in engines:
        engine.close()


def ended(pid: int) -> bool:
    """Wait for the end of a process that is not our child."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], WAIT_S)[0])
    finally:
        os.close(pidfd)


def helper_of(text: str) -> int:
    """The pid that the stand-in printed of its helper."""
    return int(text.partition("helper ")[2].split()[0])


def generate(engine: SglangEngine, prompt: list[int], rid: str = "", **params: object):
    return engine.generate(rid, prompt, SamplingParams(**{"max_new_tokens": 4, **params}))


def test_answers_come_back_and_output_is_passed_on(make, caplog):
    with caplog.at_level(logging.INFO, logger="sglang"):
        engine, _ = make()
        [one, two] = generate(engine, [5], n=2).result(WAIT_S)
    assert one.tokens.tolist() == two.tokens.tolist() == [6, 7, 8, 9]
    assert np.allclose(one.logprobs, -1.0)
    assert (one.segments, one.finish_reason) == ([(-1, 4)], "length")
    lines = [record.getMessage() for record in caplog.records if record.name == "sglang"]
    assert lines[0].startswith("serving on ")
    assert lines[1].startswith("helper ")


def test_start_that_fails_is_named_with_the_last_lines(make):
    engine, _ = make("--fail", start=False)
    with pytest.raises(GenerationError, match=r"exited with code 9 before it answered.*RuntimeError: no such model"):
        engine.start()


def test_start_is_bounded(make):
    engine, _ = make("--silent", start=False, start_timeout_s=0.5)
    with pytest.raises(GenerationError, match=r"within 0\.5 s \(generation\.sglang\.start_timeout_s\); its last"):
        engine.start()


def test_start_can_be_given_up(make, caplog):
    engine, _ = make("--silent", start=False)
    with caplog.at_level(logging.INFO, logger="sglang"), ThreadPoolExecutor(1) as pool:
        starting = pool.submit(engine.start)
        while "helper" not in caplog.text:
            assert not starting.done()
        engine.abandon_start()
        with pytest.raises(GenerationError, match="asked to stop"):
            starting.result(WAIT_S)
    assert ended(helper_of(caplog.text))


def test_close_leaves_no_process(make, caplog):
    with caplog.at_level(logging.INFO, logger="sglang"):
        engine, _ = make(start=False)
        engine.start()
    helper = helper_of(caplog.text)
    engine.close()
    assert ended(helper)
    with pytest.raises(GenerationError, match="stopping") as refused:
        generate(engine, [5])
    assert refused.value.retryable


def test_nothing_outlives_a_killed_server(tmp_path):
    script = (
        "import logging, sys, threading\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout)\n"
        "from tests.unit.test_sglang_engine import *\n"
        "limits = Limits(vocabulary=97, eos=(), context=64, answers=8, tokenizer=False, model_path='')\n"
        "settings = Settings(30.0, 2, 30.0, 30.0, 30.0)\n"
        "engine = SglangEngine(StandIn(), limits, SHAPES, materialise, settings)\n"
        "engine.start()\n"
        "run = engine._traffic.run\n"
        "print('guard', run.child.pid, 'scratch', run.scratch, 'up', flush=True)\n"
        "threading.Event().wait(60)\n"
    )
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen([sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if " up" in line:
            break
    guard, scratch = int(text.partition("guard ")[2].split()[0]), Path(text.partition("scratch ")[2].split()[0])
    assert scratch.is_dir()
    process.send_signal(signal.SIGKILL)
    process.wait(WAIT_S)
    process.stdout.close()
    assert ended(guard)
    assert ended(helper_of(text))
    assert not scratch.exists()


def test_death_fails_what_runs_and_a_restart_serves_unsynced(make):
    engine, changes = make()
    assert engine.update("/weights/v7", 7).result(WAIT_S).success
    assert engine.version == 7
    with pytest.raises(GenerationError, match="connection failed") as lost:
        generate(engine, [89]).result(WAIT_S)
    assert lost.value.retryable
    down = changes.get(timeout=WAIT_S)
    assert (down.serial, down.final) == (None, False)
    assert changes.get(timeout=WAIT_S) == Change(1)
    assert (engine.version, engine.failure) == (-1, None)
    [answer] = generate(engine, [5]).result(WAIT_S)
    assert answer.segments == [(-1, 4)]


def test_held_requests_fail_with_the_death(make):
    engine, changes = make()
    engine.pause("in_place").result(WAIT_S)
    held = generate(engine, [5])
    [server] = psutil.Process(engine._traffic.run.child.pid).children()
    server.kill()
    with pytest.raises(GenerationError, match="SGLang was killed by SIGKILL") as lost:
        held.result(WAIT_S)
    assert lost.value.retryable
    assert changes.get(timeout=WAIT_S).serial is None
    assert changes.get(timeout=WAIT_S) == Change(1)


@pytest.mark.parametrize("how", ["samples nothing", "says nothing"])
def test_a_server_that_is_alive_and_does_nothing_is_started_again(make, how):
    engine, changes = make(silence_timeout_s=2.0)
    [server] = psutil.Process(engine._traffic.run.child.pid).children()
    if how == "says nothing":
        server.suspend()
    lost = generate(engine, [88])
    down = changes.get(timeout=WAIT_S)
    assert (down.serial, down.final) == (None, False)
    assert "sampled nothing for 2 s (generation.sglang.silence_timeout_s)" in down.reason
    assert changes.get(timeout=WAIT_S) == Change(1)
    with pytest.raises(GenerationError) as error:
        lost.result(WAIT_S)
    assert error.value.retryable
    assert ended(server.pid)


def test_silence_counts_only_while_sglang_is_meant_to_sample(monkeypatch):
    """Half a limit passes with every question; for twenty of them it is paused."""
    now, asked = [0.0], []

    def held() -> bool:
        now[0] += 50
        return len(asked) < 20

    class Silent:
        async def samples(self, session: object, timeout_s: float) -> bool:
            asked.append("samples")
            return False

    async def body() -> str:
        child = Silent()
        child.ended = asyncio.get_running_loop().create_future()
        return await keeper._watch(child, None)

    def held_and_counted() -> bool:
        if value := held():
            asked.append("held")
        return value

    monkeypatch.setattr(keepers, "_CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr(keepers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    news = {"on_up": print, "on_down": print, "held": held_and_counted}
    keeper = keepers.Keeper(StandIn(), start_timeout_s=1.0, max_restarts=0, silence_timeout_s=100.0, **news)
    assert asyncio.run(body()).startswith("has sampled nothing for 100 s")
    assert asked == ["held"] * 20 + ["samples"]


def test_restarts_are_bounded(make):
    engine, changes = make(max_restarts=0)
    with pytest.raises(GenerationError, match="connection failed"):
        generate(engine, [89]).result(WAIT_S)
    assert not changes.get(timeout=WAIT_S).final
    last = changes.get(timeout=WAIT_S)
    assert last.final
    assert "exited with code 3" in last.reason and "token 89: the end" in last.reason
    assert "after 0 restarts in a row (generation.sglang.max_restarts)" in last.reason
    assert engine.failure == last.reason


def test_versions_are_derived_where_they_are_not_reported(make):
    """Half of the answer is of the first weights; it is given back for the update, and goes on from there."""
    engine, _ = make()
    running = engine.generate("a", [5], STALLING)
    result = engine.update("/weights/v7", 7).result(WAIT_S)
    assert result.success
    assert {"stage_s", "verify_s", "drain_s", "pause_s", "load_s", "first_token_s"} <= result.timings.keys()
    [answer] = running.result(WAIT_S)
    assert answer.tokens.tolist() == list(range(6, 16))
    assert answer.segments == [(-1, 5), (7, 5)]
    assert np.allclose(answer.logprobs, [-1.0] * 5 + [-1.07] * 5)
    assert answer.finish_reason == "length"


def test_pause_gives_back_what_runs_and_resume_goes_on(make):
    engine, _ = make()
    running = engine.generate("a", [5], STALLING)
    engine.pause("retract").result(WAIT_S)
    info = engine.info().result(WAIT_S)
    assert (info.paused, info.running, info.queued) == (True, 0, 1)
    assert engine.update("/weights/v7", 7).result(WAIT_S).success
    assert not running.done()
    engine.resume().result(WAIT_S)
    [answer] = running.result(WAIT_S)
    assert answer.segments == [(-1, 5), (7, 5)]


def test_a_pause_does_not_wait_for_the_first_token_of_an_update(make):
    engine, _ = make()
    running = engine.generate("a", [5], STALLING)
    update = engine.update("/weights/v13", 13)
    while engine._updater._probe is None:
        assert not update.done()
    engine.pause("in_place").result(WAIT_S)
    result = update.result(WAIT_S)
    assert result.success and "first_token_s" not in result.timings
    engine.resume().result(WAIT_S)
    assert running.result(WAIT_S)[0].segments == [(-1, 5), (13, 5)]


def test_reported_versions_are_taken_and_sglang_holds_the_requests_itself(make):
    engine, _ = make("--reports")
    update = engine.update("/weights/v7", 7).result(WAIT_S)
    assert update.success and "first_token_s" not in update.timings  # nobody waits for one
    [answer] = generate(engine, [5]).result(WAIT_S)
    assert answer.segments == [(7, 4)]


def test_drain_waits_for_running_answers(make):
    engine, _ = make(drain=True)
    running = engine.generate("a", [5], STALLING)
    update = engine.update("/weights/v7", 7)
    assert engine.abort("a").result(WAIT_S)
    [answer] = running.result(WAIT_S)
    assert (answer.segments, answer.finish_reason) == ([(-1, 5)], "abort")
    assert update.result(WAIT_S).success


def test_abort_ends_with_what_there_is(make):
    engine, _ = make()
    running = engine.generate("a", [5], STALLING)
    assert engine.abort("a").result(WAIT_S)
    [answer] = running.result(WAIT_S)
    assert (answer.tokens.tolist(), answer.finish_reason) == ([6, 7, 8, 9, 10], "abort")
    assert not engine.abort("a").result(WAIT_S)


@pytest.mark.parametrize(
    ("path", "message"),
    [("/weights/corrupt", "is corrupt"), ("/weights/partial", r"tensor b has shape missing.*has \(4,\)")],
)
def test_wrong_version_is_refused_before_it_is_loaded(make, path, message):
    engine, _ = make()
    result = engine.update(path, 7).result(WAIT_S)
    assert not result.success
    assert re.search(message, result.message)
    assert engine.version == -1
    assert list(engine._traffic.run.scratch.iterdir()) == []
    [answer] = generate(engine, [5]).result(WAIT_S)
    assert answer.segments == [(-1, 4)]


def test_failed_load_restarts_sglang_rather_than_serve_what_nobody_knows(make):
    engine, changes = make()
    assert engine.update("/weights/v6", 6).result(WAIT_S).success
    result = engine.update("/weights/broken", 7).result(WAIT_S)
    assert not result.success
    assert "cannot load" in result.message
    assert changes.get(timeout=WAIT_S).serial is None
    assert changes.get(timeout=WAIT_S) == Change(1)
    assert engine.version == -1


def test_full_queue_is_refused_as_retryable(make):
    engine, _ = make()
    engine.pause("in_place").result(WAIT_S)
    held = generate(engine, [5], n=8)
    with pytest.raises(GenerationError, match="queue full: 8 answers are open") as refused:
        generate(engine, [5]).result(WAIT_S)
    assert refused.value.retryable
    engine.resume().result(WAIT_S)
    assert len(held.result(WAIT_S)) == 8


def test_two_requests_cannot_share_an_id(make):
    engine, _ = make()
    engine.pause("in_place").result(WAIT_S)
    held = generate(engine, [5], rid="a")
    with pytest.raises(GenerationError, match="rid='a' is the id of a request in progress"):
        generate(engine, [6], rid="a").result(WAIT_S)
    engine.resume().result(WAIT_S)
    assert held.result(WAIT_S)[0].tokens.tolist() == [6, 7, 8, 9]


def test_shapes_are_compared_by_name(tmp_path):
    save_file({"a": torch.zeros(3, 2), "b": torch.zeros(4), "c": torch.zeros(1)}, tmp_path / "m.safetensors")
    with pytest.raises(WeightsError, match=r"tensor a has shape \(3, 2\), the model that is served has \(2, 3\); 2 "):
        check_shapes(tmp_path, SHAPES)
    (tmp_path / "m.safetensors").write_bytes(b"\xff" * 4)
    with pytest.raises(WeightsError, match="no safetensors file"):
        check_shapes(tmp_path, SHAPES)
