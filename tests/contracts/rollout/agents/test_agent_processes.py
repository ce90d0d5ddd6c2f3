"""Episodes of a user's agent in processes: result, errors, limits, and that nothing of an episode is left."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy.random
import psutil
import pytest
import torch

from realsys.agent_runner import runner
from realsys.config.schema_rollout import RolloutConfig
from realsys.errors import AgentError, ConfigError
from realsys.rollout.agents import captured as module
from realsys.rollout.agents.captured import AgentProcesses, check_interpreter
from realsys.rollout.agents.contract import EpisodeTime
from tests.support.polling import ended, poll

pytestmark = pytest.mark.processes

AGENTS = "tests.support.harness.user_agents"
ROW = {"prompt": "1+1", "answer": "2", "level": 3}
ROOT = Path(__file__).parents[4]
#: the interpreter of the virtual environment: it has neither realsys nor httpx
OUTER = os.path.realpath(sys.executable)


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


def settings(agent, limits=None, **others):
    bounds = {"episode_timeout_s": 60.0, "memory_mb": 200} | (limits or {})
    return RolloutConfig(agent=agent, agent_limits=bounds, **others)


class FakeZygote:
    def __init__(self, rollout): ...

    async def open(self, first): ...

    async def kill(self): ...


def call(processes, row, episode=60.0):
    return processes(row, "http://h:1/v1", "key", EpisodeTime(episode))


def play(*rows, agent, limits=None, episode=60.0, **others):
    """Play one episode per row at the same time; errors are results."""

    async def run():
        processes = AgentProcesses(settings(agent, limits, **others))
        try:
            plays = (call(processes, row, episode) for row in rows)
            return await asyncio.gather(*plays, return_exceptions=True)
        finally:
            await processes.close()

    return asyncio.run(run())


def error_of(agent, row=ROW, limits=None, **others):
    (error,) = play(row, agent=f"{AGENTS}:{agent}", limits=limits, **others)
    assert isinstance(error, AgentError), error
    return error


def test_each_episode_has_a_process():
    results = play(ROW, ROW, agent=f"{AGENTS}:Rewarding", agent_args={"reward": 2.5})
    pids = set()
    for result in results:
        *rest, pid = result.pop("answer").split()
        assert rest == ["http://h:1/v1", "key", "AsyncClient"]
        assert result == {"reward": 2.5, "correct": True, "metrics": {"level": 3}}
        pids.add(int(pid))
    assert len(pids) == 2 and os.getpid() not in pids


def test_episodes_wait_for_a_free_place(monkeypatch):
    class Zygote(FakeZygote):
        async def pass_on(self, connection, limits):
            started.put_nowait(connection.dup())

    async def run():
        processes = AgentProcesses(settings("mine:run"))
        plays = [asyncio.create_task(call(processes, ROW)) for _ in range(2)]
        for number, episode in enumerate(plays):
            with await started.get() as connection:
                assert started.empty()
                runner.send(connection, {"reached": "", "returned": number, "printed": ""})
                assert await episode == number

    started = asyncio.Queue()
    monkeypatch.setattr(module, "_Zygote", Zygote)
    monkeypatch.setattr(module, "PLACES", 1)
    asyncio.run(run())


def test_episodes_draw_different_numbers():
    first, second = play(ROW, ROW, agent=f"{__name__}:draws")
    assert not set(first["metrics"].values()) & set(second["metrics"].values())


def draws(data, base_url):
    """Tell what each library draws next."""
    drawn = random.random(), numpy.random.random(), torch.rand(()).item()
    return {"metrics": dict(zip(("random", "numpy", "torch"), drawn, strict=True))}


def test_episode_ends_with_its_keeper(tmp_path):
    """The parent of an episode, its keeper, may be killed by the kernel."""
    row = {**ROW, "file": str(tmp_path / "pid")}
    (error,) = play(row, agent=f"{__name__}:kills_keeper")
    assert "keeper of its process was killed" in str(error)
    assert ended(int((tmp_path / "pid").read_text()))


def kills_keeper(data, base_url):
    Path(data["file"]).write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000.0)


def test_killed_keeper_leaves_no_process_and_harms_no_other(tmp_path):
    """A process that left the episode's group ends. The other episode, with its own process, continues."""
    daemon = tmp_path / "pid"

    async def run():
        processes = AgentProcesses(settings(f"{__name__}:outlives_or_kills_keeper"))
        try:
            other = asyncio.create_task(call(processes, {**ROW, "daemon": str(daemon)}))
            with pytest.raises(AgentError, match="keeper of its process was killed"):
                await call(processes, {**ROW, "file": str(daemon)})
            return await other
        finally:
            await processes.close()

    assert asyncio.run(run()) == 1.0


def outlives_or_kills_keeper(data, base_url):
    from tests.support.harness import user_agents

    if "file" in data:
        user_agents.leaves_daemon(data, base_url)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000.0)
    with subprocess.Popen(["sleep", "1000"]) as own:
        poll(lambda: os.path.exists(data["daemon"]), "the process of the other episode", 30.0)
        assert ended(int(Path(data["daemon"]).read_text())) and own.poll() is None
        own.kill()
    return 1.0


def test_error_has_type_message_line_and_output():
    error = error_of("prints_and_raises")
    text = str(error)
    assert text.startswith("KeyError: 'nothing' (") and 'raise KeyError("nothing")' in text
    assert f"{ROOT}/tests/support/harness/user_agents.py:" in text and "it printed: before the error" in text
    assert error.defect.startswith("KeyError at ") and error.defect == error_of("prints_and_raises").defect


