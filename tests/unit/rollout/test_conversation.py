"""Requests of an agent become rows of the tokens that the engine received and returned."""

import pytest

from realsys.errors import DataError
from realsys.rollout.conversation import Conversation
from tests.support.conversations.episodes import USER, Turns, assistant, call, generated, result, user
from tests.support.conversations.play import TOOLS
from tests.support.conversations.template_models import CHATML, TEMPLATES, model_with
from tests.support.data.data_rows import char_tokenizer

SECOND = [USER, assistant(), user("four")]


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    return model_with(tmp_path_factory.mktemp("chatml"), CHATML)


@pytest.fixture
def turns(chatml):
    return Turns(chatml)


def test_second_turn_keeps_sampled_tokens(turns):
    """The tokens of a reply that the tokenizer would split in another way stay as they were sampled."""
    odd = [turns.tokenizer.encode_text(letter)[0] for letter in "three"]
    assert odd != turns.tokenizer.encode_text("three")
    first, _ = turns.take([USER], completion=generated([*odd, turns.tokenizer.eos_token_id]))
    plan, _ = turns.take(SECOND)
    assert plan.tokens[: len(first.tokens) + 6] == [*first.tokens, *odd, turns.tokenizer.eos_token_id]
    assert plan.drift == "clean"
    expected = "<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\nthree<|im_end|>\n"
    assert turns.shown(plan) == f"{expected}<|im_start|>user\nfour<|im_end|>\n<|im_start|>assistant\n"


def test_linear_conversation_is_one_row(turns):
    messages = [USER]
    for number in range(4):
        turns.take(messages, assistant(f"reply {number}"), completion=turns.ended("x", version=number))
        messages = [*messages, assistant(f"reply {number}"), user("next")]
    (row,) = turns.conversation.rows()
    assert row.versions.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert turns.tokenizer.decode(row.tokens[row.loss_mask].tolist()) == "x<|im_end|>" * 4
    assert turns.conversation.drift == {"first": 1, "clean": 3}


@pytest.mark.parametrize("text", ["cut o", "other</s>", "next<|im_start|>", ""])
def test_reply_without_its_end_gets_one(turns, text):
    """Cut off, ended by another stop token, or by the opening of a turn that the model made up."""
    turns.take([USER], completion=generated(turns.tokenizer.encode_text(text), "length"))
    plan, _ = turns.take(SECOND)
    assert plan.drift == "boundary_inserted"
    assert turns.tokenizer.decode(plan.context).startswith("<|im_end|>\n<|im_start|>user")


def test_cut_off_call_is_not_ended_twice(turns):
    """The parser has found a whole call, so only the end of the turn is missing."""
    reply = assistant(None, tool_calls=[call()])
    turns.take([USER], reply, completion=generated([40, 41], "length"), tools=TOOLS)
    plan, _ = turns.take([USER, reply, result("5")], tools=TOOLS)
    assert turns.tokenizer.decode(plan.context).startswith("<|im_end|>\n<|im_start|>tool\n5<|im_end|>")


def test_rewritten_history_starts_at_its_last_match(turns):
    turns.take([USER])
    kept, _ = turns.take(SECOND, assistant("five"))
    shared = kept.parent.tokens
    turns.take([*SECOND, assistant("five"), user("six")], assistant("seven"))
    plan, _ = turns.take([*SECOND, assistant("changed"), user("six")], assistant("eight"))
    assert plan.drift == "branch"
    assert plan.tokens[: len(shared)] == shared
    assert "changed" in turns.shown(plan) and "five" not in turns.shown(plan)
    rows = turns.conversation.rows()
    trained = [turns.tokenizer.decode(row.tokens[row.loss_mask].tolist()) for row in rows]
    assert trained == ["three<|im_end|>five<|im_end|>seven<|im_end|>", "eight<|im_end|>"]


def test_unknown_history_is_rendered_whole(turns):
    turns.take([USER])
    plan, _ = turns.take([user("other"), assistant("by hand"), user("go on")])
    assert plan.tokens == turns.tokenizer.encode_chat([user("other"), assistant("by hand"), user("go on")])
    assert plan.drift == "branch" and len(turns.conversation.rows()) == 2


