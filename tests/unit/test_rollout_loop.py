"""The worker's loop: capacity, pushes before finishes, failures that are no rewards, a clean stop."""

import asyncio
import math
from contextlib import asynccontextmanager

import numpy as np
import pytest

from realsys.config.schema import RewardConfig, SamplingConfig
from realsys.data.prompts import Prompt
from realsys.errors import ConfigError, DataError, GenerationError, RewardError, StreamError, WaitTimeout
from realsys.generation.client import Generated
from realsys.rollout.agent import AgentParts, Episode, MathSingleTurnAgent, make_agent, sampling_spec
from realsys.rollout.environment import MathEnvironment, Verdict
from realsys.rollout.manager_client import RolloutSuperseded
from realsys.rollout.worker_loop import RolloutLoop
from realsys.types import Ticket, Trajectory
from tests.unit.rollout_fakes import FakeManager, FakePusher, generated


def ticket(number, *, n=2, kind="train", split="train", prompt_index=0):
    return Ticket(str(number), 0, prompt_index, kind=kind, split=split, n=n, version=3)


class FakePrompts:
    def __init__(self):
        self.asked = []

    def prompt(self, split, index):
        self.asked.append((split, index))
        if index == 99:
            raise DataError("train.jsonl:100: no good")
        return Prompt("a1=", "1", [2, 10, 4])


class FakeAgent:
    """Answers when ``gate`` is open; raises what ``errors`` has for a ticket."""

    def __init__(self):
        self.gate = asyncio.Event()
        self.gate.set()
        self.errors = {}
        self.rewards = {}  # of the last answer of a ticket, in place of its number
        self.started = asyncio.Queue()
        self.cancelled = []

    async def run(self, ticket, prompt):
        self.started.put_nowait(ticket.ticket_id)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(ticket.ticket_id)
            raise
        if ticket.ticket_id in self.errors:
            raise self.errors[ticket.ticket_id]
        trajectories = [
            Trajectory(
                np.arange(5, dtype=np.int32), np.zeros(2, np.float32), np.array([3, 4], np.int32), 3, float(k), "stop"
            )
            for k in range(ticket.n)
        ]
        trajectories[-1].reward = self.rewards.get(ticket.ticket_id, trajectories[-1].reward)
        return Episode(trajectories, [k == 1 for k in range(ticket.n)], {"generate_s": 0.5})


class Bench:
    def __init__(self, **options):
        self.manager, self.agent, self.prompts, self.pusher = FakeManager(), FakeAgent(), FakePrompts(), FakePusher()
        settings = {"worker": "rollout_worker/0", "max_groups": 2, "group_size": 2, **options}
        self.loop = RolloutLoop(self.manager, self.agent, self.prompts, self.pusher, **settings)
        self.stop = asyncio.Event()

    @asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self.loop.run(self.stop))
        async with asyncio.timeout(60):
            try:
                yield task
            finally:
                self.stop.set()
                await asyncio.wait({task})
        assert self.loop.running == 0

    def grant(self, *tickets):
        self.manager.grants.put_nowait(list(tickets))

    async def finish(self):
        return await self.manager.finished.get()


def bench_test(body, **options):
    async def run():
        bench = Bench(**options)
        async with bench.running() as task:
            await body(bench, task)
        if task.exception() is not None:
            raise task.exception()

    asyncio.run(run())


def test_a_train_ticket_is_pushed_then_finished():
    async def body(bench, task):
        bench.grant(ticket(7, prompt_index=5))
        request = await bench.finish()
        assert (request.ticket_id, request.outcome, request.worker) == ("7", "accepted", "rollout_worker/0")
        assert [(a.reward, a.correct, a.length) for a in request.answers] == [(0.0, False, 2), (1.0, True, 2)]
        assert (request.answers[0].version_min, request.answers[0].version_max) == (3, 4)
        (group,) = bench.pusher.groups
        assert group.ticket.ticket_id == "7" and len(group.trajectories) == 2 and group.extra == {"generate_s": 0.5}
        assert 0 < group.started <= group.finished
        assert bench.prompts.asked == [("train", 5)]

    bench_test(body)


