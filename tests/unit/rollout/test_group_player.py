"""Episodes of a ticket: merged first calls, ids and seeds of calls, episodes that fail alone, defects of agents."""

import asyncio
import contextlib
import logging

import pytest

from realsys.cluster.stream.codec import decode_group, encode_group
from realsys.data.prompts import Prompt
from realsys.errors import AgentError, GenerationError, NoVerifierError, RealsysError, RewardError, StuckError
from realsys.generation.client import SamplingSpec
from realsys.manager.client import RolloutSuperseded
from realsys.rollout.episodes import RowBuilder
from realsys.rollout.group_player import MOST_FAILED, GroupPlayer, GroupRules, group_player, group_rules
from realsys.types import Episode, Group, Ticket
from tests.support.processes.config_trees import changed
from tests.support.serving.rollout_fakes import FakeEngine, ScriptedAgent

PROMPT = Prompt("a1=", "1", [2, 10, 4])
SPEC = SamplingSpec(max_new_tokens=9)


def player(agent, engine, min_episodes=0):
    return GroupPlayer(agent, engine, SPEC, 1000, GroupRules(min_episodes))


def play(agent, engine, n=4, min_episodes=0):
    async def body():
        async with asyncio.timeout(60):
            return await player(agent, engine, min_episodes).play(Ticket("17", 2, 0, n=n, seed=400), PROMPT)

    return asyncio.run(body())


def sent(engine):
    return [(call.name, call.spec.n, call.seed) for call in engine.calls]


def test_first_calls_of_all_episodes_are_one_request():
    engine = FakeEngine()
    played = play(ScriptedAgent(), engine)
    assert sent(engine) == [("0.0", 4, 400)] and engine.calls[0].token_ids == PROMPT.ids
    assert [episode.rows[0].tokens[3] for episode in played.episodes] == [400, 401, 402, 403]
    assert engine.calls[0].rid == "17.2.0.0" and engine.forgotten == ["17"]
    assert played.errors == [] and set(played.extra) == {"generate_s", "reward_s"}


def test_evaluation_has_its_own_sampling():
    engine = FakeEngine()
    config = changed("generation.sampling.stop_token_ids=[7]", "evaluation.sampling={temperature: 0.5}")
    group = group_player(config, ScriptedAgent(), engine, [1])
    for kind in ("train", "eval"):
        asyncio.run(group.play(Ticket("t", 0, 0, kind=kind, n=2, set="eval" * (kind == "eval")), PROMPT))
    assert [(call.spec.temperature, call.spec.stop_token_ids) for call in engine.calls] == [
        (1.0, (1, 7)),
        (0.5, (1, 7)),
    ]


@pytest.mark.parametrize(("min_episodes", "failed"), [(3, 1), (0, 4)])
def test_tokens_of_failed_episodes_are_counted_once(min_episodes, failed):
    """If too few succeed, those of the whole group are lost."""
    group = player(ScriptedAgent(errors={1: ValueError("x")}), FakeEngine(), min_episodes)
    with contextlib.suppress(AgentError):
        asyncio.run(group.play(Ticket("17", 2, 0, n=4, seed=400), PROMPT))
    each = len(play(ScriptedAgent(), FakeEngine()).episodes[0].rows[0].logprobs)
    assert (group.take_lost_tokens(), group.take_lost_tokens()) == ({"failed": [each] * failed}, {})


def test_first_calls_with_different_tokens_stay_separate():
    engine = FakeEngine()
    played = play(ScriptedAgent(prompts={1: [5, 6]}), engine)
    assert sent(engine) == [("0.0", 1, 400), ("1.0", 1, 401), ("2.0", 2, 402)]
    sampled = [episode.rows[0].tokens[episode.rows[0].loss_mask][0] for episode in played.episodes]
    assert sampled == [400, 401, 402, 403], "the seeds of a ticket do not depend on what was merged"


