"""Environments of verifiers 0.4 in their own interpreter, with the real gateway and engine."""

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest

from realsys.data.prompts import Prompt
from realsys.data.sources.verifiers_tasks import task_rows
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import AgentError, DataError
from realsys.rollout import agents
from realsys.rollout.environments import Task
from tests.support.agents.interpreters import interpreter_of
from tests.support.agents.trained import ROOT, train
from tests.support.polling import poll
from tests.support.serving import gateways
from tests.support.serving.gateways import TICKET, chat_server, make_chat_model, over_server

FOLDERS = (ROOT / "docs" / "examples" / "verifiers", ROOT / "tests" / "support" / "agents" / "environments")


@pytest.fixture(scope="module")
def python():
    return interpreter_of(".venv-verifiers")


@pytest.fixture(autouse=True)
def environments(monkeypatch):
    path = os.pathsep.join([*map(str, FOLDERS), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(gateways, "BOUND_S", 300.0)  # an environment server may start three times in an episode


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model):
    with chat_server(model) as url:
        yield url


def listed(python, env, args):
    """Return the row of the first task."""
    (row,) = task_rows(env, "train", {"env_python": python, "args": args, "size": 1})
    return row.values


def task_of(env, trouble="", **args):
    """Return a task as the agent gets it."""
    args = {**args, "taskset": {"trouble": trouble}} if env == "trouble_sums" else args
    data = {"prompt": "a3b5=", "answer": "8"} | ({"trouble": trouble} if trouble else {})
    return Task(Prompt("a3b5=", "", [1], {"verifiers": {"env": env, "args": args, "task": data}}), TICKET)


def play(engine, model, python, task, *settings, body=None):
    """Play one episode, or ``body(agent, episode)``, with the real gateway and engine."""

    async def run():
        own = ("rollout.agent=verifiers", f"rollout.agent_args.env_python={python}", *settings)
        tokenizer = TextTokenizer(model)
        async with over_server(engine, tokenizer, *own) as episode:
            agent = agents.build(episode.config, tokenizer, None)
            try:
                if body is not None:
                    return await body(agent, episode)
                return await agent.run(task, episode.session), episode
            finally:
                await agent.close()

    return asyncio.run(run())


def test_environment_trains_the_model(tmp_path, warm_model, python):
    """Rows are what the engine was sent and returned; rewards and metrics are those of the environment."""
    settings = (
        "rollout.agent=verifiers",
        "train.batch_groups=8",
        "data.kind=jsonl",
        "data.train=verifiers:arith_sums",
        f"data.source_args={{env_python: {python}, size: 60}}",
        "train.total_steps=3",
    )
    trained = train(tmp_path, warm_model, "verifiers", *settings)
    assert len(trained.rewards()) == 3 and [norm > 0 for norm in trained.gradients()] == trained.signals()
    assert any(trained.signals()) and not trained.errors() and trained.check_rows() == 3 * 8 * 4
    for row in trained.rows():
        reply = trained.tokenizer.completion_text(row.tokens[row.runs[0][0] :])
        prompt = trained.text(row).partition("user\n")[2].partition("<")[0]
        total = sum(int(digit) for digit in prompt if digit.isdigit())
        assert row.meta.reward == float(reply.rpartition("#")[2] == str(total)), (prompt, reply)
        assert row.meta.metrics["characters"] == len(reply.strip())


@pytest.mark.parametrize(("harness", "client"), [("null", "chat"), (None, "chat"), (None, "tokens")])
def test_environment_of_the_wheel_runs(engine, model, python, harness, client):
    """best_of_n: four attempts with one prompt are four rows, also with the harness ``null``, whose SDK streams."""
    task = task_of("arith_sums", id="best_of_n", agent={"harness": {"id": harness}} if harness else {})
    episode, opened = play(engine, model, python, task, f"rollout.agent_args.client={client}")
    assert len(episode.rows) == 4 and episode.metrics["pass_at_n"] in (0.0, 1.0)
    sampled = sorted(completion.tokens.tolist() for _, completion in opened.engine.returned)
    assert sorted(row.tokens[row.loss_mask].tolist() for row in episode.rows) == sampled and len(sampled) == 4


def test_agent_that_is_not_trainable_is_context(engine, model, python):
    episode, opened = play(engine, model, python, task_of("trouble_sums", "judge"))
    (row,), (first, second) = episode.rows, opened.engine.returned
    assert np.array_equal(row.tokens[row.loss_mask], first[1].tokens) and first[0] == second[0]
    assert episode.reward == episode.metrics["solver.right"] + 0.5 and "judge.characters" in episode.metrics


@pytest.mark.parametrize(
    ("trouble", "roles", "problem"),
    [
        ("bad_reward", {}, "the judge is ill"),
        ("no_reward", {}, "gave no reward"),
        ("stuck", {"solver": {"timeout": {"rollout": 0.5}}}, "timed out"),
        ("stuck", {"timeout": {"episode": 0.5}}, "timed out"),
    ],
)
def test_failure_of_the_environment_is_no_reward(engine, model, python, trouble, roles, problem):
    with pytest.raises(AgentError, match=problem):
        play(engine, model, python, task_of("trouble_sums", trouble, **roles))


def test_stuck_episode_is_cancelled_in_the_server(engine, model, python, tmp_path, monkeypatch):
    """Its harness learns of it while the server runs on."""
    marker = tmp_path / "cancelled"
    monkeypatch.setenv("TROUBLE_CANCELLED", str(marker))
    good, stuck = task_of("trouble_sums", "none"), task_of("trouble_sums", "stuck")
    good.prompt.extra["verifiers"]["args"] = stuck.prompt.extra["verifiers"]["args"]  # on the same server

    async def body(agent, episode):
        await agent.agent.run(good, episode.another())  # without the limit of time: it starts the server
        with pytest.raises(AgentError, match="episode_timeout_s"):
            await agent.run(stuck, episode.session)
        await asyncio.to_thread(poll, marker.exists, "the end of its harness", 60.0)

    play(engine, model, python, None, "rollout.agent_limits.episode_timeout_s=5", body=body)


def test_dead_server_fails_its_episodes_and_restarts(engine, model, python):
    """The cause is in the error; the next episode gets a new server; nothing of either is left."""
    before = set(Path("/tmp").glob("realsys-verifiers-*"))
    good, bad = task_of("trouble_sums", "none"), task_of("trouble_sums", "dies")
    good.prompt.extra["verifiers"]["args"] = bad.prompt.extra["verifiers"]["args"]  # on the same server

    async def body(agent, episode):
        with pytest.raises(AgentError, match=r"exited with code 3.*out of luck"):
            await agent.run(bad, episode.session)
        first = await agent.run(good, episode.another(1))
        (server,) = agent.agent._servers.values()
        pid = server.pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(AgentError, match="SIGKILL"):
            await asyncio.gather(*(agent.run(good, episode.another(2)) for _ in range(2)))
        again = await agent.run(good, episode.another(3))
        return first, again, {pid, server.pid}

    *episodes, pids = play(engine, model, python, None, body=body)
    assert all(len(episode.rows) == 1 for episode in episodes) and len(pids) == 2
    poll(lambda: not any(map(psutil.pid_exists, pids)), "the end of both servers", 30.0)
    assert set(Path("/tmp").glob("realsys-verifiers-*")) <= before


def test_server_that_cannot_start_names_the_cause(engine, model, python):
    task = task_of("no_such_environment")
    with pytest.raises(AgentError, match=r"cannot be served: .*'no_such_environment' not found") as caught:
        play(engine, model, python, task)
    assert caught.value.defect == "environment no_such_environment cannot be served"


@pytest.mark.parametrize(
    ("env", "args", "problem"),
    [
        ("no_such_environment", {}, "'no_such_environment' not found"),
        ("trouble_sums", {"taskset": {"trouble": "no_tasks"}}, "OSError: the data set is gone"),
        ("arith_sums", {"agent": {"harness": {"id": "bash"}}}, "'bash' of agent runs code of the model"),
        ("arith_sums", {"taskset": {"wrong": 1}}, "wrong"),
    ],
)
def test_environment_is_checked_before_the_start(python, env, args, problem):
    with pytest.raises(DataError, match=problem):
        listed(python, env, args)
