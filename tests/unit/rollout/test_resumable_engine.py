"""Partial rollouts: nothing of an answer is lost or made anew when its server goes away."""

import asyncio
import dataclasses
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from realsys.errors import GenerationError, ServerBusy, ServerFailed, ServerSilent
from realsys.generation.client import SamplingSpec
from realsys.generation.completion import Completion
from realsys.generation.protocol import CONTINUES, ProgressLine, ProgressPart
from realsys.manager.client import RolloutSuperseded
from realsys.manager.messages import ScheduleReply, ScheduleRequest
from realsys.rollout import resumable_engine
from realsys.rollout.resumable_engine import EngineCall, ResumableEngine
from realsys.types import Ticket

STEP = 1000  # a fake server's k-th token after ``length`` input tokens is STEP + length + k


def generated(input_len, count, version, reason):
    """Tokens that say where in the sequence they were sampled, log-probs that say by which version."""
    tokens = np.arange(STEP + input_len, STEP + input_len + count, dtype=np.int32)
    return Completion(tokens, np.full(count, -0.5 - version, np.float32), np.full(count, version, np.int32), reason)


@dataclass
class Request:
    """One request a server got."""

    url: str
    input_ids: list[int]
    spec: SamplingSpec
    rid: str
    seed: int


@dataclass
class FakeServers:
    """``script`` is consumed one entry per request: what to answer, or what to raise.

    ``arrived``: tokens of each completion that arrive before an error. ``working``: what a server says of itself.
    """

    script: list[object]
    calls: list[Request] = field(default_factory=list)
    arrived: int = 0
    working: bool = False
    asked: list[str] = field(default_factory=list)

    async def works(self, url):
        self.asked.append(url)
        return self.working

    async def generate(self, url, input_ids, spec, *, rid, seed, received=None):
        self.calls.append(Request(url, list(input_ids), spec, rid, seed))
        await asyncio.sleep(0)
        step = self.script.pop(0)
        if isinstance(step, Exception):
            if received is not None:
                received.completions = [generated(len(input_ids), self.arrived, 0, "abort") for _ in range(spec.n)]
            raise step
        assert isinstance(step, list)
        return [answer if isinstance(answer, Completion) else generated(len(input_ids), *answer) for answer in step]


@dataclass
class FakeScheduler:
    """Names servers a, b, c, ... in turn; raises what ``error`` says."""

    requests: list[ScheduleRequest] = field(default_factory=list)
    error: Exception | None = None

    async def schedule(self, request):
        if self.error is not None:
            raise self.error
        name = chr(ord("a") + len(self.requests) % 26)
        self.requests.append(request)
        return ScheduleReply(name, f"http://{name}", 0)


PROMPT = [5, 6, 7]


def ticket(n=1, **fields):
    return Ticket("17", 2, prompt_index=0, n=n, seed=400, **fields)


def dead(url="http://a"):
    return ServerFailed(f"{url}/generate: connection failed")


def run(script, n=1, max_new=20, min_new=0, chunk=0, scheduler=None, on_tokens=None, grammar="", **server):
    servers, scheduler = FakeServers(list(script), **server), scheduler or FakeScheduler()
    manager = ResumableEngine(scheduler, servers)
    bounds = {"max_new_tokens": max_new, "min_new_tokens": min_new, "new_tokens_per_chunk": chunk}
    spec = SamplingSpec(**bounds, n=n, structural_tag=grammar)

    async def body():
        async with asyncio.timeout(60):
            return await manager.generate(EngineCall(ticket(n), "0.0", PROMPT, spec, 400, on_tokens=on_tokens))

    return asyncio.run(body()), servers, scheduler


def test_all_answers_are_asked_for_in_one_request():
    answers, servers, scheduler = run([[(4, 3, "stop"), (6, 3, "length")]], n=2)
    (call,) = servers.calls
    assert (call.input_ids, call.spec.n, call.seed, call.rid) == (PROMPT, 2, 400, "17.2.0.0.0")
    assert [len(a.tokens) for a in answers] == [4, 6]
    assert [a.finish_reason for a in answers] == ["stop", "length"]
    (request,) = scheduler.requests
    assert (request.ticket_id, request.attempt, request.n, request.failed_server) == ("17", 2, 2, None)
    assert (request.call, request.previous, request.released) == ("0.0", None, [])
    assert (request.prompt_len, request.max_new_tokens) == (3, 20)


