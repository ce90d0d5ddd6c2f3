"""The text between two completions, as the chat template writes it."""

import json

import pytest

from realsys.data import chat
from realsys.data.chat import WINDOW, Tail, Tails, join
from realsys.data.tokenizer import TextTokenizer
from tests.support.conversations.episodes import assistant, call, result, user
from tests.support.conversations.play import TOOLS
from tests.support.conversations.template_models import CHATML, TEMPLATES, model_with


def rounds(count):
    """Return a user message and ``count`` rounds with a tool."""
    return [user("go"), *(m for n in range(count) for m in (assistant(None, tool_calls=[call()]), result(f"r{n}")))]


def compiled(tmp_path, template):
    return chat.ChatTemplate(template, tmp_path, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("<end>", (3, True, True)),  # sampled: the tail begins after it
        ("<user>", (0, False, False)),  # the opening of the next turn is not the end of this one
        (None, (0, False, False)),
    ],
)
def test_tail_begins_after_the_sampled_stop_token(stop, expected):
    place = join(Tail("</c<end>\n<user>hi<end>", 9, in_call=False), stop, ["<end>"])
    assert (place.start, place.clean, place.overlaps) == expected


def test_end_of_a_call_is_never_inserted():
    assert join(Tail("}</call><end>\n<user>", 14, in_call=True), None, ["<end>"]).start == 8
    assert join(Tail("}</call><user>", 8, in_call=True), "<stop>", ["<end>"]).start == 8


def test_stop_text_in_a_message_ends_nothing(tmp_path):
    """A user who writes the stop token does not move the place where the row goes on."""
    tail = Tails(compiled(tmp_path, "{% for m in messages %}{{ m.content }}|{% endfor %}")).tail(
        [user("a")], assistant("b"), [user("x <end> y")]
    )
    assert join(tail, "<end>", ["<end>"]).start == 0 and tail.text == "|x <end> y|"


def test_last_end_of_conversation_stands_for_end_of_turn(tmp_path):
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{{ '<return>' if m.role == 'assistant' and loop.last and not add_generation_prompt else '<end>' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tail = Tails(compiled(tmp_path, source)).tail([user("a")], assistant("b"), [user("c")])
    place = join(tail, "<return>", ["<return>", "<end>"])
    assert tail.text[place.start :] == "<user>c<end><assistant>" and place.clean
    assert join(tail, "<end>", []).clean


def test_missing_end_of_turn_is_not_taken_from_the_next(tmp_path):
    """A template that ends only the last turn: the opening of the next turn is not such an end."""
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{{ '<end>' if loop.last and not add_generation_prompt else '' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tail = Tails(compiled(tmp_path, source)).tail([user("a")], assistant("b"), [user("c")])
    place = join(tail, "<end>", ["<end>"])
    assert tail.text[place.start :] == "<user>c<assistant>" and not place.clean


def test_space_that_a_stop_token_strips_is_not_added(tmp_path):
    """A stop token with ``rstrip`` takes the newline after it, so the tail is tokenised together with it."""
    model_with(tmp_path, CHATML)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    for token in content["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_end|>"
    file.write_text(json.dumps(content))
    tokenizer = TextTokenizer(tmp_path)
    messages = [user("a"), assistant("b"), user("c")]
    tail, clean = tokenizer.encode_tail(messages[:1], messages[1], messages[2:], tokenizer.eos_token_id)
    whole = tokenizer.encode_chat(messages)
    assert clean and whole[-len(tail) :] == tail and tokenizer.decode(tail).startswith("<|im_start|>user")


def test_long_conversation_is_rendered_in_part(tmp_path, monkeypatch):
    template = compiled(tmp_path, CHATML)
    tails, sizes = Tails(template), []
    render = template.render
    monkeypatch.setattr(template, "render", lambda m, *a, **k: sizes.append(len(m)) or render(m, *a, **k))
    for count in range(1, 60):
        tails.tail(rounds(count), assistant(None, tool_calls=[call()]), [result("x")])
    assert not tails.needs_all
    assert sum(size > WINDOW + 3 for size in sizes) <= 5  # the first one, and once per doubling


def test_template_that_counts_turns_gets_them_all(tmp_path):
    tails = Tails(compiled(tmp_path, TEMPLATES["numbers_turns"]))
    for count in range(4, 20):
        tail = tails.tail(rounds(count), assistant(None, tool_calls=[call()]), [result("x")])
        assert f"tool {2 * count + 3}\nx" in tail.text
    assert tails.needs_all


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - {"alternates", "numbers_turns", "wants_parts"}))
def test_window_has_the_tail_of_the_whole(tmp_path, name):
    """Compared with the end of the whole rendering, at every length."""
    tokenizer = model_with(tmp_path, TEMPLATES[name])
    for count in range(1, 24):
        before, reply, after = rounds(count), assistant(None, tool_calls=[call()]), [result("last")]
        tail, _ = tokenizer.encode_tail(before, reply, after, tokenizer.eos_token_id, TOOLS)
        whole = tokenizer.encode_chat([*before, reply, *after], TOOLS)
        assert whole[-len(tail) :] == tail


def test_equal_chats_are_rendered_once_a_day(tmp_path, monkeypatch):
    class Clock:
        day = "1 May"

        @classmethod
        def now(cls):
            return cls

        @classmethod
        def strftime(cls, form):
            return cls.day

    monkeypatch.setattr(chat, "datetime", Clock)
    tokenizer = model_with(tmp_path, "{{ strftime_now('%d %b') }}: " + CHATML)
    rendered = []
    render = chat.ChatTemplate.render
    monkeypatch.setattr(chat.ChatTemplate, "render", lambda *a, **k: rendered.append(1) or render(*a, **k))
    first = tokenizer.encode_chat([user("a")])
    assert tokenizer.encode_chat([user("a")]) == first and len(rendered) == 1
    first.append(0)  # what a caller gets is its own
    Clock.day = "2 May"
    assert tokenizer.decode(tokenizer.encode_chat([user("a")])).startswith("2 May: ") and len(rendered) == 2


def test_first_form_that_the_template_takes_is_rendered(tmp_path):
    template = compiled(tmp_path, "{% for m in messages %}{{ m.tool_calls[0].function.arguments + '!' }}{% endfor %}")
    assert template.render([assistant(None, tool_calls=[call()])]) == '{"a": 1, "b": "x"}!'
    template = compiled(tmp_path, "{% for m in messages %}{{ m.tool_calls[0].function.arguments.a }}{% endfor %}")
    assert template.render([assistant(None, tool_calls=[call()])]) == "1"
    template = compiled(tmp_path, "{% for m in messages %}{{ m.content + '!' }}{% endfor %}")
    assert template.render([assistant(None)]) == "!"
    template = compiled(tmp_path, TEMPLATES["wants_parts"])
    assert template.render([user("a")], prompt=False) == "User: a<end_of_utterance>\n"