def test_seeds_do_not_depend_on_request_time():
    class Late(ScriptedAgent):
        async def run(self, task, session):
            for _ in range(task.episode % 3):
                await asyncio.sleep(0)
            return await super().run(task, session)

    together, apart = FakeEngine(), FakeEngine()
    same = play(ScriptedAgent(calls=3), together)
    late = play(Late(calls=3), apart)
    assert len(sent(apart)) > len(sent(together))
    for one, other in zip(same.episodes, late.episodes, strict=True):
        assert one.rows[0].tokens.tolist() == other.rows[0].tokens.tolist()


def test_each_later_call_has_own_name_and_seed():
    engine = FakeEngine()
    play(ScriptedAgent(calls=5), engine, n=16)
    assert [n for _, n, _ in sent(engine)] == [16] + [1] * 64
    assert len({call.rid for call in engine.calls}) == 65
    seeds = [seed for _, _, seed in sent(engine)][1:] + list(range(400, 416))
    assert len(set(seeds)) == len(seeds)
    assert all(call.previous == ("a", 7) for call in engine.calls[1:]) and engine.calls[0].previous is None


def test_two_calls_of_one_episode_run_concurrently():
    class Drafts:
        async def run(self, task, session):
            drafts = await asyncio.gather(*(session.generate(task.prompt.ids) for _ in range(2)))
            assert drafts[0].tokens.tolist() != drafts[1].tokens.tolist()
            rows = [RowBuilder(task.prompt.ids) for _ in drafts]
            for row, draft in zip(rows, drafts, strict=True):
                row.completion(draft)
            return Episode([row.row() for row in rows], 1.0)

    engine = FakeEngine()
    played = play(Drafts(), engine, n=2)
    assert [(name, n) for name, n, _ in sorted(sent(engine))] == [("0.0", 2), ("0.1", 1), ("1.1", 1)]
    assert [len(episode.rows) for episode in played.episodes] == [2, 2]


def test_a_failed_episode_costs_only_itself():
    played = play(ScriptedAgent(errors={2: GenerationError("refused")}), FakeEngine(), min_episodes=3)
    assert [episode.reward for episode in played.episodes] == [0.0, 1.0, 3.0]
    assert played.errors == ["episode 2: GenerationError: refused"]


def test_episode_without_verdict_costs_only_itself():
    """Whatever min_episodes is: the others have their verdicts, and their tokens are not sampled again."""
    hung = {k: RewardError("verifier hung") for k in (1, 2)}
    played = play(ScriptedAgent(errors=hung), FakeEngine())
    assert [episode.reward for episode in played.episodes] == [0.0, 3.0]
    assert played.errors == [f"episode {k}: RewardError: verifier hung" for k in (1, 2)]


def test_missing_verdicts_do_not_excuse_other_failures():
    errors = {0: RewardError("verifier hung"), 1: GenerationError("refused")}
    with pytest.raises(GenerationError, match="refused"):
        play(ScriptedAgent(errors=errors), FakeEngine())
    assert len(play(ScriptedAgent(errors=errors), FakeEngine(), min_episodes=3).episodes) == 2


@pytest.mark.parametrize(("mean", "least"), [("group", 2), ("batch", 1)])
def test_group_needs_verdicts_to_compare(mean, least):
    """A verdict alone has the advantage 0 if it is compared with its group."""
    rules = group_rules(changed(f"train.ppo.advantage.mean={mean}", "train.ppo.advantage.std=batch"))
    hung = {k: RewardError("hung") for k in range(1, 4)}
    group = GroupPlayer(ScriptedAgent(errors=hung), FakeEngine(), SPEC, 1000, rules)
    assert rules.least == least
    if least == 1:
        assert len(asyncio.run(group.play(Ticket("t", 0, 0, n=4), PROMPT)).episodes) == 1
    else:
        with pytest.raises(RewardError, match="hung"):
            asyncio.run(group.play(Ticket("t", 0, 0, n=4), PROMPT))


