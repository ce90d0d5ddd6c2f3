"""The agent distill against teachers on loopback: a token has the teacher's score, or the episode has an error."""

import asyncio

import numpy as np
import pytest

from realsys.config.compose import compose
from realsys.config.machine import Machine
from realsys.config.rules import check
from realsys.data.arith import write_char_tokenizer
from realsys.data.prompts import Prompt
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import ConfigError, DataError, RewardError, StuckError
from realsys.generation.completion import Completion
from realsys.model_files.architecture import EOS_ID
from realsys.rollout import agents
from realsys.rollout.agents import distill
from realsys.rollout.environments import Judgement, Task
from realsys.types import Ticket
from tests.support.rewards.teacher_endpoint import teacher_endpoint

ARGS = "rollout.agent_args"
BASE = ["experiment=arith", "algorithm=distill_endpoint", f"{ARGS}.outage_s=0"]
CPU = Machine(cpus=8, memory_bytes=64 << 30)


class Right:
    """An environment: every response is right."""

    async def judge(self, task, response):
        return Judgement(7.0, True, {"judged": 1.0})


class OneText:
    """A session whose completions have a text, with rising log-probs."""

    def __init__(self, tokenizer, text="3+4"):
        self.tokens = np.array([*tokenizer.encode_text(text), EOS_ID], np.int32)

    async def generate(self, token_ids):
        count = len(self.tokens)
        logprobs = np.linspace(-3, -1, count, dtype=np.float32)
        return Completion(self.tokens, logprobs, np.ones(count, np.int32), "stop")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("char")
    write_char_tokenizer(folder)
    return TextTokenizer(folder)


@pytest.fixture
def teacher():
    with teacher_endpoint() as started:
        yield started


def played(tokenizer, *overrides, rows=({},), kind="train"):
    """Play a prompt of each row, one after the other; return episodes and errors."""

    async def play():
        agent = agents.build(compose([*BASE, *overrides]), tokenizer, Right())
        ends = []
        try:
            for number, row in enumerate(rows):
                prompt = Prompt("a1b2=", "3", tokenizer.encode_prompt("a1b2=", chat=False), dict(row))
                task = Task(prompt, Ticket("1", 0, number, kind=kind))
                ends += await asyncio.gather(agent.run(task, OneText(tokenizer)), return_exceptions=True)
        finally:
            await agent.close()
        return ends

    return asyncio.run(asyncio.wait_for(play(), 60))


def at(teacher, path="/v1", name="only"):
    return f"{ARGS}.teachers.{name}={teacher.url}{path}"


@pytest.mark.parametrize("path", ["/v1", "/generate"])
def test_reward_of_a_token_is_the_log_ratio(tokenizer, teacher, path):
    (episode,) = played(tokenizer, at(teacher, path))
    (row,) = episode.rows
    prompt = len(row.tokens) - row.loss_tokens
    places = range(prompt, len(row.tokens))
    expected = [teacher.score(place, int(row.tokens[place])) - row.logprobs[place - prompt] for place in places]
    assert [place for place, _ in row.rewards] == list(places)
    assert [reward for _, reward in row.rewards] == pytest.approx(expected, abs=1e-6)
    assert (episode.reward, episode.correct, episode.metrics["judged"]) == (0.0, True, 1.0)
    assert episode.metrics["teacher_kl"] == pytest.approx(-np.mean(expected), abs=1e-6)
    (body,) = teacher.bodies
    assert body.get("prompt", body.get("input_ids")) == row.tokens.tolist()


