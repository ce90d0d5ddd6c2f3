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
from realsys.errors import AgentError, ConfigError
from realsys.generation.completion import Completion
from realsys.model_files.architecture import EOS_ID
from realsys.rollout import agents, environments
from realsys.rollout.environments import Judgement, StepEnvironment, Task
from realsys.types import Ticket
from tests.support.serving.rollout_fakes import Game

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


GAME = [
    Judgement(0.5, False, feedback="higher"),
    Judgement(-1.0, True, feedback="lower"),  # a right move, which does not end the game
    Judgement(4.0, False, {"moves": 3.0}, done=True, answer="9"),
]
THREE = [*MULTI, "rollout.agent_args.max_turns=3", "rollout.agent_args.feedback=go on"]


def play_game(tokenizer, texts, *overrides, game=None, observation="below 9", cut=()):
    """Play a game with steps; return the episode and the calls of the game."""
    game = game or Game(None, observation, GAME)
    episode, _, _ = play([*THREE, *overrides], tokenizer, texts, StepEnvironment(game, "x:Game"), cut)
    return episode, game.calls


def test_game_is_played_step_by_step_in_one_row(tokenizer):
    episode, calls = play_game(tokenizer, ["1", "2", "3"])
    (row,) = episode.rows
    assert tokenizer.decode(row.tokens) == "<bos>a1b2=below 91<eos>higher2<eos>lower3<eos>"
    assert tokenizer.decode(row.tokens[row.loss_mask]) == "1<eos>2<eos>3<eos>"
    assert calls == ["reset 0", "step 0: 1", "step 0: 2", "step 0: 3", "close 0"]
    assert (episode.reward, episode.correct, episode.answer, row.rewards) == (3.5, False, "9", ())
    metrics = {"moves": 3.0, "turns": 3.0, "return": 3.5, "correct_first": 0.0, "correct_last": 0.0}
    assert episode.metrics == metrics


def test_each_step_counts_once_with_rewards_of_turns(tokenizer):
    """The last one in the reward of the episode, which belongs to the same token."""
    turns = ["train.ppo.turn_rewards=true", "rollout.agent_args.turn_discount=0.5"]
    episode, _ = play_game(tokenizer, ["1", "2", "3"], *turns, observation=None)
    (row,) = episode.rows
    assert tokenizer.decode(row.tokens) == "<bos>a1b2=1<eos>higher2<eos>lower3<eos>"
    assert [(tokenizer.decode([row.tokens[place - 1]]), reward) for place, reward in row.rewards] == [
        ("1", 0.5),
        ("2", -0.5),
    ]
    assert all(row.tokens[place] == EOS_ID for place, _ in row.rewards)
    assert (episode.reward, episode.metrics["return"]) == (1.0, 1.0) and row.rewards[0][1] + row.rewards[1][1] == 0.0


@pytest.mark.parametrize(
    ("texts", "cut", "reward"),
    [(["1"], (0,), 0.5), (["1", "2"], (1,), -0.5), (["1", "2", "3"], (), 3.5)],
)
def test_game_ends_with_a_completion_that_was_cut_off(tokenizer, texts, cut, reward):
    episode, calls = play_game(tokenizer, texts, cut=cut)
    assert (episode.reward, len(calls)) == (reward, len(texts) + 2) and calls[-1] == "close 0"


def test_step_without_observation_gets_the_default_feedback(tokenizer):
    game = Game(None, None, [Judgement(0.0), Judgement(1.0, done=True)])
    episode, _ = play_game(tokenizer, ["1", "2"], game=game)
    assert tokenizer.decode(episode.rows[0].tokens) == "<bos>a1b2=1<eos>go on2<eos>" and episode.correct is None


@pytest.mark.parametrize("chat", [False, True])
def test_observation_that_is_too_long_fails_the_episode(tokenizer, tmp_path, chat):
    tokenizer = with_template(tmp_path, QWEN) if chat else tokenizer
    with pytest.raises(AgentError, match="observation of reset is .* too long for a row of .*: set .*feedback_tokens"):
        play_game(tokenizer, [], f"data.chat_template={str(chat).lower()}", observation="a" * 900)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN, "<|user|>a1b2=<eos><|user|>below 9<eos><|assistant|>1<eos><|user|>higher<eos><|assistant|>2<eos>"),
        (MISTRAL, "[INST] a1b2= [/INST][INST] below 9 [/INST]1<eos>[INST] higher [/INST]2<eos>"),
    ],
)
def test_observation_is_a_user_turn_of_the_template(tmp_path, template, expected):
    tokenizer = with_template(tmp_path, template)
    game = Game(None, "below 9", [GAME[0], GAME[2]])
    episode, _ = play_game(tokenizer, ["1", "2"], "data.chat_template=true", game=game)
    known = "".join(c for c in expected.replace("<eos>", "@") if c in "@0123456789+=;#abcdefghijklmnopqrstuvwxyz ")
    assert tokenizer.decode(episode.rows[0].tokens) == known.replace("@", "<eos>")


ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('must alternate') }}{% endif %}{{ m.content }}<eos>{% endfor %}"
)
LAST = "{% if messages|length == 2 %}{{ messages[-1].content }}{% else %}" + QWEN + "{% endif %}"