def test_episodes_without_hope_are_cancelled():
    """No group can come of it any more, so no further token is sampled for it."""
    engine = FakeEngine(held={"1.0"})
    agent = ScriptedAgent(prompts={1: [5, 6]}, errors={0: GenerationError("refused")})
    with pytest.raises(GenerationError, match="refused"):
        play(agent, engine)
    assert engine.cancelled == ["1.0"] and engine.forgotten == ["17"]


def test_agent_exception_names_file_and_line(caplog):
    class Broken(ScriptedAgent):
        async def run(self, task, session):
            episode = await super().run(task, session)
            return episode if task.episode else {}["no such key"]

    agent = Broken()
    with caplog.at_level(logging.ERROR):
        played = play(agent, FakeEngine(), min_episodes=1)
    (error,) = played.errors
    assert error.startswith("episode 0: AgentError: KeyError: 'no such key' (") and "test_group_player.py:" in error
    assert len(played.episodes) == 3 and "Traceback" in caplog.text


def test_an_exception_is_logged_once(caplog):
    async def body():
        group = player(ScriptedAgent(errors={0: ValueError("no good")}), FakeEngine(), min_episodes=1)
        for number in range(3):
            await group.play(Ticket(str(number), 0, 0, n=2), PROMPT)

    asyncio.run(body())
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


def test_error_inside_exception_group_counts_as_itself():
    group = ExceptionGroup("of a TaskGroup", [ValueError("later"), ExceptionGroup("", [RewardError("hung")])])
    assert play(ScriptedAgent(errors={1: group}), FakeEngine()).errors == ["episode 1: RewardError: hung"]


def test_an_agent_that_cancels_itself_fails_its_episode():
    played = play(ScriptedAgent(errors={1: asyncio.CancelledError()}), FakeEngine(), min_episodes=1)
    assert len(played.episodes) == 3 and "cancelled by its own code" in played.errors[0]


class Stubborn(ScriptedAgent):
    """It goes on when its call is refused."""

    async def run(self, task, session):
        try:
            return await super().run(task, session)
        except Exception:
            return Episode([RowBuilder([1]).row()], 0.0)


class Returns:
    def __init__(self, result):
        self.result = result

    async def run(self, task, session):
        return self.result(session) if callable(self.result) else self.result


NO_VERIFIER = NoVerifierError("a verifier process cannot be started")
TOO_LONG = FakeEngine(errors={"0.0": GenerationError("status 400: too long")})
REPLACED = [FakeEngine(errors={"0.0": RolloutSuperseded("attempt 2 is not running")}) for _ in range(2)]


@pytest.mark.parametrize(
    ("agent", "engine", "error", "problem"),
    [
        (ScriptedAgent(errors={2: NO_VERIFIER}), FakeEngine(), NoVerifierError, "cannot be started"),
        (ScriptedAgent(), TOO_LONG, GenerationError, "too long"),
        (ScriptedAgent(), REPLACED[0], RolloutSuperseded, "attempt 2 is not running"),
        (Stubborn(), REPLACED[1], RolloutSuperseded, "attempt 2 is not running"),
        (Returns(None), FakeEngine(), AgentError, "run returned NoneType: it must return an Episode"),
        (Returns(Episode([], 1.0)), FakeEngine(), AgentError, "has no rows"),
        (Returns(lambda session: session.base_url), FakeEngine(), AgentError, "only a RolloutWorker has base_url"),
    ],
)
def test_failed_ticket_has_its_first_error(agent, engine, error, problem):
    with pytest.raises(error, match=problem):
        play(agent, engine)


def always(error):
    return ScriptedAgent(errors=dict.fromkeys(range(4), error))


