"""Processes that share the cores of a host."""

from __future__ import annotations

import pytest

from realsys.lab.simulation.clock import Clock
from realsys.lab.simulation.scenarios import HostSettings, ServerSettings
from realsys.lab.simulation.servers import DecodePiece, EngineRequest, Host, HostJob, SimulatedEngine
from realsys.types import PublishedVersion

SERVER = ServerSettings(tokens_per_s=10.0, total_tokens_per_s=1e9, prefill_tokens_per_s=1e9, swap_s=0.0)


def run(clock: Clock) -> None:
    while clock.step():
        pass


@pytest.mark.parametrize(("cores", "expected"), [(3.0, [4.0, 10.0]), (2.0, [6.0, 12.0])], ids=["enough", "too few"])
def test_jobs_share_the_cores(cores: float, expected: list[float]) -> None:
    """They want three cores until the short job ends. If there are two, both are slower until then."""
    clock, ends = Clock(), []
    host = Host(HostSettings(cores=cores))
    HostJob(clock, host, 1.0, 10.0, lambda: ends.append(clock.now))
    HostJob(clock, host, 2.0, 4.0, lambda: ends.append(clock.now))
    run(clock)
    assert ends == pytest.approx(expected)


def test_cancelled_job_gives_its_cores_back() -> None:
    clock, ends = Clock(), []
    host = Host(HostSettings(cores=1.0))
    other = HostJob(clock, host, 1.0, 100.0, lambda: ends.append(-1.0))
    HostJob(clock, host, 1.0, 10.0, lambda: ends.append(clock.now))
    clock.at(10.0, other.cancel)
    run(clock)
    assert ends == pytest.approx([15.0])


def test_server_slows_down_while_the_trainer_computes() -> None:
    """100 tokens at 10 tokens/s: 5 s of work at half speed, and the other 5 s alone."""
    clock, ends = Clock(), []
    host = Host(HostSettings(cores=1.0))
    engine = SimulatedEngine(clock, SERVER, host)
    engine.swap(PublishedVersion(0, "t", "v0", 0), lambda: None)
    run(clock)
    engine.submit(EngineRequest([DecodePiece(0, 100)], 0, lambda request: ends.append(clock.now)))
    HostJob(clock, host, 1.0, 5.0, lambda: ends.append(clock.now))
    run(clock)
    assert ends == pytest.approx([10.0, 15.0], abs=0.01)


def test_completions_add_to_the_time_of_a_token() -> None:
    clock, ends = Clock(), []
    engine = SimulatedEngine(clock, SERVER.model_copy(update={"s_per_completion": 0.05}))
    engine.swap(PublishedVersion(0, "t", "v0", 0), lambda: None)
    run(clock)
    engine.submit(EngineRequest([DecodePiece(0, 10), DecodePiece(1, 10)], 0, lambda request: ends.append(clock.now)))
    run(clock)
    assert ends[-1] == pytest.approx(10 * (0.1 + 2 * 0.05), abs=0.01)


def test_very_fast_tokens_end_late_in_a_simulation() -> None:
    """A billion tokens per second after a day: the clock cannot advance by the time of a token."""
    clock, ends = Clock(), []
    engine = SimulatedEngine(clock, SERVER.model_copy(update={"tokens_per_s": 1e9}))
    engine.swap(PublishedVersion(0, "t", "v0", 0), lambda: None)
    run(clock)
    clock.at(86_400.1, engine.submit, EngineRequest([DecodePiece(0, 1001)], 7, lambda request: ends.append(clock.now)))
    for _ in range(1000):
        clock.step()
    assert ends == pytest.approx([86_400.1])


def test_cache_is_recomputed_beside_the_trainer() -> None:
    """50 tokens of a cache at 10 tokens/s: the trainer takes half of the core for 4 s."""
    clock, ends = Clock(), []
    host = Host(HostSettings(cores=1.0))
    engine = SimulatedEngine(clock, SERVER.model_copy(update={"recompute_tokens_per_s": 10.0}), host)
    engine.swap(PublishedVersion(0, "t", "v0", 0), lambda: None)
    run(clock)
    engine.submit(EngineRequest([DecodePiece(0, 100)], 0, lambda request: None))
    clock.at(5.0, engine.swap, PublishedVersion(1, "t", "v1", 1), lambda: ends.append(clock.now))
    clock.at(5.0, HostJob, clock, host, 1.0, 2.0, lambda: ends.append(clock.now))
    run(clock)
    assert ends == pytest.approx([9.0, 12.0])
