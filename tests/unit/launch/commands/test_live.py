"""Evaluations beside training: what may be asked, the wait for them, and the cancel."""

import asyncio

import pytest

from realsys.cluster.names.connect import trial_names
from realsys.config.evaluation_sets import evaluation_sets
from realsys.config.paths import TrialPaths, write_config
from realsys.config.schema import Config
from realsys.errors import ConfigError, StreamError, WaitTimeout
from realsys.launch.commands import evaluate
from realsys.launch.commands.evaluate import LiveEvaluations, client_of, live_sets
from realsys.launch.evaluation_target import Choices
from realsys.manager.messages import EvaluateRequest, EvaluationReply
from realsys.observe.evaluation_records import read_result
from tests.support.ledger.memory_store import MemoryNameStore


class Manager:
    """A manager that answers each poll with the next of the states."""

    def __init__(self, states, problem=None):
        self.requests: list[EvaluateRequest] = []
        self.cancelled: list[str] = []
        self.polled = asyncio.Event()
        self._states = states
        self._problem = problem

    async def evaluate(self, request):
        self.requests.append(request)

    async def evaluation(self, eval_id):
        self.polled.set()
        if self._problem is not None:
            raise self._problem
        return self._states.pop(0) if len(self._states) > 1 else self._states[0]

    async def cancel_evaluation(self, request):
        self.cancelled.append(request.eval_id)


def state(done, *, total=4, **more):
    return EvaluationReply(done, total, 0, None, None, 0.0, 3, 3, ended=done == total, **more)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(evaluate, "_POLL_S", 0.0)


@pytest.fixture
def trial(tmp_path):
    paths = TrialPaths(tmp_path / "t")
    paths.root.mkdir()
    write_config(Config.model_validate({"evaluation": {"sets": {"a": {"path": "/a"}}}}), paths.config)
    return paths


def evaluations(manager, said, **fields):
    return LiveEvaluations(manager, Config.model_validate(fields), "user-1", said.append)  # type: ignore[arg-type]


def test_settings_of_requests_can_be_changed(trial):
    overrides = ["evaluation.samples=4", "evaluation.k=[1,4]", "evaluation.sets.a.problems=7"]
    _, sets = live_sets(trial, Choices(overrides))
    assert {name: (made.samples, made.problems) for name, made in sets.items()} == {"eval": (4, 512), "a": (4, 7)}


@pytest.mark.parametrize(
    "override", ["evaluation.sampling.temperature=0.5", "data.eval=/x", "evaluation.sets.a.path=/b"]
)
def test_settings_of_workers_are_refused(trial, override):
    with pytest.raises(
        ConfigError, match="cannot be set with --live.*: set evaluation.problems, samples, k or max_failed only"
    ):
        live_sets(trial, Choices([override]))


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("", "does not run: leave --live out"),
        ("http://127.0.0.1:1", "only the user who runs the trial can ask its servers"),
    ],
)
def test_trial_that_cannot_be_asked_is_named(trial, address, problem):
    store = MemoryNameStore()
    if address:
        store.add(trial_names(Config()).gserver_manager, address)
    with pytest.raises(ConfigError, match=problem):
        client_of(Config(), trial, store)


def test_request_is_of_a_user(tmp_path):
    async def body():
        manager, said = Manager([state(1), state(4)]), list[str]()
        found = await evaluations(manager, said).run(evaluation_sets(Config()), TrialPaths(tmp_path))
        [request] = manager.requests
        assert (request.by_user, request.n, request.set, request.incarnation) == (True, 512, "eval", "")
        assert list(found) == [request.eval_id] == ["user-1"] and found["user-1"]["complete"]
        assert read_result(tmp_path / "evaluations" / "user-1") == found["user-1"]
        assert said == ["eval 1/4 of version 3"] and manager.cancelled == []

    asyncio.run(body())


def test_interrupt_cancels_what_has_not_ended(tmp_path):
    async def body():
        manager = Manager([state(1)])
        task = asyncio.create_task(evaluations(manager, []).run(evaluation_sets(Config()), TrialPaths(tmp_path)))
        await manager.polled.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert manager.cancelled == [manager.requests[0].eval_id]

    asyncio.run(body())


def test_error_of_the_manager_cancels_too(tmp_path):
    async def body():
        manager = Manager([state(1)], StreamError("gserver_manager: no"))
        with pytest.raises(StreamError):
            await evaluations(manager, []).run(evaluation_sets(Config()), TrialPaths(tmp_path))
        assert len(manager.cancelled) == 1

    asyncio.run(body())


def test_standstill_is_named_and_cancelled(tmp_path):
    async def body():
        manager = Manager([state(1)])
        slow = {"cluster": {"request_timeout_s": 0.01}}
        with pytest.raises(WaitTimeout, match="no new completion for 0.01 s: eval 1/4 of version 3"):
            await evaluations(manager, [], **slow).run(evaluation_sets(Config()), TrialPaths(tmp_path))
        assert len(manager.cancelled) == 1

    asyncio.run(body())