def test_aborted_completion_continues_from_its_tokens():
    """The continuation has the rest of the token budget."""
    answers, servers, scheduler = run(
        [[(4, 3, "abort"), (2, 3, "stop")], [(5, 4, "abort")], [(1, 6, "stop")]], n=2, min_new=7
    )
    first = answers[0]
    # Positions count on through the segments: what was given back was exactly prompt + tokens so far.
    assert first.tokens.tolist() == [STEP + 3 + k for k in range(10)]
    assert first.versions.tolist() == [3] * 4 + [4] * 5 + [6]
    assert first.logprobs.tolist() == [-3.5] * 4 + [-4.5] * 5 + [-6.5]
    assert (first.tokens.dtype, first.logprobs.dtype, first.versions.dtype) == (np.int32, np.float32, np.int32)
    assert first.finish_reason == "stop"
    assert first.route == (("a", 4), ("b", 5), ("c", 1))
    assert answers[1].tokens.tolist() == [STEP + 3, STEP + 4]
    assert servers.calls[1].input_ids == PROMPT + first.tokens[:4].tolist()
    assert servers.calls[2].input_ids == PROMPT + first.tokens[:9].tolist()
    assert [call.spec.max_new_tokens for call in servers.calls] == [20, 16, 11]
    assert [call.spec.min_new_tokens for call in servers.calls] == [7, 3, 0]
    assert [call.spec.n for call in servers.calls] == [2, 1, 1]
    assert [call.spec.answer_prefix for call in servers.calls] == [0, 4, 9]  # penalties and stop strings see them
    assert [call.spec.priority for call in servers.calls] == [0, CONTINUES, CONTINUES]
    assert [call.url for call in servers.calls] == ["http://a", "http://b", "http://c"]
    assert [request.n for request in scheduler.requests] == [2, 1, 1]
    assert scheduler.requests[2].prompt_len == 12 and scheduler.requests[2].failed_server is None


def test_tokens_of_all_segments_are_told_once():
    """Also those that had arrived from a server that failed."""
    told = {0: [], 1: []}
    answers, _, _ = run(
        [[(4, 3, "abort"), (2, 3, "stop")], dead(), [(1, 6, "stop")]],
        n=2,
        arrived=3,
        on_tokens=lambda number, tokens: told[number].extend(tokens),
    )
    assert [len(answer.tokens) for answer in answers] == [8, 2]
    assert [told[0], told[1]] == [answer.tokens.tolist() for answer in answers]


def test_completion_with_a_grammar_begins_again():
    """Its first part is discarded: the grammar of a request begins with the first token. The other one has ended."""
    script = [[(4, 3, "abort"), (2, 3, "stop")], [(5, 4, "abort")], [(6, 5, "stop")]]
    answers, servers, _ = run(script, n=2, chunk=3, grammar="{}")
    assert [answer.segments for answer in answers] == [[(5, 6)], [(3, 2)]]
    assert answers[0].tokens.tolist() == [STEP + 3 + k for k in range(6)] and answers[0].route == (("c", 6),)
    assert [(call.input_ids, call.spec.max_new_tokens) for call in servers.calls] == [(PROMPT, 20)] * 3
    assert [call.spec.answer_prefix for call in servers.calls] == [0, 0, 0]


def test_completion_with_a_grammar_does_not_begin_again_for_ever(monkeypatch):
    monkeypatch.setattr(resumable_engine, "LAST_DELAY_S", resumable_engine.FIRST_DELAY_S)
    with pytest.raises(GenerationError, match="21 trips without a token"):
        run([[(4, 3, "abort")]] * 40, grammar="{}")


@dataclass
class PinScheduler(FakeScheduler):
    """Names the policy and the version of each place in turn."""

    places: list[tuple[str, int]] = field(default_factory=list)

    async def schedule(self, request):
        place = await super().schedule(request)
        place.policy, place.version = self.places[len(self.requests) - 1]
        return place


def mixed(*versions):
    """A completion whose tokens are of these versions, as an update leaves it."""
    parts = [generated(len(PROMPT) + place, 1, version, "stop") for place, version in enumerate(versions)]
    return Completion.joined(parts)


def test_pinned_completion_is_cut_where_its_server_left_the_version():
    scheduler = PinScheduler(places=[("old", 3), ("old", 3)])
    [completion], servers, _ = run([[mixed(3, 3, 4, 4)], [(1, 3, "stop")]], scheduler=scheduler)
    assert completion.versions.tolist() == [3, 3, 3] and completion.policy == "old" and not completion.trainable
    assert servers.calls[1].input_ids == PROMPT + completion.tokens[:2].tolist()


def test_completion_of_a_pin_that_moved_begins_again():
    scheduler = PinScheduler(places=[("old", 3), ("old", 7)])
    [completion], servers, _ = run([[(2, 3, "abort")], [(4, 7, "stop")]], scheduler=scheduler)
    assert completion.versions.tolist() == [7] * 4 and servers.calls[1].input_ids == PROMPT


