"""OpenAI's responses, read by OpenAI's SDK; items that are sent back."""

import json

import openai
import pytest

from realsys.rollout.conversation import forms
from realsys.rollout.gateway.dialect import call_id, same_completion
from tests.support.gateway.replies import Choice, Endpoint, choice, generated, parse, tool_call

ROUTE = "/v1/responses"
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
PARTS = [
    ("five", None),
    ("five", "adding"),
    ("", None, tool_call("abcdefg00", a=1), tool_call("abcdefg01", a=2)),
    ("I add.", "hm", tool_call(a=1)),
    ("", None),
]
ORDER = (
    *("response.created", "response.in_progress"),
    *("response.output_item.added", "response.content_part.added", "response.reasoning_text.delta"),
    *("response.reasoning_text.done", "response.content_part.done", "response.output_item.done"),
    *("response.output_item.added", "response.content_part.added", "response.output_text.delta"),
    *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
    *("response.output_item.added", "response.function_call_arguments.delta"),
    *("response.function_call_arguments.done", "response.output_item.done", "response.completed"),
)


def sent_back(output, *, reasoning=True):
    items = [item.model_dump(exclude_none=True) for item in output]
    return [item for item in items if reasoning or item["type"] != "reasoning"]


def plain(item):
    """Return an item without what the SDK itself adds to streamed ones."""
    return json.loads(item.to_json(), object_hook=lambda each: {k: v for k, v in each.items() if k[:6] != "parsed"})


@pytest.mark.parametrize("reasoning", [True, False])
@pytest.mark.parametrize("parts", PARTS)
def test_items_sent_back_are_the_returned_message(parts, reasoning):
    """Also without the reasoning items, which some clients drop."""
    endpoint = Endpoint(choice(*parts))
    reply = endpoint.client().responses.create(model="policy", input="2+3?", instructions="Be brief.", tools=[TOOL])
    items = [{"role": "user", "content": "2+3?"}, *sent_back(reply.output, reasoning=reasoning)]
    later = parse(ROUTE, {"instructions": "Be brief.", "input": [*items, {"role": "user", "content": "Sure?"}]})
    expected = [*endpoint.calls[0].messages, endpoint.choices[0].message(), {"role": "user", "content": "Sure?"}]
    assert forms(later.messages) == forms(expected)


@pytest.mark.parametrize("early", [0, 3, 9])
@pytest.mark.parametrize("parts", PARTS)
def test_stream_adds_up_to_the_reply(parts, early):
    client = Endpoint(choice(*parts), early=early).client()
    whole = client.responses.create(model="policy", input="2+3?", tools=[TOOL])
    with client.responses.stream(model="policy", input="2+3?", tools=[TOOL]) as stream:
        numbers = [event.sequence_number for event in stream]
        streamed = stream.get_final_response()
    assert numbers == list(range(len(numbers)))
    assert [plain(item) for item in streamed.output] == [plain(item) for item in whole.output]
    assert streamed.output_text == whole.output_text == parts[0]


def test_stream_has_events_in_order():
    client = Endpoint(choice("I add.", "hm", tool_call(a=1))).client()
    stream = client.responses.create(model="policy", input="2+3?", tools=[TOOL], stream=True)
    assert tuple(event.type for event in stream) == ORDER


def test_cut_reply_is_incomplete():
    endpoint = Endpoint(Choice(generated("ok", "length"), "ok", finish_reason="length"))
    client = endpoint.client()
    reply = client.responses.create(model="policy", input="2+3?", max_output_tokens=2)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    *_, last = client.responses.create(model="policy", input="2+3?", max_output_tokens=2, stream=True)
    assert last.type == "response.incomplete" and endpoint.calls[0].max_tokens == 2


def test_usage_counts_prompt_and_completion():
    usage = Endpoint(choice()).client().responses.create(model="policy", input="2+3?").usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (3, 2, 5)


def test_logprobs_come_with_the_text_if_included():
    include = ["message.output_text.logprobs"]
    reply = Endpoint(choice()).client().responses.create(model="policy", input="a", include=include)
    assert [entry.logprob for entry in reply.output[0].content[0].logprobs] == [-0.5, -0.5]


def test_parallel_calls_with_outputs_between_stay_one_message():
    """Some clients send the output of each tool directly after its call."""
    first, second = call_id("c", 0), call_id("c", 1)
    call = {"type": "function_call", "name": "add", "arguments": "{}"}
    items = [
        {"role": "user", "content": "hi"},
        call | {"call_id": first},
        {"type": "function_call_output", "call_id": first, "output": "1"},
        call | {"call_id": second},
        {"type": "function_call_output", "call_id": second, "output": [{"type": "input_text", "text": "2"}]},
    ]
    messages = parse(ROUTE, {"input": items}).messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == [first, second]
    items[3]["call_id"] = call_id("d", 0)  # of another completion
    assert [message["role"] for message in parse(ROUTE, {"input": items}).messages][3] == "assistant"


def test_neighbouring_replies_stay_apart():
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "one"}]}
    messages = parse(ROUTE, {"input": [{"role": "user", "content": "hi"}, text, text]}).messages
    assert [message["role"] for message in messages] == ["user", "assistant", "assistant"]


def test_tools_of_openai_itself_are_listed_as_ignored():
    call = parse(ROUTE, {"input": "a", "tools": [{"type": "web_search"}, TOOL]})
    assert call.ignored == ["tools[0]"] and [tool["function"]["name"] for tool in call.tools] == ["add"]
    assert "strict" not in call.tools[0]["function"]  # it would change the text of the chat template


def test_stored_response_is_refused_with_its_remedy():
    with pytest.raises(openai.BadRequestError, match="send the whole conversation") as caught:
        Endpoint(choice()).client().responses.create(model="policy", input="a", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


def test_error_in_stream_raises_in_sdk():
    endpoint = Endpoint(choice())
    endpoint.failure = (503, "no server")
    with pytest.raises(openai.APIError, match="no server"):
        list(endpoint.client().responses.create(model="policy", input="a", stream=True))


def test_call_ids_are_stable_unique_and_short():
    ids = [call_id(f"completion-{k}", index) for k in range(200) for index in range(70)]
    assert len(set(ids)) == len(ids) and ids[0] == call_id("completion-0", 0)
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert same_completion(ids[0], ids[69]) and not same_completion(ids[0], ids[70])
    assert json.dumps(ids[0]).isascii()