def test_choices_of_one_call_train_the_prompt_once(turns):
    turns.take([USER])
    plan = turns.conversation.plan(SECOND)
    for text in ("four", "five"):
        turns.conversation.deliver(turns.conversation.record(plan, turns.ended(text), assistant(text)))
    first, second = turns.conversation.rows()
    assert turns.tokenizer.decode(first.tokens[first.loss_mask].tolist()) == "three<|im_end|>four<|im_end|>"
    assert turns.tokenizer.decode(second.tokens[second.loss_mask].tolist()) == "five<|im_end|>"
    assert first.tokens[: len(plan.tokens)].tolist() == second.tokens[: len(plan.tokens)].tolist() == plan.tokens
    assert turns.conversation.drift == {"first": 1, "clean": 1, "branch": 1}


def test_lost_reply_makes_no_row(turns):
    turns.take([USER], assistant("lost"), deliver=False)
    assert turns.conversation.rows() == [] and not turns.conversation.drift
    turns.take([USER], assistant("kept"))
    (row,) = turns.conversation.rows()
    assert turns.tokenizer.decode(row.tokens[row.loss_mask].tolist()) == "kept<|im_end|>"
    assert turns.conversation.drift == {"first": 1}


def test_later_turn_shows_that_reply_arrived(turns):
    turns.take([USER], deliver=False)
    turns.take(SECOND, assistant("five"), deliver=False)
    (row,) = turns.conversation.rows()
    assert turns.tokenizer.decode(row.tokens[row.loss_mask].tolist()) == "three<|im_end|>"


def test_equal_replies_continue_the_delivered_one(turns):
    turns.take([USER], completion=turns.ended("three"))
    turns.take([USER], completion=turns.ended("3"), deliver=False)
    plan, _ = turns.take(SECOND, assistant("five"))
    assert "three<|im_end|>" in turns.shown(plan)
    assert len(turns.conversation.rows()) == 1


@pytest.mark.parametrize(
    "change", [{"tools": TOOLS}, {"options": {"enable_thinking": False}}], ids=["tools", "options"]
)
def test_other_tools_or_options_begin_another_row(turns, change):
    turns.take([USER])
    plan, _ = turns.take(SECOND, **change)
    assert plan.drift == "branch" and len(turns.conversation.rows()) == 2


def test_options_reach_the_template(tmp_path):
    template = CHATML.replace("assistant\\n' }}{% endif %}", "assistant\\n' ~ (mode or '') }}{% endif %}")
    turns = Turns(model_with(tmp_path, template))
    first, _ = turns.take([USER], options={"mode": "<fast>"})
    plan, _ = turns.take(SECOND, options={"mode": "<fast>"})
    assert turns.shown(first).endswith("<fast>") and turns.shown(plan).count("<fast>") == 2


def test_stripped_thinking_stays_as_sampled(tmp_path):
    turns = Turns(model_with(tmp_path, TEMPLATES["strips_thinking"]))
    turns.take([USER], assistant("three", reasoning_content="hm"), completion=turns.ended("hm</think>three"))
    plan, _ = turns.take(SECOND)
    assert "<think>\nhm</think>three<|im_end|>" in turns.shown(plan)
    assert turns.shown(plan).endswith("<|im_start|>assistant\n<think>\n")
    assert plan.drift == "clean"


def test_bos_of_the_template_is_not_repeated(tmp_path):
    turns = Turns(model_with(tmp_path, TEMPLATES["begins_with_bos"]))
    turns.take([USER])
    plan, _ = turns.take(SECOND)
    assert turns.shown(plan).count("<s>") == 1


def test_template_that_hides_replies_makes_counted_branches(tmp_path):
    """The tail of a hidden reply cannot be derived, so the conversation is rendered as a whole: a further row."""
    hides = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    turns = Turns(model_with(tmp_path, hides))
    turns.take([USER])
    plan, _ = turns.take(SECOND)
    assert turns.shown(plan) == "one twofour"
    assert turns.conversation.drift == {"first": 1, "branch": 1} and len(turns.conversation.rows()) == 2


def test_text_extends_the_text_that_it_continues(chatml):
    conversation = Conversation(chatml)
    plan = conversation.plan_text("count: ")
    conversation.deliver(conversation.record(plan, generated([40, 41]), {"content": "one"}))
    later = conversation.plan_text("count: one, then")
    assert later.tokens == [*plan.tokens, 40, 41, *chatml.encode_text(", then")]
    conversation.deliver(conversation.record(later, generated([42])))
    assert conversation.plan_text("other").drift == "branch"
    assert len(conversation.rows()) == 1 and conversation.drift == {"first": 1, "clean": 1}