def test_defect_in_all_episodes_twice_is_fatal():
    """It is fatal when every episode of two tickets in a row fails."""

    async def body():
        group = player(always(ZeroDivisionError("a defect")), FakeEngine())
        with pytest.raises(AgentError, match="ZeroDivisionError: a defect"):
            await group.play(Ticket("1", 0, 0, n=4), PROMPT)
        with pytest.raises(StuckError, match="two tickets in a row.*ZeroDivisionError: a defect"):
            await group.play(Ticket("2", 0, 0, n=4), PROMPT)

    asyncio.run(body())


def play_until_stuck(agent, n, tickets=MOST_FAILED, kind="train"):
    """Play tickets of ``n`` episodes. Returns the numbers of those that were played, and the message."""

    async def body():
        group = player(agent, FakeEngine())
        for number in range(tickets):
            agent.number = number
            try:
                await group.play(Ticket(str(number), 0, 0, kind=kind, n=n), PROMPT)
            except StuckError as error:
                return number + 1, str(error)
            except RealsysError:
                continue
        return tickets, ""

    return asyncio.run(body())


@pytest.mark.parametrize("n", [1, 4])
def test_agent_that_fails_all_episodes_is_fatal(n):
    """Tickets of one episode, and different errors in the episodes of a ticket."""
    errors = {episode: AgentError(f"it did not end within {episode} s") for episode in range(4)}
    played, problem = play_until_stuck(ScriptedAgent(errors=errors), n)
    assert played * n == MOST_FAILED
    assert problem.startswith(f"the agent failed {MOST_FAILED} episodes, and none was good; {MOST_FAILED // n} of them")
    assert problem.endswith("it did not end within 0 s")


def test_good_episode_or_evaluation_prevents_fatal_error():
    class OftenBad(ScriptedAgent):
        async def run(self, task, session):
            if self.number % 100 != 99:
                raise AgentError("bad")
            return await super().run(task, session)

    assert play_until_stuck(OftenBad(), 1, 4 * MOST_FAILED)[1] == ""
    assert play_until_stuck(always(AgentError("bad")), 1, 4 * MOST_FAILED, kind="eval")[1] == ""


@pytest.mark.parametrize("error", [RewardError("hung"), GenerationError("no server")])
def test_errors_that_are_no_defect_are_never_fatal(error):
    assert play_until_stuck(always(error), 4)[1] == ""


def test_good_ticket_between_bad_ones_prevents_fatal_error():
    async def body():
        agent = always(ZeroDivisionError("a defect"))
        group = player(agent, FakeEngine())
        for number in range(5):
            agent.errors = {} if number % 2 else dict.fromkeys(range(4), ZeroDivisionError("a defect"))
            try:
                await group.play(Ticket(str(number), 0, 0, n=4), PROMPT)
            except AgentError:
                assert not number % 2

    asyncio.run(body())


def test_call_after_end_of_episode_is_refused():
    class Leaks(ScriptedAgent):
        async def run(self, task, session):
            self.session = session
            return await super().run(task, session)

    async def body():
        agent = Leaks()
        await player(agent, FakeEngine()).play(Ticket("1", 0, 0, n=1), PROMPT)
        with pytest.raises(AgentError, match="after the end of the episode"):
            await agent.session.generate([1])

    asyncio.run(body())


def test_a_call_left_behind_is_cancelled():
    """``number`` of the call that run() does not wait for: the first one, or a later one."""

    class Leaves(ScriptedAgent):
        async def run(self, task, session):
            episode = await super().run(task, session)
            self.left = asyncio.create_task(session.generate(task.prompt.ids))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return episode

    async def body(calls, name):
        agent, engine = Leaves(calls=calls), FakeEngine(held={name})
        async with asyncio.timeout(60):
            await player(agent, engine).play(Ticket("1", 0, 0, n=1), PROMPT)
            await asyncio.wait({agent.left})
        assert agent.left.cancelled() and engine.cancelled == [name]

    for calls, name in ((0, "0.0"), (1, "0.1")):
        asyncio.run(body(calls, name))