@pytest.mark.parametrize("path", ["/v1", "/generate"])
def test_row_has_the_teachers_top_tokens(tokenizer, teacher, path):
    """vLLM sends the sampled token besides them. The rewards of tokens are not trained, so the row has none."""
    settings = ["algorithm=distill_topk_endpoint", "train.ppo.loss_args.top_k=4", f"{ARGS}.outage_s=0"]
    teacher.score = lambda place, token: -7.0
    (episode,) = played(tokenizer, *settings, at(teacher, path))
    (row,) = episode.rows
    tokens, logprobs = row.teacher
    assert (tokens.dtype, logprobs.dtype, tokens.shape) == (np.int32, np.float32, (row.loss_tokens, 4))
    scored = {token: -0.7 * (token + 1) for token in range(4)}
    for sampled, own, values in zip(row.tokens[-row.loss_tokens :].tolist(), tokens, logprobs, strict=True):
        known = scored if path == "/generate" else scored | {sampled: -7.0}
        best = sorted(known, key=lambda token: known[token], reverse=True)[:4]
        assert own.tolist() == best and values.tolist() == pytest.approx([known[token] for token in best])
    assert row.rewards == () and episode.metrics["teacher_kl"] != 0
    teacher.most = 2
    (stuck,) = played(tokenizer, *settings, at(teacher, path))
    assert isinstance(stuck, StuckError) and "tokens at a place, and train.ppo.loss_args.top_k asks for 4" in str(stuck)


def test_last_token_of_sglangs_vocabulary_has_its_score(tokenizer, teacher):
    """SGLang reports it as token 0, whose text is another one."""
    teacher.last, teacher.text = EOS_ID, lambda token: tokenizer.decode([token])
    (episode,) = played(tokenizer, at(teacher, "/generate"))
    assert episode.rows[0].tokens[-1] == EOS_ID and len(episode.rows[0].rewards) == episode.rows[0].loss_tokens


def test_hopeless_token_has_a_bounded_reward(tokenizer, teacher):
    """vLLM writes -9999 for a log-prob that is not finite."""
    teacher.score = lambda place, token: -9999.0
    (episode,) = played(tokenizer, at(teacher))
    assert {reward for _, reward in episode.rows[0].rewards} == {-20.0}


def test_evaluation_asks_no_teacher(tokenizer, teacher):
    (episode,) = played(tokenizer, at(teacher), kind="eval")
    assert (episode.reward, episode.rows[0].rewards, teacher.bodies) == (7.0, (), [])


def test_key_and_model_are_sent(tokenizer, teacher, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "sk-teacher")
    played(tokenizer, at(teacher), f"{ARGS}.api_key_env=TEACHER_KEY", f"{ARGS}.models.only=big")
    assert teacher.keys == ["Bearer sk-teacher"] and teacher.bodies[0]["model"] == "big"
    teacher.always = "401"
    (error,) = played(tokenizer, at(teacher), f"{ARGS}.api_key_env=TEACHER_KEY")
    assert isinstance(error, StuckError) and "wrong key ***" in str(error)


def test_row_chooses_its_teacher(tokenizer, teacher):
    with teacher_endpoint(score=lambda place, token: -5.0) as other:
        rows = [{"teacher": "b"}, {"teacher": "a"}, {}, {"teacher": "c"}]
        found = played(tokenizer, at(teacher, name="a"), at(other, "/generate", "b"), rows=rows)
    assert len(teacher.bodies) == len(other.bodies) == 1
    assert "teacher_kl/b" in found[0].metrics and "teacher_kl/a" in found[1].metrics
    for error, problem in zip(found[2:], ("has no key", "has 'c' under the key"), strict=True):
        assert isinstance(error, DataError) and problem in str(error)
    assert "prompt 2 of train" in str(found[2]) and "one of a, b (rollout.agent_args.teachers)" in str(found[2])


