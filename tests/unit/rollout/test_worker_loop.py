"""The worker's loop: capacity, pushes before finishes, failures that are no rewards, a clean stop."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config, DataConfig, EvalConfig
from realsys.config.schema_rollout import RolloutConfig
from realsys.data.prompts import Prompt, PromptDataset
from realsys.data.submitted import SubmittedLines, SubmittedWriter
from realsys.errors import (
    DataError,
    GenerationError,
    NoVerifierError,
    RewardError,
    StreamError,
    StuckError,
    WaitTimeout,
)
from realsys.generation.client import SamplingSpec
from realsys.manager.client import RolloutSuperseded
from realsys.manager.messages import (
    AllocateReply,
    AllocateRequest,
    FinishReply,
    FinishRequest,
    TouchReply,
    TouchRequest,
)
from realsys.rollout import agents, worker_loop
from realsys.rollout.group_player import GroupPlayer, Played
from realsys.rollout.worker_loop import RolloutLoop, RolloutLoopParts, answer_of
from realsys.types import Episode, Group, Row, Ticket
from tests.support.data.data_rows import char_tokenizer, jsonl
from tests.support.serving.rollout_fakes import FakeEngine, ScriptedAgent
from tests.support.timelines.made_up import recording


class FakeManager:
    """Hands out what a test puts in; says when a finish has come."""

    def __init__(self):
        self.grants: asyncio.Queue[list[Ticket]] = asyncio.Queue()
        self.allocations: list[AllocateRequest] = []
        self.touched: asyncio.Queue[TouchRequest] = asyncio.Queue()
        self.finished: asyncio.Queue[FinishRequest] = asyncio.Queue()
        self.finish_error: Exception | None = None
        self.known = True

    async def allocate(self, request):
        self.allocations.append(request)
        tickets = await self.grants.get()
        assert len(tickets) <= request.max_tickets
        return AllocateReply(tickets)

    async def touch(self, request):
        self.touched.put_nowait(request)
        return TouchReply()

    async def finish(self, request):
        if self.finish_error is not None:
            raise self.finish_error
        self.finished.put_nowait(request)
        return FinishReply(self.known)


class FakePusher:
    """A pusher that keeps the groups, or raises ``error``."""

    def __init__(self):
        self.groups: list[Group] = []
        self.error: Exception | None = None

    async def push(self, group):
        if self.error is not None:
            raise self.error
        self.groups.append(group)


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

    async def arrival(self, split, index): ...


def row(route=()):
    mask = np.array([False, False, False, True, True])
    versions = np.array([3, 4], np.int32)
    return Row(np.arange(5, dtype=np.int32), mask, np.zeros(2, np.float32), versions, "stop", route)


class FakePlayer:
    """Plays when ``gate`` is open; raises what ``errors`` has for a ticket."""

    def __init__(self):
        self.gate = asyncio.Event()
        self.gate.set()
        self.errors = {}
        self.failed = []  # lines of episodes that failed, of every ticket
        self.started = asyncio.Queue()
        self.cancelled = []
        self.lost_tokens = {}
        self.dropped = ""

    def take_lost_tokens(self):
        return self.lost_tokens

    async def play(self, ticket, prompt):
        self.started.put_nowait(ticket.ticket_id)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(ticket.ticket_id)
            raise
        if ticket.ticket_id in self.errors:
            raise self.errors[ticket.ticket_id]
        count = ticket.n - len(self.failed)
        route = ((("a", 1), ("b", 1)), (("b", 2),))
        episodes = [Episode([row(route[k % 2])], float(k), k == 1, {"turns": 1.0}) for k in range(count)]
        if self.dropped:
            return Played([], self.failed, unused=episodes, dropped=self.dropped)
        return Played(episodes, self.failed, {"generate_s": 0.5})


class Bench:
    def __init__(self, player=None, prompts=None, **options):
        self.manager, self.pusher = FakeManager(), FakePusher()
        self.player, self.prompts = player or FakePlayer(), prompts or FakePrompts()
        settings = {"max_groups": 2, "group_size": 2, **options}
        verifiers = SimpleNamespace(waiting=5, undecided=3, take_failures=lambda: {"raised": 3})
        self.stored = []
        parts = RolloutLoopParts(self.manager, self.player, self.prompts, self.pusher, verifiers, self)
        self.loop = RolloutLoop(parts, "rollout_worker/0", **settings)
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

    async def store(self, ticket, prompt, episode, worker):
        assert self.manager.finished.empty(), "a completion is stored before its end is reported"
        self.stored.append((ticket.ticket_id, episode.reward, worker))

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
        assert request.answers[0].metrics == {} and request.servers == {"a": 1, "b": 3}
        (group,) = bench.pusher.groups
        assert group.ticket.ticket_id == "7" and len(group.episodes) == 2 and group.extra == {"generate_s": 0.5}
        assert 0 < group.started <= group.finished
        assert bench.prompts.asked == [("train", 5)]

    bench_test(body)


def test_dropped_group_is_reported_and_never_pushed():
    async def body(bench, task):
        bench.player.dropped, bench.player.lost_tokens = "equal_rewards", {"equal_rewards": [2, 2]}
        bench.grant(ticket(7))
        request = await bench.finish()
        assert (request.outcome, request.reason, request.answers) == ("filtered", "equal_rewards", [])
        assert (request.correct, request.judged) == (1, 2)
        assert request.lost_tokens == {"equal_rewards": [2, 2]} and request.servers == {"a": 1, "b": 3}
        assert not bench.pusher.groups

    bench_test(body)


def test_evaluation_ticket_is_finished_and_never_pushed():
    async def body(bench, task):
        bench.grant(ticket("eval-1/0", n=1, kind="eval", split="eval", prompt_index=4))
        request = await bench.finish()
        assert request.outcome == "accepted" and [a.metrics for a in request.answers] == [{"turns": 1.0}]
        assert not bench.pusher.groups and bench.prompts.asked == [("eval", 4)]
        assert bench.stored == [("eval-1/0", 0.0, "rollout_worker/0")]

    bench_test(body)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NoVerifierError("cannot be started"), "NoVerifierError: cannot be started"),
        (GenerationError("no server"), "GenerationError: no server"),
        (ZeroDivisionError("a defect"), "ZeroDivisionError: a defect"),
        (DataError("file \udc80\nis gone"), "DataError: file ? is gone"),
    ],
)
def test_failed_rollout_is_reported_without_reward(error, expected):
    async def body(bench, task):
        bench.player.errors["7"] = error
        bench.grant(ticket(7), ticket(8))
        requests = {r.ticket_id: r for r in (await bench.finish(), await bench.finish())}
        assert (requests["7"].outcome, requests["7"].reason, requests["7"].answers) == ("failed", expected, [])
        assert requests["8"].outcome == "accepted"
        assert [group.ticket.ticket_id for group in bench.pusher.groups] == ["8"]
        assert (bench.loop.accepted, bench.loop.failed) == (1, 1)

    bench_test(body)


def test_group_without_verdicts_is_not_generated_again():
    """Another attempt would cost all its tokens, and the verifier would meet the same completions."""

    async def body(bench, task):
        for number, kind in ((7, "train"), (8, "eval")):
            bench.player.errors[str(number)] = RewardError("verifier math hung")
            bench.grant(ticket(number, kind=kind))
        requests = {r.ticket_id: r for r in (await bench.finish(), await bench.finish())}
        assert (requests["7"].outcome, requests["7"].reason) == ("rejected", "RewardError: verifier math hung")
        assert requests["8"].outcome == "failed"
        assert (requests["7"].verdicts_waiting, requests["7"].verdicts_undecided) == (5, 3)
        assert requests["7"].verdict_failures == {"raised": 3}

    bench_test(body)


def test_group_with_failed_episode_carries_its_error():
    async def body(bench, task):
        bench.player.failed = ["episode 1: RewardError: hung"]
        bench.grant(ticket(7))
        request = await bench.finish()
        assert request.outcome == "accepted" and len(request.answers) == 1
        (group,) = bench.pusher.groups
        assert len(group.episodes) == 1 and group.errors == ["episode 1: RewardError: hung"]

    bench_test(body)


def test_always_failing_agent_ends_worker_after_report():
    async def body(bench, task):
        bench.player.errors["7"] = StuckError("every episode of two tickets in a row failed")
        bench.grant(ticket(7))
        request = await bench.finish()
        assert (request.outcome, request.reason) == (
            "failed",
            "StuckError: every episode of two tickets in a row failed",
        )
        await asyncio.wait({task})

    with pytest.raises(StuckError, match="two tickets in a row"):
        bench_test(body)


@pytest.mark.parametrize("empty", [0, 1])
def test_empty_completion_has_version_of_its_ticket(empty):
    none = np.empty(0, np.int32)
    rows = [Row(np.ones(2, np.int32), np.zeros(2, np.bool_), none.astype(np.float32), none, "length"), row()]
    answer = answer_of(ticket(7), Episode(rows[: 2 - empty], 1.0))
    assert (answer.length, answer.finish_reason, answer.correct) == (0 if empty else 2, "length", None)
    assert (answer.version_min, answer.version_max) == ((3, 3) if empty else (3, 4))


def test_bad_prompt_or_failed_push_fails_its_ticket():
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
        bench.player.errors["7"] = RolloutSuperseded("attempt 0 is not running")
        bench.grant(ticket(7), ticket(8))
        assert (await bench.finish()).ticket_id == "8"
        assert bench.manager.finished.empty()

    bench_test(body)


def test_unknown_attempt_does_not_end_worker():
    async def body(bench, task):
        bench.manager.known = False
        bench.grant(ticket(7))
        await bench.finish()
        bench.grant(ticket(8))
        assert (await bench.finish()).ticket_id == "8"

    bench_test(body)


def test_worker_requests_only_what_fits():
    """A finished ticket makes room again."""

    async def body(bench, task):
        bench.player.gate.clear()
        bench.grant(ticket(1))
        await bench.player.started.get()
        bench.grant(ticket(2))
        await bench.player.started.get()
        assert [request.max_tickets for request in bench.manager.allocations] == [2, 1]  # full: it does not ask
        bench.player.gate.set()
        await bench.finish()
        bench.grant(ticket(3))
        await bench.player.started.get()
        assert len(bench.manager.allocations) >= 3

    bench_test(body)


def test_evaluation_runs_as_wide_as_training():
    async def body(bench, task):
        bench.player.gate.clear()
        for number in range(3):
            bench.grant(ticket(f"e/{number}", n=1, kind="eval"))
            await bench.player.started.get()
        assert bench.loop.running == 3  # of 2 groups of 2 answers each
        assert [request.max_tickets for request in bench.manager.allocations][:3] == [2, 1, 1]

    bench_test(body)


def test_stop_cancels_rollouts_and_ends_held_call():
    async def body(bench, task):
        bench.player.gate.clear()
        bench.grant(ticket(1))
        await bench.player.started.get()
        bench.stop.set()
        await asyncio.wait({task})
        assert bench.player.cancelled == ["1"] and bench.manager.finished.empty()

    bench_test(body)


@pytest.mark.parametrize("full", [False, True])
def test_unreportable_finish_ends_the_worker(full):
    async def body(bench, task):
        bench.manager.finish_error = WaitTimeout("waited 120 s for the gserver_manager")
        bench.player.gate.clear()
        bench.grant(*[ticket(number) for number in range(2 if full else 1)])
        await bench.player.started.get()
        bench.player.gate.set()
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


def test_rollouts_that_hang_are_in_the_log(monkeypatch, caplog):
    monkeypatch.setattr(worker_loop, "QUIET_S", 0.0)

    async def body(bench, task):
        bench.player.gate.clear()
        bench.grant(ticket(7))
        for _ in range(2):
            await bench.manager.touched.get()
        bench.player.gate.set()

    bench_test(body, touch_s=0.01)
    assert "no rollout has ended for 0 s, and 1 run" in caplog.text


def test_running_attempts_keep_their_leases_and_say_memory():
    async def body(bench, task):
        bench.player.gate.clear()
        bench.grant(ticket(7), ticket(8))
        while len((request := await bench.manager.touched.get()).running) < 2:
            pass
        assert request.running == [("7", 0), ("8", 0)]
        assert request.memory_bytes > 1 << 20
        bench.player.gate.set()
        assert (await bench.finish()).memory_bytes > 1 << 20

    bench_test(body, touch_s=0.01)


def test_attempt_leaves_its_spans(tmp_path):
    """The push lies inside of the attempt, and a refused ticket has an attempt without a push."""

    async def body(bench, task):
        bench.player.errors["8"] = RewardError("no verdict")
        bench.grant(ticket(7), ticket(8))
        await bench.finish()
        await bench.finish()

    with recording(tmp_path) as spans:
        bench_test(body)
    own = {(span.name, span.unit): span for span in spans()}
    assert own["push", "7.0"].begin >= own["rollout", "7.0"].begin
    assert own["finish", "7.0"].end <= own["rollout", "7.0"].end
    assert own["finish", "8.0"].facts == {"outcome": "rejected"}
    assert ("push", "8.0") not in own
    assert own["rollout", "7.0"].facts == {"kind": "train", "version": 3, "episodes": 2}
    assert [span.facts["tickets"] for span in spans() if "tickets" in span.facts] == [2]


# ---- agents that the rows of a training script name: real prompts, agents and player


class Counted(ScriptedAgent):
    """An agent with ``calls`` calls per episode. ``built``: calls of each that was built, ``closed``: of the closed."""

    built: ClassVar[list[int]] = []
    closed: ClassVar[list[int]] = []

    def __init__(self, parts, *, calls=2):
        super().__init__(calls)
        self.built.append(calls)

    async def close(self):
        self.closed.append(self.calls)


class Other(Counted):
    pass


class Broken:
    def __init__(self, parts):
        raise ValueError("no licence")

    async def run(self, task, session): ...


@pytest.fixture
def script(tmp_path):
    """A trial whose script chooses the prompts: its rows, the agents, and options of a bench."""
    Counted.built.clear()
    Counted.closed.clear()
    paths = TrialPaths(tmp_path)
    paths.data.mkdir()
    train = jsonl(tmp_path / "train.jsonl", [{"prompt": f"a{k}=", "answer": str(k)} for k in range(2)])
    data = DataConfig(train=str(train), eval_fraction=0.0, order="script")
    rollout = RolloutConfig(agent=f"{__name__}:Counted", agent_args={"calls": 1}, group_size=2)
    config = Config(data=data, rollout=rollout, evaluation=EvalConfig(problems=0))
    tokenizer = char_tokenizer(tmp_path / "model")
    made = agents.AgentsOfRows(config, tokenizer, None)
    player = GroupPlayer(made, FakeEngine(), SamplingSpec(max_new_tokens=9), 1000)
    with SubmittedWriter(paths.submitted, data, 2) as writer:
        yield writer, made, {"player": player, "prompts": PromptDataset(config, paths, tokenizer), "max_groups": 8}


def test_row_is_played_by_the_agent_that_it_names(script):
    """Each agent is built once, and only the trial's own has the arguments of the configuration."""
    writer, made, options = script
    own, other = f"{__name__}:Counted", f"{__name__}:Other"
    numbers = writer.append([(0, ""), (1, other), ({"prompt": "a1=", "answer": "1"}, other), (1, own)])

    async def body(bench, task):
        bench.grant(*(ticket(k, prompt_index=number) for k, number in enumerate(numbers)))
        outcomes = [(await bench.finish()).outcome for _ in numbers]
        assert outcomes == ["accepted"] * 4
        calls = {group.ticket.ticket_id: group.episodes[0].rows[0].loss_tokens // 3 for group in bench.pusher.groups}
        assert calls == {"0": 1, "1": 2, "2": 2, "3": 1} and Counted.built == [1, 2]
        await made.close()
        assert Counted.closed == [1, 2]

    bench_test(body, **options)


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        (f"{__name__}:Broken", "cannot be built: ValueError: no licence"),
        ("no_such_module:Agent", "no module named 'no_such_module'"),
        (f"{__name__}:FakePusher", "is not an agent: the class lacks run"),
    ],
)
def test_agent_that_cannot_be_built_costs_its_rows(script, agent, reason):
    """However many there are: the worker goes on with the others."""
    writer, _, options = script
    numbers = writer.append([(0, agent), (1, agent), (0, agent), (1, "")])

    async def body(bench, task):
        bench.grant(*(ticket(k, prompt_index=number) for k, number in enumerate(numbers)))
        ends = {end.ticket_id: end for end in [await bench.finish() for _ in numbers]}
        assert [ends[str(k)].outcome for k in range(4)] == ["failed", "failed", "failed", "accepted"]
        assert all(ends[str(k)].reason.startswith(f"DataError: agent '{agent}' of the row: ") for k in range(3))
        assert all(reason in ends[str(k)].reason for k in range(3))

    bench_test(body, **options)


def test_too_many_agents_of_rows_are_refused(script, monkeypatch):
    writer, _, options = script
    monkeypatch.setattr(agents, "MOST_AGENTS", 1)
    numbers = writer.append([(0, f"{__name__}:Other"), (0, "multi_turn")])

    async def body(bench, task):
        ends = []
        for k, number in enumerate(numbers):
            bench.grant(ticket(k, prompt_index=number))
            ends.append(await bench.finish())
        assert [end.outcome for end in ends] == ["accepted", "failed"] and "rows have named 1 others" in ends[1].reason

    bench_test(body, **options)


def test_line_that_does_not_arrive_fails_its_ticket(script):
    _, _, options = script
    options["prompts"]._submitted = SubmittedLines(options["prompts"]._submitted.path, wait_s=0.0)

    async def body(bench, task):
        bench.grant(ticket(1, prompt_index=2))
        end = await bench.finish()
        assert end.outcome == "failed" and "submitted.jsonl: line 1 not found after a wait of 0 s" in end.reason

    bench_test(body, **options)