def test_an_evaluation_ticket_is_finished_with_its_answer_and_never_pushed():
    async def body(bench, task):
        bench.grant(ticket("eval-1/0", n=1, kind="eval", split="eval", prompt_index=4))
        request = await bench.finish()
        assert request.outcome == "accepted" and len(request.answers) == 1
        assert not bench.pusher.groups and bench.prompts.asked == [("eval", 4)]

    bench_test(body)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RewardError("verifier math hung"), "RewardError: verifier math hung"),
        (GenerationError("no server"), "GenerationError: no server"),
        (ZeroDivisionError("a defect"), "ZeroDivisionError: a defect"),
    ],
)
def test_a_failed_rollout_is_reported_as_failed_without_any_reward(error, expected):
    async def body(bench, task):
        bench.agent.errors["7"] = error
        bench.grant(ticket(7), ticket(8))
        requests = {r.ticket_id: r for r in (await bench.finish(), await bench.finish())}
        assert (requests["7"].outcome, requests["7"].reason, requests["7"].answers) == ("failed", expected, [])
        assert requests["8"].outcome == "accepted"
        assert [group.ticket.ticket_id for group in bench.pusher.groups] == ["8"]
        assert (bench.loop.accepted, bench.loop.failed) == (1, 1)

    bench_test(body)


@pytest.mark.parametrize("kind", ["train", "eval"])
@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_fails_its_rollout_and_nothing_else(kind, reward):
    """Pushed, it would spoil the advantages of its whole batch; told to the manager, it would end the worker."""

    async def body(bench, task):
        bench.agent.rewards["7"] = reward
        bench.grant(ticket(7, kind=kind), ticket(8))
        requests = {r.ticket_id: r for r in (await bench.finish(), await bench.finish())}
        assert (requests["7"].outcome, requests["7"].answers) == ("failed", [])
        assert requests["7"].reason == f"RewardError: ticket 7: answer 1 has the reward {reward}, not a number"
        assert requests["8"].outcome == "accepted"
        assert [group.ticket.ticket_id for group in bench.pusher.groups] == ["8"]

    bench_test(body)


def test_a_bad_prompt_and_a_push_that_fails_are_failures_of_their_ticket():
    async def body(bench, task):
        bench.grant(ticket(1, prompt_index=99))
        assert (await bench.finish()).reason == "DataError: train.jsonl:100: no good"
        bench.pusher.error = WaitTimeout("not acknowledged")
        bench.grant(ticket(2))
        request = await bench.finish()
        assert (request.outcome, request.reason) == ("failed", "WaitTimeout: not acknowledged")

    bench_test(body)


def test_a_superseded_attempt_is_not_finished():
    async def body(bench, task):
        bench.agent.errors["7"] = RolloutSuperseded("attempt 0 is not running")
        bench.grant(ticket(7), ticket(8))
        assert (await bench.finish()).ticket_id == "8"
        assert bench.manager.finished.empty()

    bench_test(body)


def test_an_attempt_unknown_to_the_manager_does_not_end_the_worker():
    async def body(bench, task):
        bench.manager.known = False
        bench.grant(ticket(7))
        await bench.finish()
        bench.grant(ticket(8))
        assert (await bench.finish()).ticket_id == "8"

    bench_test(body)


def test_no_more_is_asked_for_than_there_is_room_and_room_comes_back():
    async def body(bench, task):
        bench.agent.gate.clear()
        bench.grant(ticket(1))
        await bench.agent.started.get()
        bench.grant(ticket(2))
        await bench.agent.started.get()
        assert [request.max_tickets for request in bench.manager.allocations] == [2, 1]  # full: it does not ask
        bench.agent.gate.set()
        await bench.finish()
        bench.grant(ticket(3))
        await bench.agent.started.get()
        assert len(bench.manager.allocations) >= 3

    bench_test(body)


def test_single_answers_of_an_evaluation_run_as_wide_as_training():
    async def body(bench, task):
        bench.agent.gate.clear()
        for number in range(3):
            bench.grant(ticket(f"e/{number}", n=1, kind="eval"))
            await bench.agent.started.get()
        assert bench.loop.running == 3  # of 2 groups of 2 answers each
        assert [request.max_tickets for request in bench.manager.allocations][:3] == [2, 1, 1]

    bench_test(body)