def test_train_completion_is_cut_where_its_server_went_back_to_a_pin():
    scheduler = PinScheduler(places=[("", 5), ("", 5)])
    [completion], _, _ = run([[mixed(5, 6, 2)], [(1, 5, "stop")]], scheduler=scheduler)
    assert completion.versions.tolist() == [5, 6, 5] and completion.trainable


def test_stream_with_a_grammar_fails_when_it_is_interrupted():
    """Its reader has the first tokens already."""
    with pytest.raises(GenerationError, match="interrupted after 4 tokens: repeat the request") as refused:
        run([[(4, 3, "abort")]], grammar="{}", on_tokens=lambda number, tokens: None)
    assert refused.value.retryable


def test_joined_segments_keep_kv_versions_and_top_logprobs():
    """A segment without versions of keys attended to keys of its own version."""
    parts = [
        dataclasses.replace(generated(3, 2, 4, "abort"), kv_versions=np.array([3, 4], np.int32), top=[[(1, -0.5)]] * 2),
        dataclasses.replace(generated(5, 0, 5, "abort"), top=None),
        dataclasses.replace(generated(5, 1, 5, "stop"), top=[[(2, -0.25)]]),
    ]
    (answer,), _, _ = run([[part] for part in parts])
    assert answer.kv_versions.tolist() == [3, 4, 5]
    assert answer.top == [[(1, -0.5)], [(1, -0.5)], [(2, -0.25)]]
    (plain,), _, _ = run([[dataclasses.replace(part, kv_versions=None, top=None)] for part in parts])
    assert plain.kv_versions is None and plain.top is None
    (only,), _, _ = run([[dataclasses.replace(parts[0], finish_reason="stop")]])
    assert (only.kv_versions.tolist(), only.top, only.route) == ([3, 4], parts[0].top, (("a", 2),))


def test_segments_are_sampled_with_different_random_numbers():
    _, servers, _ = run(
        [[(4, 0, "abort"), (4, 0, "abort")], [(1, 1, "abort")], [(1, 1, "stop")], [(1, 2, "stop")]], n=2
    )
    seeds = [call.seed for call in servers.calls]
    assert len(set(seeds)) == 4 and all(0 <= seed < 2**31 for seed in seeds)
    assert seeds == [
        call.seed
        for call in run(
            [[(4, 0, "abort"), (4, 0, "abort")], [(1, 1, "abort")], [(1, 1, "stop")], [(1, 2, "stop")]], n=2
        )[1].calls
    ]


def test_dead_server_is_reported_and_request_moves():
    answers, servers, scheduler = run([dead(), [(3, 1, "stop"), (3, 1, "stop")]], n=2)
    assert [len(a.tokens) for a in answers] == [3, 3]
    assert [call.url for call in servers.calls] == ["http://a", "http://b"]
    assert servers.calls[1].spec.n == 2 and servers.calls[1].seed == 400
    assert (scheduler.requests[1].failed_server, scheduler.requests[1].failure) == (
        "a",
        "http://a/generate: connection failed",
    )


def test_server_death_loses_only_its_own_segment():
    script = [[(4, 3, "abort"), (4, 3, "abort")], dead("http://b"), [(2, 4, "stop")], [(3, 4, "stop")]]
    answers, _, scheduler = run(script, n=2)
    assert sorted(len(a.tokens) for a in answers) == [6, 7]
    for answer in answers:
        assert answer.tokens.tolist() == [STEP + 3 + k for k in range(len(answer.tokens))]
        assert answer.versions.tolist()[:4] == [3] * 4
    assert scheduler.requests[2].failed_server == "b" and scheduler.requests[2].n == 1


@pytest.mark.parametrize(
    ("error", "working", "asked", "failed", "avoided"),
    [
        (ServerBusy("queue full"), False, [], None, "a"),
        (ServerSilent("no progress"), True, ["http://a"], None, "a"),
        (ServerSilent("no progress"), False, ["http://a"], "a", None),
        (ServerFailed("connection failed"), True, [], "a", None),
    ],
)
def test_only_evidence_is_reported(error, working, asked, failed, avoided, monkeypatch):
    """A full queue is no evidence against a server, and neither is silence while it works."""
    monkeypatch.setattr(resumable_engine, "FIRST_DELAY_S", 0.001)
    answers, servers, scheduler = run([error, [(3, 1, "stop")]], working=working)
    assert len(answers[0].tokens) == 3 and servers.asked == asked
    assert (scheduler.requests[1].failed_server, scheduler.requests[1].avoid) == (failed, avoided)


