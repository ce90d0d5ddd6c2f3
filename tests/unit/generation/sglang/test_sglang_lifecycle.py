"""The engine over SGLang, with a program in its place that answers like it: start, silence, death, restarts, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from realsys.errors import GenerationError
from realsys.generation.backend import Change
from realsys.generation.child import supervisor
from realsys.generation.sglang.process import Launch
from tests.support.polling import ended, poll
from tests.support.serving import sglang_stand_in
from tests.support.serving.sglang_engines import WAIT_S, Engines, StandIn, engines, generate, helper_of

pytestmark = pytest.mark.processes


@pytest.fixture
def make() -> Iterator[Engines]:
    with engines() as made:
        yield made


def logged_helper(caplog: pytest.LogCaptureFixture) -> int:
    """Return the pid that the stand-in prints; a thread logs it."""
    poll(lambda: "helper" in caplog.text, "the pid of the helper in the log", WAIT_S, lambda: caplog.text)
    return helper_of(caplog.text)


def test_failed_start_shows_the_last_lines(make):
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
        helper = logged_helper(caplog)
        engine.abandon_start()
        with pytest.raises(GenerationError, match="asked to stop"):
            starting.result(WAIT_S)
    assert ended(helper)


def test_close_leaves_no_process(make, caplog):
    with caplog.at_level(logging.INFO, logger="sglang"):
        engine, _ = make(start=False)
        engine.start()
        helper, scratch = logged_helper(caplog), engine._traffic.run.scratch
    assert scratch.is_dir()
    engine.close()
    assert ended(helper) and not scratch.exists()
    with pytest.raises(GenerationError, match="stopping") as refused:
        generate(engine, [5])
    assert refused.value.retryable


def test_shared_memory_of_killed_sglang_is_removed(make, caplog):
    with caplog.at_level(logging.INFO, logger="sglang"):
        _, changes = make("--loads")
        line = r"guard: (/dev/shm/sglang_loads_(\d+)\.shm) goes"
        noted = poll(lambda: re.search(line, caplog.text), "a line of the log", WAIT_S, lambda: caplog.text)
        segment = Path(noted[1])
        assert segment.exists()
        os.kill(int(noted[2]), signal.SIGKILL)
        assert changes.get(timeout=WAIT_S).serial is None
    assert not segment.exists()


def test_restarted_sglang_serves_unsynced(make):
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


def test_death_in_an_update_is_reported_with_its_status(make):
    engine, changes = make()
    result = engine.update("/weights/deadly", 7).result(WAIT_S)
    assert not result.success
    assert "Server disconnected; SGLang was killed by SIGKILL; its last lines: " in result.message
    assert result.message.endswith("loading, and killed")
    assert "was killed by SIGKILL" in changes.get(timeout=WAIT_S).reason
    assert changes.get(timeout=WAIT_S) == Change(1)


def test_connection_that_is_closed_when_idle_loses_no_update(make):
    engine, _ = make("--idle")
    for version in (7, 8):
        result = engine.update(f"/weights/v{version}", version).result(WAIT_S)
        assert result.success, result.message


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


def test_engine_that_dies_asleep_starts_awake(make):
    engine, changes = make()
    engine.sleep().result(WAIT_S)
    [server] = psutil.Process(engine._traffic.run.child.pid).children()
    server.kill()
    assert changes.get(timeout=WAIT_S).serial is None
    assert changes.get(timeout=WAIT_S) == Change(1)
    engine.wake().result(WAIT_S)  # there is nothing to do
    held = generate(engine, [5])
    assert engine.info().result(WAIT_S).paused
    assert engine.update("/weights/v7", 7).result(WAIT_S).success
    assert held.result(WAIT_S)[0].segments == [(7, 4)]


@pytest.mark.parametrize("how", ["samples nothing", "says nothing"])
def test_silent_server_is_restarted(make, how):
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


def test_silence_counts_only_without_a_pause(monkeypatch):
    """Half a limit passes with every question; for twenty of them it is paused."""
    now, asked = [0.0], []

    def held() -> bool:
        now[0] += 50
        return len(asked) < 20

    class Silent:
        async def samples(self, timeout_s: float) -> bool:
            asked.append("samples")
            return False

    async def body() -> str:
        child = SimpleNamespace(ended=asyncio.get_running_loop().create_future())
        return await watcher._watch(child, Silent())

    def held_and_counted() -> bool:
        if value := held():
            asked.append("held")
        return value

    monkeypatch.setattr(supervisor, "_CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now[0]))
    settings = supervisor.Settings(1.0, 0, 1.0, silence_timeout_s=100.0)
    watcher = supervisor.EngineSupervisor(StandIn(), settings, supervisor.RunListener(print, print, held_and_counted))
    assert asyncio.run(body()).startswith("has sampled nothing for 100 s")
    assert asked == ["held"] * 20 + ["samples"]
    assert watcher.proofs == 20  # each of them is progress of the requests that wait


def test_restarts_are_bounded(make):
    engine, changes = make(max_restarts=0)
    with pytest.raises(GenerationError, match="connection failed"):
        generate(engine, [89]).result(WAIT_S)
    assert not changes.get(timeout=WAIT_S).final
    last = changes.get(timeout=WAIT_S)
    assert last.final
    assert "exited with code 3" in last.reason and "token 89: the end" in last.reason
    assert "after 0 restarts in a row" in last.reason
    assert engine.failure == last.reason


INTERPRETER = """#!/bin/sh
echo "$@" >> {folder}/calls
for port; do :; done
[ $(wc -l < {folder}/calls) -gt {failures} ] || {{ echo "{error}" >&2; exit 1; }}
exec {python} {stand_in} --port $port
"""


@pytest.mark.parametrize(
    ("shared", "free", "error", "shares"),
    [
        (True, 1000, "", [0.4]),
        (True, 500, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", [0.8, 0.64]),
        (True, 0, "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", [0.9, 0.9]),
        (True, 500, "ValueError: unknown model", [0.8]),
        (False, 500, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", [0.4]),
    ],
)
def test_shared_gpu_is_measured_at_each_start(make, tmp_path, monkeypatch, shared, free, error, shares):
    """0.4 of the GPU are planned. Only a shared GPU that was too full gets a second try."""
    programs = {
        "nvidia-smi": f"#!/bin/sh\necho 0, GPU-a, 1000, {free}\n",
        "python": INTERPRETER.format(
            folder=tmp_path,
            failures=int(bool(error)),
            error=error,
            python=sys.executable,
            stand_in=sglang_stand_in.__file__,
        ),
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("realsys.config.machine._present_gpus", lambda: 1)
    options = {"mem-fraction-static": 0.4}
    python = str(tmp_path / "python")
    launch = Launch(python, Path("/m"), "bfloat16", 64, 1, 0, 1, True, options, shared=shared)
    engine, _ = make(start=False, launch=launch)
    is_final = error and len(shares) == 1
    with pytest.raises(GenerationError, match=re.escape(error)) if is_final else contextlib.nullcontext():
        engine.start()
    engine.close()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [float(call.partition("--mem-fraction-static ")[2].split()[0]) for call in calls] == shares


def test_failed_load_restarts_sglang(make):
    engine, changes = make()
    assert engine.update("/weights/v6", 6).result(WAIT_S).success
    result = engine.update("/weights/broken", 7).result(WAIT_S)
    assert not result.success
    assert "cannot load" in result.message
    assert changes.get(timeout=WAIT_S).serial is None
    assert changes.get(timeout=WAIT_S) == Change(1)
    assert engine.version == -1