def test_stop_cancels_what_runs_and_ends_the_held_call():
    async def body(bench, task):
        bench.agent.gate.clear()
        bench.grant(ticket(1))
        await bench.agent.started.get()
        bench.stop.set()
        await asyncio.wait({task})
        assert bench.agent.cancelled == ["1"] and bench.manager.finished.empty()

    bench_test(body)


@pytest.mark.parametrize("full", [False, True])
def test_a_finish_that_cannot_be_reported_ends_the_worker(full):
    async def body(bench, task):
        bench.manager.finish_error = WaitTimeout("waited 120 s for the gserver_manager")
        bench.agent.gate.clear()
        bench.grant(*[ticket(number) for number in range(2 if full else 1)])
        await bench.agent.started.get()
        bench.agent.gate.set()
        await asyncio.wait({task})

    with pytest.raises(WaitTimeout, match="gserver_manager"):
        bench_test(body)


def test_an_allocation_that_is_refused_ends_the_worker():
    async def body(bench, task):
        async def refuse(request):
            raise StreamError("gserver_manager /allocate_rollout: status 401: needs the trial's token")

        bench.manager.allocate = refuse
        bench.grant(ticket(1))  # ends the call that is held already
        await asyncio.wait({task})

    with pytest.raises(StreamError, match="401"):
        bench_test(body)


# ---- agent and environment


class FakeTokenizer:
    def answer_text(self, ids):
        return "".join(map(str, ids))


class FakePool:
    def __init__(self):
        self.trips = []

    async def verify_batch(self, name, items):
        self.trips.append((name, list(items)))
        return [item.answer == item.reference for item in items]


def answer(tokens, reason="stop"):
    array = np.asarray(tokens, np.int32)
    return Generated(array, np.zeros(len(array), np.float32), np.zeros(len(array), np.int32), reason)


def test_a_group_is_verified_in_one_trip_and_a_truncated_answer_is_wrong():
    pool = FakePool()
    environment = MathEnvironment(FakeTokenizer(), pool, "exact", RewardConfig(correct=5.0, wrong=-5.0))
    answers = [answer([1, 2]), answer([1, 2], "length"), answer([3])]
    verdicts = asyncio.run(environment.judge(Prompt("q", "12", [9]), answers))
    assert verdicts == [Verdict(True, 5.0), Verdict(False, -5.0), Verdict(False, -5.0)]
    ((name, items),) = pool.trips
    assert name == "exact" and [(i.prompt, i.answer, i.reference) for i in items] == [
        ("q", "12", "12"),
        ("q", "3", "12"),
    ]


def test_the_agent_keeps_tokens_logprobs_and_versions_as_they_came():
    class Generation:
        async def generate(self, ticket, prompt, spec):
            assert (list(prompt), spec.n, spec.stop_token_ids) == ([2, 10, 4], 2, (1,))
            return [generated(3, 4, 6, "stop"), generated(3, 2, 5, "length")]

    class Environment:
        async def judge(self, prompt, answers):
            return [Verdict(True, 1.0), Verdict(False, 0.0)]

    parts = AgentParts(Generation(), Environment(), sampling_spec(SamplingConfig(max_new_tokens=9), (1,)))
    agent = make_agent("math_single_turn", parts)
    assert isinstance(agent, MathSingleTurnAgent)
    episode = asyncio.run(agent.run(ticket(1), Prompt("a1=", "1", [2, 10, 4])))
    first, second = episode.trajectories
    assert first.tokens.tolist() == [2, 10, 4, *generated(3, 4, 6, "stop").tokens] and first.tokens.dtype == np.int32
    assert (first.prompt_len, first.reward, first.answer_len, first.truncated) == (3, 1.0, 4, False)
    assert second.truncated and second.versions.tolist() == [5, 5] and episode.correct == [True, False]


def test_an_unknown_agent_is_a_configuration_error():
    with pytest.raises(ConfigError, match="rollout.agent='nobody'.*math_single_turn"):
        make_agent("nobody", None)