def test_busy_servers_are_waited_for(monkeypatch):
    """Many more refusals than failures are allowed, and no token that was sampled before is lost."""
    monkeypatch.setattr(resumable_engine, "FIRST_DELAY_S", 0.0)
    monkeypatch.setattr(resumable_engine, "LAST_DELAY_S", 0.0)
    answers, _, scheduler = run([[(4, 1, "abort")], *[ServerBusy("queue full")] * 500, [(3, 2, "stop")]])
    assert answers[0].versions.tolist() == [1] * 4 + [2] * 3
    assert not any(request.failed_server for request in scheduler.requests)


@pytest.mark.parametrize(
    ("limit", "most", "script", "problem"),
    [
        ("MAX_BUSY", 2, [ServerBusy("queue full")], "3 trips without a token in 3 trips; last: queue full"),
        ("MAX_FAILURES", 2, [dead()], "ticket 17: cancelled after 3 failures .*connection failed"),
        ("MAX_STALLED", 3, [[(0, 0, "abort")]], "4 trips without a token"),
    ],
)
def test_trips_without_a_token_are_bounded(monkeypatch, limit, most, script, problem):
    """Of servers that are busy, that fail, and that only abort."""
    monkeypatch.setattr(resumable_engine, limit, most)
    monkeypatch.setattr(resumable_engine, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(resumable_engine, "LAST_DELAY_S", 0.001)
    with pytest.raises(GenerationError, match=problem):
        run(script * 10)


def test_tokens_that_arrived_outlive_their_server():
    answers, servers, scheduler = run([dead(), [(3, 1, "stop")], [(2, 1, "stop")]], n=2, arrived=5)
    assert [answer.versions.tolist() for answer in answers] == [[0] * 5 + [1] * 3, [0] * 5 + [1] * 2]
    assert [answer.tokens.tolist() for answer in answers] == [[STEP + 3 + k for k in range(n)] for n in (8, 7)]
    assert [len(call.input_ids) for call in servers.calls] == [3, 8, 8]
    assert scheduler.requests[1].failed_server == "a"


def test_request_rejected_by_server_is_not_repeated():
    with pytest.raises(GenerationError, match="too long"):
        run([GenerationError("status 400: too long")])


def test_completions_without_tokens_start_over():
    answers, servers, _ = run([[(0, 0, "abort"), (2, 0, "stop")], [(3, 1, "stop")]], n=2)
    assert [len(a.tokens) for a in answers] == [3, 2]
    assert (servers.calls[1].input_ids, servers.calls[1].seed) == (PROMPT, 400)


def test_abort_on_last_budget_token_is_end():
    answers, servers, _ = run([[(20, 0, "abort")]])
    assert answers[0].finish_reason == "length" and len(servers.calls) == 1


def test_completion_in_segments_equals_completion_in_one():
    script = [[(6, 3, "length"), (2, 3, "stop")], [(6, 3, "length")], [(6, 4, "length")], [(2, 4, "length")]]
    answers, servers, scheduler = run(script, n=2, chunk=6)
    assert [call.spec.max_new_tokens for call in servers.calls] == [6, 6, 6, 2]
    assert [len(call.input_ids) for call in servers.calls] == [3, 9, 15, 21]
    long, short = answers
    assert long.tokens.tolist() == [STEP + 3 + k for k in range(20)]
    assert long.versions.tolist() == [3] * 12 + [4] * 8
    assert (long.finish_reason, short.finish_reason) == ("length", "stop")
    # The manager reserves for all that may come, whatever the piece.
    assert [request.max_new_tokens for request in scheduler.requests] == [20, 14, 8, 2]
    assert not any(request.failed_server for request in scheduler.requests)


def test_min_new_tokens_holds_across_pieces():
    _, servers, _ = run([[(4, 0, "length")], [(4, 0, "length")], [(1, 0, "stop")]], min_new=6, chunk=4)
    assert [call.spec.min_new_tokens for call in servers.calls] == [4, 2, 0]


def test_completion_that_fills_the_context_ends():
    """The context is full before the segment is."""
    answers, servers, _ = run([[(5, 0, "length")]], chunk=8)
    assert (answers[0].finish_reason, len(answers[0].tokens), len(servers.calls)) == ("length", 5, 1)


def test_a_superseded_attempt_stops_at_once():
    with pytest.raises(RolloutSuperseded):
        run([], scheduler=FakeScheduler(error=RolloutSuperseded("attempt 2 is not running")))


def test_ended_calls_are_named_in_next_request():
    async def body():
        servers, scheduler = FakeServers([[(1, 0, "stop")]] * 5), FakeScheduler()
        manager, spec = ResumableEngine(scheduler, servers), SamplingSpec(max_new_tokens=5)
        for name in ("0.0", "1.0", "0.1"):
            await manager.generate(EngineCall(ticket(), name, PROMPT, spec, 1, ("a", 3)))
        manager.discard(ticket())
        await manager.generate(EngineCall(Ticket("18", 0, 0), "0.0", PROMPT, spec, 1))
        assert [request.released for request in scheduler.requests] == [[], [("17", 2, "0.0")], [("17", 2, "1.0")], []]
        assert [request.previous for request in scheduler.requests] == [("a", 3)] * 3 + [None]
        assert [call.spec.priority for call in servers.calls] == [CONTINUES] * 3 + [0]
        assert len({call.rid for call in servers.calls}) == 4

    asyncio.run(body())


def test_request_names_bounded_number_of_ended_calls(monkeypatch):
    monkeypatch.setattr(resumable_engine, "MOST_RELEASED", 2)

    async def body():
        servers, scheduler = FakeServers([[(1, 0, "stop")]] * 7), FakeScheduler()
        manager, spec = ResumableEngine(scheduler, servers), SamplingSpec(max_new_tokens=5)
        calls = [EngineCall(ticket(), f"{k}.0", PROMPT, spec, k) for k in range(7)]
        await asyncio.gather(*(manager.generate(call) for call in calls[:5]))
        for call in calls[5:]:
            await manager.generate(call)
        assert [len(request.released) for request in scheduler.requests[5:]] == [2, 2]

    asyncio.run(body())


def test_an_answer_is_delivered_while_others_go_on():
    async def body():
        script = [[(4, 3, "abort"), (2, 3, "stop")], [(2, 4, "stop")]]
        servers, delivered = FakeServers(list(script)), []
        manager = ResumableEngine(FakeScheduler(), servers)
        call = EngineCall(ticket(2), "0.0", PROMPT, SamplingSpec(max_new_tokens=20, n=2), 400)
        answers = await manager.generate(call, lambda k, a: delivered.append((k, len(a.tokens), len(servers.calls))))
        assert delivered == [(1, 2, 1), (0, 6, 2)] and [len(a.tokens) for a in answers] == [6, 2]

    asyncio.run(body())


def test_continuation_draws_same_numbers_whatever_was_merged():
    def seeds(n, seed, script):
        servers = FakeServers(list(script))
        manager = ResumableEngine(FakeScheduler(), servers)
        call = EngineCall(ticket(n), "0.0", PROMPT, SamplingSpec(max_new_tokens=20, n=n), seed)
        asyncio.run(manager.generate(call))
        return [call.seed for call in servers.calls]

    together = seeds(2, 400, [[(2, 0, "stop"), (4, 0, "abort")], [(1, 0, "stop")]])
    alone = seeds(1, 401, [[(4, 0, "abort")], [(1, 0, "stop")]])
    assert together[1] == alone[1]


class Streams(FakeServers):
    """A server that sends the lines of ``script`` and then holds its reply."""

    def __init__(self, *lines):
        super().__init__(list(lines))
        self.sent = asyncio.Event()

    async def generate(self, url, input_ids, spec, *, rid, seed, received):
        for line in self.script:
            received.take(line)
        self.sent.set()
        await asyncio.Event().wait()


def progress(*parts):
    """A line with (completion, first token, tokens, finish reason) parts."""
    return msgspec.json.encode(
        ProgressLine(
            [ProgressPart(k, at, [9] * n, [-1.0] * n, [("3", n)] if n else [], finish) for k, at, n, finish in parts]
        )
    )


def test_ended_completion_does_not_wait_for_its_request():
    """When the call is cancelled, the tokens so far of the others are handed over, too."""

    async def body():
        servers = Streams(progress((0, 0, 2, None), (1, 0, 2, "stop")), progress((0, 2, 1, None)))
        delivered = []
        manager = ResumableEngine(FakeScheduler(), servers)
        call = EngineCall(ticket(3), "0.0", PROMPT, SamplingSpec(max_new_tokens=20, n=3), 400)
        task = asyncio.create_task(
            manager.generate(call, lambda k, one: delivered.append((k, len(one.tokens), one.finish_reason)))
        )
        await servers.sent.wait()
        assert delivered == [(1, 2, "stop")]
        task.cancel()
        await asyncio.wait({task})
        assert delivered == [(1, 2, "stop"), (0, 3, "abort")], "the third has no token"

    asyncio.run(asyncio.wait_for(body(), 60))
