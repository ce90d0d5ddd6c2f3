"""The agents single_turn and multi_turn, the user's example, and what the launcher checks of an agent."""

import asyncio
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from realsys.config.compose import compose
from realsys.config.machine import Machine
from realsys.config.rules import check
from realsys.config.trial_sizes import longest_sequence
from realsys.data.arith import write_char_tokenizer
from realsys.data.prompts import Prompt
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import ConfigError
from realsys.generation.completion import Completion
from realsys.model_files.architecture import EOS_ID
from realsys.rollout import agents
from realsys.rollout.environments import Judgement, Task
from realsys.types import Ticket

CPU = Machine(cpus=8, memory_bytes=64 << 30)
EXAMPLE = Path(__file__).parents[4] / "docs/examples/agent.py"
MULTI = ["experiment=arith", "rollout.agent=multi_turn"]
QWEN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)


class Texts:
    """An engine that answers with the texts of a script, each ended by the end of text unless it was cut off."""

    def __init__(self, tokenizer, texts, cut=()):
        self.tokenizer, self.texts, self.cut = tokenizer, texts, cut
        self.sent = []

    async def generate(self, token_ids):
        number = len(self.sent)
        self.sent.append(list(token_ids))
        ends = number in self.cut
        tokens = np.array(self.tokenizer.encode_text(self.texts[number]) + [EOS_ID] * (not ends), np.int32)
        ones = np.ones(len(tokens), np.int32)
        return Completion(tokens, -ones.astype(np.float32), ones, "length" if ends else "stop")


class Exact:
    """An environment: right if the text is the answer; a reward per turn; feedback and end as a test says."""

    def __init__(self, feedback=None, done=False, correct=True):
        self.feedback, self.done, self.correct = feedback, done, correct
        self.responses = []

    async def judge(self, task, response):
        self.responses.append(response)
        right = response.text == task.prompt.answer
        reward = 10.0 * right + len(self.responses)
        correct = right if self.correct else None
        return Judgement(reward, correct, {"judged": 1.0}, self.feedback, self.done)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("char")
    write_char_tokenizer(folder)
    return TextTokenizer(folder)


def with_template(folder, template):
    write_char_tokenizer(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return TextTokenizer(folder)


def play(overrides, tokenizer, texts, environment=None, cut=()):
    config = compose(overrides)
    environment = environment or Exact()
    session = Texts(tokenizer, texts, cut)
    prompt = Prompt("a1b2=", "3", tokenizer.encode_prompt("a1b2=", chat=config.data.chat_template))
    agent = agents.build(config, tokenizer, environment)
    episode = asyncio.run(agent.run(Task(prompt, Ticket("1", 0, 0)), session))
    return episode, session, environment


def test_single_turn_is_one_completion_with_its_judgement(tokenizer):
    episode, session, environment = play(["experiment=arith"], tokenizer, ["3"])
    (row,) = episode.rows
    assert tokenizer.decode(row.tokens) == "<bos>a1b2=3<eos>" and row.loss_tokens == 2
    assert (episode.reward, episode.correct, episode.metrics) == (11.0, True, {"judged": 1.0})
    (response,) = environment.responses
    assert (response.text, response.finish_reason, response.tokens, response.turn) == ("3", "stop", 2, 0)
    assert session.sent == [row.tokens[:6].tolist()]


def test_wrong_answer_gets_feedback_and_another_try(tokenizer):
    episode, session, environment = play(MULTI, tokenizer, ["2", "3"])
    (row,) = episode.rows
    assert tokenizer.decode(row.tokens) == "<bos>a1b2=2<eos>that is wrong; try again3<eos>"
    assert tokenizer.decode(row.tokens[row.loss_mask]) == "2<eos>3<eos>"
    assert session.sent[1] == row.tokens[:-2].tolist()
    assert (episode.reward, episode.correct) == (12.0, True)
    assert episode.metrics == {"judged": 1.0, "turns": 2.0, "correct_first": 0.0, "correct_last": 1.0}
    assert [response.turn for response in environment.responses] == [0, 1]


def test_feedback_may_repeat_the_prompt(tokenizer):
    episode, _, _ = play([*MULTI, "rollout.agent_args.feedback=' again {prompt}'"], tokenizer, ["2", "3"])
    assert tokenizer.decode(episode.rows[0].tokens) == "<bos>a1b2=2<eos> again a1b2=3<eos>"


def test_feedback_of_the_environment_goes_first(tokenizer):
    episode, _, _ = play(MULTI, tokenizer, ["2", "3"], Exact("no;"))
    assert tokenizer.decode(episode.rows[0].tokens) == "<bos>a1b2=2<eos>no;3<eos>"


@pytest.mark.parametrize(
    ("overrides", "texts", "environment", "cut", "turns"),
    [
        ([], ["3"], Exact(), (), 1),
        ([], ["1", "2"], Exact(), (), 2),
        (["rollout.agent_args.max_turns=3"], ["1", "2", "3"], Exact(), (), 3),
        (["rollout.agent_args.max_turns=1"], ["1"], Exact(), (), 1),
        ([], ["1"], Exact(done=True), (), 1),
        ([], ["1"], Exact(), (0,), 1),
        ([], ["1", "2"], Exact(), (1,), 2),
        ([], ["1"], Exact("a" * 300), (), 1),  # no room for the feedback and another completion
    ],
)
def test_turns_end_when_no_further_one_is_possible(tokenizer, overrides, texts, environment, cut, turns):
    episode, session, _ = play([*MULTI, *overrides], tokenizer, texts, environment, cut)
    assert len(session.sent) == turns == episode.metrics["turns"]


def test_ungraded_task_has_no_correctness_metric(tokenizer):
    episode, _, _ = play(MULTI, tokenizer, ["3", "3"], Exact(correct=False))
    assert episode.correct is None and episode.metrics == {"judged": 1.0, "turns": 2.0}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN, "<|user|>a1b2=<eos><|assistant|>2<eos><|user|>that is wrong; try again<eos><|assistant|>3<eos>"),
        (MISTRAL, "[INST] a1b2= [/INST]2<eos>[INST] that is wrong; try again [/INST]3<eos>"),
    ],
)
def test_feedback_is_a_user_turn_of_the_template(tmp_path, template, expected):
    tokenizer = with_template(tmp_path, template)
    texts = ["2", "3"]
    sizes = [
        "data.chat_template=true",
        "generation.embedded.context_length=0",
        "model.tiny.max_position_embeddings=600",
    ]
    episode, _, _ = play([*MULTI, *sizes], tokenizer, texts)
    known = "".join(c for c in expected.replace("<eos>", "@") if c in "@0123456789+=;#abcdefghijklmnopqrstuvwxyz ")
    assert tokenizer.decode(episode.rows[0].tokens) == known.replace("@", "<eos>")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for m in messages %}{{ m.content }}{{ loop.index }}{% endfor %}", "depends on the turns before"),
        ("{{ messages[0].content }}", "drops a turn"),
        (
            "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}{{ messages[0].content }}",
            "one turn only",
        ),
    ],
)
def test_template_without_further_turns_is_config_error(tmp_path, template, problem):
    config = compose([*MULTI, "data.chat_template=true"])
    with pytest.raises(ConfigError, match=f"rollout.agent='multi_turn': .*{problem}"):
        agents.check(config, with_template(tmp_path, template))