@pytest.mark.parametrize(("template", "problem"), [(ALTERNATE, "must alternate"), (LAST, "drops a user turn")])
def test_template_without_two_user_turns_is_named_with_its_remedy(tmp_path, template, problem):
    tokenizer = with_template(tmp_path, template)
    with pytest.raises(AgentError, match=f"cannot follow the prompt: .*{problem}.*: let reset return None"):
        play_game(tokenizer, [], "data.chat_template=true")
    game = Game(None, None, [GAME[2]])
    assert play_game(tokenizer, ["1"], "data.chat_template=true", game=game)[0].reward == 4.0


def test_example_game_is_played_to_its_end(tokenizer, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    overrides = [*MULTI, "rollout.environment=guessing:Guessing", "rollout.environment_args={limit: 9, cost: 0.25}"]
    overrides += ["rollout.agent_args={max_turns: 5, feedback_tokens: 20}", "generation.sampling.max_new_tokens=60"]
    config = compose(overrides)
    check(config, CPU)
    environment = environments.build(config, tokenizer, None)
    episode, _, _ = play(overrides, tokenizer, ["no idea", "8", "2", "it is 3"], environment)
    (row,) = episode.rows
    hints = "answer with a number8<eos>lower2<eos>higherit is 3<eos>"
    assert tokenizer.decode(row.tokens) == "<bos>a1b2=it is below 9no idea<eos>" + hints
    assert (episode.reward, episode.correct, episode.metrics["turns"]) == (0.25, True, 4.0)


@pytest.mark.parametrize(("discount", "reward"), [("1.0", 12.0), ("1", 12.0), ("0.5", 6.0)])
def test_later_try_is_worth_less(tokenizer, discount, reward):
    episode, _, _ = play([*MULTI, f"rollout.agent_args.turn_discount={discount}"], tokenizer, ["2", "3"])
    assert episode.reward == reward


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
        (["feedback_tokens=100", "turn_discount=0.5"], 48 + 2 * 200 + 100),
    ],
)
def test_longest_row_counts_every_turn(arguments, longest):
    assert longest_sequence(compose([*MULTI, *(f"rollout.agent_args.{a}" for a in arguments)])) == longest


def test_longest_row_has_the_first_observation():
    game = "rollout.environment=tests.support.serving.rollout_fakes:Game"
    assert longest_sequence(compose([*MULTI, "rollout.agent_args.feedback_tokens=100", game])) == 48 + 2 * 200 + 2 * 100


def test_launcher_accepts_the_shipped_experiments():
    check(compose(MULTI), CPU)
    check(compose(["experiment=arith_multi_turn"]), CPU)


@pytest.mark.parametrize(
    ("overrides", "field", "problem"),
    [
        (["rollout.agent=nobody"], "rollout.agent", "unknown agent: use one of distill, multi_turn, single_turn"),
        (["rollout.agent=no_such_module:Agent"], "rollout.agent", "no module named 'no_such_module'"),
        (["rollout.agent=json:JSONDecoder"], "rollout.agent", "is not an agent: the class lacks run"),
        (["rollout.agent_args.turns=3"], "rollout.agent_args", "do not fit multi_turn"),
        (["rollout.agent=single_turn", "rollout.agent_args.x=1"], "rollout.agent_args", "do not fit single_turn"),
        (["rollout.agent_args.max_turns=0"], "rollout.agent_args.max_turns", "at least 1"),
        (["rollout.agent_args.max_turns=two"], "rollout.agent_args.max_turns", "at least 1"),
        (["rollout.agent_args.feedback=''"], "rollout.agent_args.feedback", "must be a text"),
        (["rollout.agent_args.feedback_tokens=-1"], "rollout.agent_args.feedback_tokens", "at least 0"),
        (["rollout.agent_args.turn_discount=0"], "rollout.agent_args.turn_discount", "above 0, and at most 1"),
        (["rollout.agent_args.turn_discount=1.5"], "rollout.agent_args.turn_discount", "above 0, and at most 1"),
        (["rollout.agent_args.turn_discount=.nan"], "rollout.agent_args.turn_discount", "above 0, and at most 1"),
        (["rollout.agent_args.turn_discount=true"], "rollout.agent_args.turn_discount", "above 0, and at most 1"),
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
