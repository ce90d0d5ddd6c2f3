"""Anthropic's SDK reads the replies, streams and errors of the messages dialect."""

import pytest

from realsys.rollout.conversation import forms
from tests.support.gateway.replies import Choice, Endpoint, choice, generated, tool_call

pytestmark = pytest.mark.needs(package="anthropic")
QUESTION = [{"role": "user", "content": "2+3?"}]
TOOL = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}
SETTINGS = {"model": "policy", "max_tokens": 50, "system": "Be brief.", "tools": [TOOL]}
PARTS = [("five", None), ("five", "adding"), ("", None, tool_call(a=1)), ("I add.", "hm", tool_call(a=1)), ("", None)]


def client_of(endpoint):
    import anthropic  # not installed everywhere

    return endpoint.client(anthropic.Anthropic, "http://gateway")


@pytest.mark.parametrize("parts", PARTS)
def test_stream_adds_up_to_the_reply(parts):
    client = client_of(Endpoint(choice(*parts)))
    whole = client.messages.create(messages=QUESTION, **SETTINGS)
    with client.messages.stream(messages=QUESTION, **SETTINGS) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    fields = {"type", "text", "thinking", "id", "name", "input"}
    plain = [[block.model_dump(include=fields) for block in message.content] for message in (streamed, whole)]
    assert plain[0] == plain[1] and streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens == 2
    assert streamed.usage.input_tokens == 3 and kinds[0] == "message_start" and kinds[-1] == "message_stop"


@pytest.mark.parametrize("parts", PARTS)
def test_content_sent_back_is_the_returned_message(parts):
    endpoint = Endpoint(choice(*parts))
    client = client_of(endpoint)
    reply = client.messages.create(messages=QUESTION, **SETTINGS)
    history = [*QUESTION, {"role": "assistant", "content": reply.content}, {"role": "user", "content": "Sure?"}]
    client.messages.create(messages=history, **SETTINGS)
    first, second = endpoint.calls
    returned = [*first.messages, endpoint.choices[0].message(), {"role": "user", "content": "Sure?"}]
    assert forms(second.messages) == forms(returned)


def test_cut_reply_names_its_limit():
    cut = Choice(generated("fi", "length"), "fi", finish_reason="length")
    assert client_of(Endpoint(cut)).messages.create(messages=QUESTION, **SETTINGS).stop_reason == "max_tokens"


def test_refused_request_raises_with_its_field():
    import anthropic

    image = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a"}}]}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]\.type"):
        client_of(Endpoint(choice())).messages.create(messages=image, **SETTINGS)


def test_error_in_stream_raises_in_sdk():
    import anthropic

    endpoint = Endpoint(choice())
    endpoint.failure = (503, "no server")
    with (
        pytest.raises(anthropic.APIError, match="no server"),
        client_of(endpoint).messages.stream(messages=QUESTION, **SETTINGS) as stream,
    ):
        list(stream)