def test_stuck_process_costs_its_episode_only(tmp_path):
    row = {**ROW, "file": str(tmp_path / "pid")}
    stuck, good = play(row, ROW, agent=f"{__name__}:stuck_or_good", episode=2.0)
    assert "episode_timeout_s=2" in str(stuck) and good == 1.0
    poll(lambda: not psutil.pid_exists(int((tmp_path / "pid").read_text())), "the end of the process", 30.0)


def stuck_or_good(data, base_url):
    from tests.support.harness import user_agents

    return user_agents.blocks(data, base_url) if "file" in data else 1.0


def test_daemon_of_an_episode_ends_with_it(tmp_path):
    row = {**ROW, "file": str(tmp_path / "pid")}
    assert play(row, agent=f"{AGENTS}:leaves_daemon") == [1.0]
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        ("eats", "MemoryError"),
        ("eats_together", "memory_mb=200"),
        ("forks", "more than 20 processes"),
        ("exits", "exited with code 3 before run returned"),
        ("returns_object", "run returned a object: it must return a number"),
        ("returns_megabytes", "run returned more than 1 MiB"),
    ],
)
def test_limit_ends_one_episode_with_its_reason(agent, problem, monkeypatch):
    monkeypatch.setattr(module, "MAX_PROCESSES", 20)
    assert problem in str(error_of(agent))


def test_megabytes_of_output_are_dropped(caplog):
    caplog.set_level("INFO")
    assert play(ROW, agent=f"{AGENTS}:prints") == [2.0]
    assert "printed 10001014 bytes" in caplog.text and "the last line" in caplog.text
    assert len(caplog.text) < 2000


def test_interpreter_without_realsys_plays(tmp_path, monkeypatch):
    write_agent(tmp_path, monkeypatch)
    (result,) = play(ROW, agent="mine:Mine", agent_python=OUTER, agent_args={"reward": 4})
    assert result == {"reward": 4, "answer": "None", "metrics": {"realsys": 0}}
    check_interpreter(settings("mine:Mine", agent_python=OUTER))


@pytest.mark.parametrize(
    ("agent", "python", "arguments", "problem"),
    [
        ("mine:Missing", OUTER, {}, "has no attribute 'Missing'"),
        ("mine:Mine", OUTER, {"turns": 3}, "'turns'"),
        ("mine:Native", OUTER, {}, "unset rollout.agent_python"),
        ("broken:Mine", OUTER, {}, "SyntaxError"),
        ("absent:Mine", OUTER, {}, "No module named 'absent'"),
        ("mine:Mine", "/bin/false", {}, "it must be Python 3.9 or later"),
    ],
)
def test_launcher_refuses_what_interpreter_cannot_run(tmp_path, monkeypatch, agent, python, arguments, problem):
    write_agent(tmp_path, monkeypatch)
    with pytest.raises(ConfigError) as raised:
        check_interpreter(settings(agent, agent_python=python, agent_args=arguments))
    assert problem in str(raised.value) and "\n" not in str(raised.value)


def test_killed_zygote_is_replaced():
    async def run():
        processes = AgentProcesses(settings(f"{AGENTS}:Rewarding"))
        try:
            await call(processes, ROW)
            process = processes._zygote._process
            process.kill()
            assert await process.exits_within(30.0)
            return await call(processes, ROW)
        finally:
            await processes.close()

    assert asyncio.run(run())["reward"] == 1.0


def test_zygote_that_hangs_is_replaced(monkeypatch):
    monkeypatch.setattr(module, "_PASS_S", 0.2)

    async def run():
        processes = AgentProcesses(settings(f"{AGENTS}:Rewarding"))
        try:
            await call(processes, ROW)
            processes._zygote._process.signal(signal.SIGSTOP)
            with pytest.raises(BlockingIOError):
                while True:
                    processes._zygote._control.send(b"{}")
            async with asyncio.timeout(60.0):
                return await call(processes, ROW)
        finally:
            await processes.close()

    assert asyncio.run(run())["reward"] == 1.0


def test_replacement_outlives_the_zygote_it_replaced(monkeypatch):
    """The second episode learns that the zygote failed when the first one has replaced it."""
    made = []

    class Zygote(FakeZygote):
        def __init__(self, rollout):
            self.used, self.killed = 0, False
            made.append(self)

        async def kill(self):
            self.killed = True

        async def pass_on(self, connection, limits):
            self.used += 1
            if self is not made[0]:
                replaced.set()
                return
            if self.used == 2:
                both.set()
                await replaced.wait()
            await both.wait()
            raise OSError("it has ended")

    monkeypatch.setattr(module, "_Zygote", Zygote)

    async def run():
        processes = AgentProcesses(settings("mine:run"))
        for connection in await asyncio.gather(processes._connect(), processes._connect()):
            connection.close()

    both, replaced = asyncio.Event(), asyncio.Event()
    asyncio.run(run())
    assert [zygote.killed for zygote in made] == [True, False]


def write_agent(folder, monkeypatch):
    """Write the module ``mine`` into ``folder``, the only one on the path."""
    source = """
        class Mine:
            def __init__(self, reward=1):
                self.reward = reward

            async def run(self, data, base_url, api_key, http_client):
                try:
                    import realsys
                except ImportError:
                    realsys = None
                found = {"realsys": int(realsys is not None)}
                return {"reward": self.reward, "answer": str(http_client), "metrics": found}

        class Native:
            def __init__(self, parts): ...
            async def run(self, task, session): ...
    """
    (folder / "mine.py").write_text(textwrap.dedent(source))
    (folder / "broken.py").write_text("class Mine(:\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