@pytest.mark.parametrize("path", ["/v1", "/generate"])
@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("503", "status 503: overloaded"),
        ("400", "out of vocabulary"),
        ("html", "no scores of the prompt"),
        ("none", "no scores of the prompt"),
        ("empty", ""),
        ("huge", "over the limit"),
        ("few", "it sent "),
        ("nan", "must be a finite number"),
        ("positive", "must be a finite number"),
    ],
)
def test_answer_without_all_scores_is_the_error_of_its_episode(tokenizer, teacher, path, fault, problem):
    """After an answer it leaves the loss (RewardError); a teacher that has never answered ends the run."""
    settings = [at(teacher, path)]
    teacher.faults = ["", fault, ""]
    good, failed, again = played(tokenizer, *settings, rows=[{}, {}, {}])
    assert good.rows[0].rewards == again.rows[0].rewards and isinstance(failed, RewardError)
    assert "teacher only (http://127.0.0.1" in str(failed) and problem in str(failed)
    teacher.always = fault
    (stuck,) = played(tokenizer, *settings)
    assert isinstance(stuck, StuckError) and "correct rollout.agent_args, or the endpoint" in str(stuck)


def test_busy_teacher_is_asked_again(tokenizer, teacher, monkeypatch):
    monkeypatch.setattr(distill, "FIRST_DELAY_S", 0.01)
    teacher.faults = ["503", "503", "503"]
    (episode,) = played(tokenizer, at(teacher), f"{ARGS}.outage_s=60")
    assert len(teacher.bodies) == 4 and episode.rows[0].rewards


def test_teacher_that_does_not_answer_has_a_time_limit(tokenizer, teacher):
    teacher.always = "hang"
    (error,) = played(tokenizer, at(teacher), f"{ARGS}.timeout_s=0.1")
    assert isinstance(error, StuckError) and "no answer within 0.1 s" in str(error)


def test_many_completions_without_scores_end_the_run(tokenizer, teacher, monkeypatch):
    monkeypatch.setattr(distill, "HOPELESS", 3)
    teacher.faults = ["", "400", "400", "", "400", "400", "400"]
    errors = played(tokenizer, at(teacher), rows=[{}] * 7)
    assert [type(error) for error in errors if isinstance(error, Exception)] == [RewardError] * 4 + [StuckError]
    assert "3 completions in a row had no scores" in str(errors[-1])


def test_teacher_with_another_vocabulary_ends_the_run(tokenizer, teacher):
    teacher.text = lambda token: tokenizer.decode([token])
    (good,) = played(tokenizer, at(teacher))
    assert good.rows[0].rewards
    teacher.text = lambda token: "\ufffd" if token == EOS_ID else tokenizer.decode([token + 1])
    (error,) = played(tokenizer, at(teacher))
    assert isinstance(error, StuckError) and "another vocabulary: token" in str(error)
    assert "the student's tokenizer" in str(error)


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ([], f"{ARGS}.teachers"),
        ([f"{ARGS}.teachers={{}}"], f"{ARGS}.teachers"),
        ([f"{ARGS}.teachers.a=localhost"], f"{ARGS}.teachers.a"),
        ([f"{ARGS}.teachers.a=http://h/v1", f"{ARGS}.models.b=big"], f"{ARGS}.models"),
        ([f"{ARGS}.teachers.a=http://h/v1", f"{ARGS}.api_key_env=REALSYS_NO_SUCH"], f"{ARGS}.api_key_env"),
        ([f"{ARGS}.teachers.a=http://h/v1", f"{ARGS}.patience=3"], f"{ARGS}.patience"),
        ([f"{ARGS}.teachers.a=http://h/v1", "train.ppo.turn_rewards=false"], "train.ppo.turn_rewards"),
        ([f"{ARGS}.teachers.a=http://h/v1", "generation.sampling.temperature=0.7"], "generation.sampling.temperature"),
    ],
)
def test_wrong_arguments_are_refused_before_the_start(tokenizer, overrides, field):
    with pytest.raises(ConfigError) as refused:
        agents.check(compose([*BASE, *overrides]), tokenizer)
    assert refused.value.field == field


def test_role_without_a_teacher_is_refused():
    with pytest.raises(ConfigError, match="leaves the KL to this model as the only reward") as refused:
        check(compose(["experiment=arith", "algorithm=distill"]), CPU)
    assert refused.value.field == "roles.ref.path"