@pytest.mark.parametrize(
    ("arguments", "longest"),
    [
        ([], 48 + 2 * 200 + 24),
        (["max_turns=3"], 48 + 3 * 200 + 2 * 24),
        (["feedback='again {prompt}'"], 48 + 2 * 200 + 6 + 48),
        (["feedback_tokens=100"], 48 + 2 * 200 + 100),
    ],
)
def test_longest_row_counts_every_turn(arguments, longest):
    assert longest_sequence(compose([*MULTI, *(f"rollout.agent_args.{a}" for a in arguments)])) == longest


def test_launcher_accepts_the_shipped_experiments():
    check(compose(MULTI), CPU)
    check(compose(["experiment=arith_multi_turn"]), CPU)


@pytest.mark.parametrize(
    ("overrides", "field", "problem"),
    [
        (["rollout.agent=nobody"], "rollout.agent", "unknown agent: use one of multi_turn, single_turn"),
        (["rollout.agent=no_such_module:Agent"], "rollout.agent", "no module named 'no_such_module'"),
        (["rollout.agent=json:JSONDecoder"], "rollout.agent", "is not an agent: the class lacks run"),
        (["rollout.agent_args.turns=3"], "rollout.agent_args", "do not fit multi_turn"),
        (["rollout.agent=single_turn", "rollout.agent_args.x=1"], "rollout.agent_args", "do not fit single_turn"),
        (["rollout.agent_args.max_turns=0"], "rollout.agent_args.max_turns", "at least 1"),
        (["rollout.agent_args.max_turns=two"], "rollout.agent_args.max_turns", "at least 1"),
        (["rollout.agent_args.feedback=''"], "rollout.agent_args.feedback", "must be a text"),
        (["rollout.agent_args.feedback_tokens=-1"], "rollout.agent_args.feedback_tokens", "at least 0"),
        (["rollout.agent_args.max_turns=3"], "generation.sampling.max_new_tokens", "512 positions"),
        (["generation.embedded.context_length=400"], "generation.embedded.context_length", "multi_turn = 472"),
        (["train.microbatch_tokens=400"], "train.microbatch_tokens", "multi_turn = 472"),
        (["rollout.min_episodes=9"], "rollout.min_episodes", "must not exceed rollout.group_size (8)"),
        (["rollout.min_episodes=1"], "rollout.min_episodes", "advantages are normalised per group"),
    ],
)
def test_wrong_agent_settings_are_refused(overrides, field, problem):
    with pytest.raises(ConfigError) as caught:
        check(compose([*MULTI, *overrides]), CPU)
    assert (caught.value.field, problem in caught.value.problem) == (field, True), caught.value


def test_feedback_without_known_characters_is_refused(tokenizer):
    config = compose([*MULTI, "rollout.agent_args.feedback='!?'"])
    with pytest.raises(ConfigError, match="has no tokens in the model's vocabulary"):
        agents.check(config, tokenizer)


def test_the_example_agent_plays_an_episode(tokenizer, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    overrides = ["experiment=arith", "rollout.agent=agent:ThinkThenAnswer", "rollout.agent_args.cue=' so #'"]
    check(compose(overrides), CPU)
    episode, session, environment = play(overrides, tokenizer, ["1+2", "3"])
    (row,) = episode.rows
    assert tokenizer.decode(row.tokens) == "<bos>a1b2=1+2<eos> so #3<eos>" and row.loss_tokens == 6
    assert (episode.correct, environment.responses[0].text, episode.metrics["thought_tokens"]) == (True, "3", 4)
    assert len(session.sent) == 2


def test_example_agent_is_short_and_outside_package():
    lines = EXAMPLE.read_text().splitlines()
    assert 15 <= len(lines) <= 40
    assert importlib.util.find_spec("realsys.docs") is None