def test_a_first_call_left_behind_is_never_sent():
    class Leaves:
        async def run(self, task, session):
            self.left = asyncio.ensure_future(session.generate(task.prompt.ids))
            await asyncio.sleep(0)  # the call waits for its siblings now
            return Episode([RowBuilder(task.prompt.ids).row()], 0.0)

    async def body():
        agent, engine = Leaves(), FakeEngine()
        await player(agent, engine).play(Ticket("1", 0, 0, n=1), PROMPT)
        await asyncio.wait({agent.left})
        assert agent.left.cancelled() and len(engine.calls) == len(engine.cancelled)

    asyncio.run(body())


def test_an_agent_that_exits_fails_its_episode():
    played = play(ScriptedAgent(errors={1: SystemExit(3)}), FakeEngine(), min_episodes=1)
    assert len(played.episodes) == 3 and "AgentError: SystemExit: 3" in played.errors[0]


def test_errors_of_episodes_can_always_be_sent():
    played = play(ScriptedAgent(errors={1: RewardError("\udc80 " + "x\n" * 5000)}), FakeEngine(), min_episodes=1)
    group = Group(Ticket("1", 0, 0), played.episodes, "rollout_worker/0", errors=played.errors)
    (error,) = decode_group([bytes(frame) for frame in encode_group(group)]).errors
    assert error.startswith("episode 1: RewardError: ? x x")


@pytest.mark.parametrize("patient", [0, 1])
def test_merged_call_ends_when_all_waiters_cancelled(patient):
    class Impatient(ScriptedAgent):
        async def run(self, task, session):
            if task.episode < patient:
                await asyncio.sleep(0)  # so that it asks in the same turn as the task below
                return await super().run(task, session)
            call = asyncio.create_task(session.generate(task.prompt.ids))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait({call})
            await asyncio.sleep(0)
            cancelled.append(list(engine.cancelled))
            engine.gate.set()
            raise RewardError("given up")

    engine, cancelled = FakeEngine(held={"0.0"}), []
    try:
        play(Impatient(), engine, n=2, min_episodes=1)
    except RewardError:
        assert not patient
    assert cancelled[-1] == ([] if patient else ["0.0"])


def test_unknown_correctness_is_refused_if_groups_are_filtered():
    """The master would find out only when the group is there, and could not go on."""

    rules = group_rules(changed("train.ppo.filter.min=0.1"))
    assert rules.filter.bounds_success and not group_rules(changed()).filter.bounds_success
    group = GroupPlayer(ScriptedAgent(), FakeEngine(), SPEC, 1000, rules)
    with pytest.raises(AgentError, match="correct is None, but train.ppo.filter needs it"):
        asyncio.run(group.play(Ticket("t", 0, 0, n=2), PROMPT))
    asyncio.run(group.play(Ticket("t", 0, 0, kind="eval", n=2), PROMPT))


class OwnSettings:
    """An agent whose odd episodes sample with other settings. It leaves its second completion out of the row."""

    def __init__(self, calls=1):
        self.calls = calls

    async def run(self, task, session):
        row = RowBuilder(task.prompt.ids)
        spec = SamplingSpec(max_new_tokens=3) if task.episode % 2 else None
        row.completion(await session.generate(row.tokens, spec))
        for _ in range(self.calls - 1):
            await session.generate(row.tokens)
        return Episode([row.row()], 1.0, True)


def test_first_calls_with_different_settings_stay_separate():
    engine = FakeEngine()
    play(OwnSettings(), engine, n=4)
    assert [(call.spec.n, call.spec.max_new_tokens) for call in engine.calls] == [(1, 9), (1, 3), (1, 9), (1, 3)]


def test_tokens_outside_of_rows_are_counted_as_lost():
    async def body():
        group = player(OwnSettings(calls=2), FakeEngine())
        await group.play(Ticket("17", 2, 0, n=2, seed=400), PROMPT)
        return group.take_lost_tokens()

    assert asyncio.run(body()) == {"not_in_rows": [3, 3]}