def test_tokens_extend_any_recorded_tokens(turns):
    first, node = turns.take([USER])
    sent = [*first.tokens, *node.completion.tokens.tolist(), 40, 41]
    plan = turns.conversation.plan_tokens(sent)
    assert plan.tokens == sent and plan.context == [40, 41] and plan.parent is node
    turns.conversation.deliver(turns.conversation.record(plan, generated([42])))
    assert len(turns.conversation.rows()) == 1
    assert turns.conversation.plan_tokens([7, 8]).drift == "branch"


class Continued:
    """A conversation of texts, or of their tokens; each completion is its text."""

    def __init__(self, tokenizer, kind):
        self.conversation, self.tokenizer, self.kind = Conversation(tokenizer), tokenizer, kind

    def plan(self, text):
        if self.kind == "text":
            return self.conversation.plan_text(text)
        return self.conversation.plan_tokens(self.ids(text))

    def ids(self, text):
        return [self.tokenizer.encode_text(letter)[0] for letter in text]

    def take(self, text, sampled, *, deliver=True, returned=None, stop=None, reason="stop"):
        """Send ``text`` and record ``sampled``. Returns plan and node."""
        plan = self.plan(text)
        reply = {"content": sampled if returned is None else returned}
        node = self.conversation.record(plan, generated(self.ids(sampled), reason), reply, stop)
        if deliver:
            self.conversation.deliver(node)
        return plan, node


@pytest.fixture(params=["text", "tokens"])
def continued(request, chatml):
    return Continued(chatml, request.param)


def test_lost_equal_sample_is_not_continued(continued):
    _, kept = continued.take("Q", "A")
    continued.take("Q", "A", deliver=False)
    plan, _ = continued.take("QAq", "B")
    assert plan.parent is kept and len(continued.conversation.rows()) == 1
    assert continued.conversation.drift == {"first": 1, "clean": 1}


@pytest.mark.parametrize("samples", [("AB", "A"), ("A", "AB")])
def test_longest_sample_is_continued(continued, samples):
    nodes = {sampled: continued.take("Q", sampled)[1] for sampled in samples}
    plan = continued.plan("QAB!")
    assert plan.parent is nodes["AB"] and plan.context == continued.ids("!")


def test_equal_sample_does_not_hide_the_deepest_turn(continued):
    continued.take("Q", "A")
    _, second = continued.take("QAq", "B")
    continued.take("Q", "A")
    plan, _ = continued.take("QAqBr", "C")
    assert plan.parent is second and continued.conversation.drift == {"first": 1, "clean": 2, "branch": 1}


def test_text_may_repeat_its_stop_string(chatml):
    """A loop of thoughts and observations writes the stop string again; the engine must not see it twice."""
    texts = Continued(chatml, "text")
    texts.take("Q", "A;\n", returned="A", stop=";")
    later = {text: texts.plan(text) for text in ("QA;\n1", "QA; 1", "QA 1")}
    assert [texts.tokenizer.decode(plan.context) for plan in later.values()] == ["1", " 1", " 1"]
    assert {plan.drift for plan in later.values()} == {"clean"}
    for text in later:
        texts.take(text, "B")
        assert texts.plan(f"{text}B2").context == texts.ids("2")


def test_cut_off_text_is_continued_without_boundary(continued):
    """No template stands between a completion and the text after it, so nothing is inserted."""
    continued.take("Q", "A", reason="length")
    plan, _ = continued.take("QAq", "B")
    assert plan.context == continued.ids("q") and continued.conversation.drift == {"first": 1, "clean": 1}


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "must not be empty"),
        ([{"content": "x"}], "object with a role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "part of type 'image_url'"),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], "object with a function"),
    ],
)
def test_unreadable_messages_are_refused(turns, messages, problem):
    with pytest.raises(DataError, match=problem):
        turns.conversation.plan(messages)


def test_messages_need_a_chat_template(tmp_path, chatml):
    with pytest.raises(DataError, match="no chat template"):
        Conversation(char_tokenizer(tmp_path)).plan([USER])
    with pytest.raises(DataError, match="data.chat_template is false"):
        Conversation(chatml, chat=False).plan([USER])
