"""Fields of the requests, per route: the only list of them.

honoured    the completion or the reply obeys the field
overridden  sampling settings: recorded, and replaced by the policy's unless ``rollout.gateway.sampling=request``
accepted    fields that need no action: labels of the caller, caches, priorities
ignored     fields that have no effect here, with the values that would have none anywhere

A field that is in none of the lists is tolerated. Its name, and that of an ignored field with another value, ends in
``GatewayCall.ignored``. A field whose value is null counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from realsys.errors import MALFORMED
from realsys.rollout.gateway.dialect import BadRequest, GatewayCall

Kind = str
#: what a value must be, by kind
KINDS: Mapping[Kind, tuple[type, ...]] = {
    "a string": (str,),
    "a number": (int, float),
    "an integer": (int,),
    "a positive integer": (int,),
    "a boolean": (bool,),
    "a list": (list,),
    "an object": (dict,),
    "a string or a list": (str, list),
    "a string or an object": (str, dict),
    "a boolean or an integer": (bool, int),
    "a list of objects": (list,),
    "a list of token ids": (list,),
    "a string or a list of strings": (str, list),
}
TEXT, NUMBER, INTEGER, COUNT, FLAG = "a string", "a number", "an integer", "a positive integer", "a boolean"
LIST, OBJECT, OBJECTS, TOKENS = "a list", "an object", "a list of objects", "a list of token ids"
TEXTS, TEXT_OR_LIST, TEXT_OR_OBJECT = "a string or a list of strings", "a string or a list", "a string or an object"

#: wire name -> (name in SamplingParams, kind)
_OPENAI_SAMPLING = {
    "temperature": ("temperature", NUMBER),
    "top_p": ("top_p", NUMBER),
    "presence_penalty": ("presence_penalty", NUMBER),
    "frequency_penalty": ("frequency_penalty", NUMBER),
    "seed": ("sampling_seed", INTEGER),
}
#: fields that vLLM and SGLang add to OpenAI's
_SERVER_SAMPLING = {
    "top_k": ("top_k", INTEGER),
    "min_p": ("min_p", NUMBER),
    "repetition_penalty": ("repetition_penalty", NUMBER),
    "min_tokens": ("min_new_tokens", INTEGER),
}
_SAMPLING = _OPENAI_SAMPLING | _SERVER_SAMPLING
_SERVER_ACCEPTED = ("spaces_between_special_tokens", "cache_salt", "priority", "request_id")
_SERVER_IGNORED: dict[str, tuple[Any, ...]] = {
    "skip_special_tokens": (True,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "best_of": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
}
_OPENAI_ACCEPTED = (
    "metadata",
    "moderation",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
#: fields of all routes that sample
_ROUTE = {"model": TEXT, "stream": FLAG}
#: further ones of chat/completions, completions and inference/v1/generate
_REPLY = {"stream_options": OBJECT, "return_token_ids": FLAG}
_LIMITS = {"n": COUNT, "stop": TEXTS, "stop_token_ids": TOKENS, "max_tokens": COUNT}


@dataclass(frozen=True)
class Fields:
    """The fields of one route."""

    honoured: Mapping[str, Kind]
    overridden: Mapping[str, tuple[str, Kind]] = field(default_factory=dict)
    accepted: frozenset[str] = frozenset()
    ignored: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    required: tuple[str, ...] = ()


CHAT = Fields(
    honoured=_ROUTE
    | _REPLY
    | _LIMITS
    | {
        "messages": OBJECTS,
        "continue_final_message": FLAG,
        "tools": OBJECTS,
        "tool_choice": TEXT_OR_OBJECT,
        "max_completion_tokens": COUNT,
        "logprobs": FLAG,
        "top_logprobs": INTEGER,
        "reasoning_effort": TEXT,
        "chat_template_kwargs": OBJECT,
        "return_tokens_as_token_ids": FLAG,
        "response_format": OBJECT,
        "structured_outputs": OBJECT,
    },
    overridden=_SAMPLING,
    accepted=frozenset((*_OPENAI_ACCEPTED, *_SERVER_ACCEPTED)),
    ignored=_SERVER_IGNORED
    | {
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "include_reasoning": (True,),
        "modalities": (["text"],),
        "parallel_tool_calls": (True,),
        "prediction": (),
        "verbosity": ("medium",),
        "web_search_options": (),
    },
    required=("messages",),
)

COMPLETIONS = Fields(
    honoured=_ROUTE
    | _REPLY
    | _LIMITS
    | {
        "prompt": TEXT_OR_LIST,
        "logprobs": INTEGER,
        "return_tokens_as_token_ids": FLAG,
        "response_format": OBJECT,
        "structured_outputs": OBJECT,
    },
    overridden=_SAMPLING,
    accepted=frozenset((*_OPENAI_ACCEPTED, *_SERVER_ACCEPTED)),
    ignored=_SERVER_IGNORED
    | {
        "add_special_tokens": (True,),
        "echo": (False,),
        "suffix": ("",),
    },
    required=("prompt",),
)

RESPONSES = Fields(
    honoured=_ROUTE
    | {
        "input": TEXT_OR_LIST,
        "instructions": TEXT,
        "tools": OBJECTS,
        "tool_choice": TEXT_OR_OBJECT,
        "max_output_tokens": COUNT,
        "reasoning": OBJECT,
        "include": LIST,
        "top_logprobs": INTEGER,
        "previous_response_id": TEXT,
        "conversation": TEXT_OR_OBJECT,
        "prompt": OBJECT,
        "background": FLAG,
        "text": OBJECT,
        "chat_template_kwargs": OBJECT,
    },
    overridden={name: _OPENAI_SAMPLING[name] for name in ("temperature", "top_p")} | _SERVER_SAMPLING,
    accepted=frozenset((*_OPENAI_ACCEPTED, "client_metadata", "stream_options")),
    ignored={
        "context_management": (),
        "max_tool_calls": (),
        "parallel_tool_calls": (True,),
        "truncation": ("disabled",),
    },
    required=("input",),
)

MESSAGES = Fields(
    honoured=_ROUTE
    | {
        "messages": OBJECTS,
        "system": TEXT_OR_LIST,
        "tools": OBJECTS,
        "tool_choice": OBJECT,
        "stop_sequences": LIST,
        "max_tokens": COUNT,
        "chat_template_kwargs": OBJECT,
        "output_config": OBJECT,
        "output_format": OBJECT,
    },
    overridden={name: _SAMPLING[name] for name in ("temperature", "top_p", "top_k")},
    accepted=frozenset(("metadata", "service_tier", "cache_control", "inference_geo", "speed")),
    ignored={
        "container": (),
        "context_management": (),
        "mcp_servers": ([],),
        "thinking": ({"type": "disabled"},),
    },
    required=("messages",),
)

#: of POST /inference/v1/generate; its sampling settings are one object
GENERATE = Fields(
    honoured=_ROUTE | _REPLY | {"token_ids": TOKENS, "sampling_params": OBJECT},
    accepted=frozenset(("request_id", "cache_salt", "priority")),
    ignored={"content_parts": ([],), "features": (), "kv_transfer_params": ()},
    required=("token_ids",),
)
GENERATE_SAMPLING = Fields(
    honoured=_LIMITS | {"logprobs": INTEGER, "structured_outputs": OBJECT, "guided_decoding": OBJECT},
    overridden=_SAMPLING,
    accepted=frozenset(
        (*_SERVER_ACCEPTED, "detokenize", "flat_logprobs", "output_kind", "routed_experts_prompt_start", "skip_clone")
    ),
    ignored=_SERVER_IGNORED
    | {
        "add_special_tokens": (True, False),  # prompt and reply are token ids
        "extra_args": ({},),
        "prompt_logprobs": (),
        "skip_special_tokens": (True, False),
    },
)

TOKENIZE = Fields(
    honoured={
        "model": TEXT,
        "prompt": TEXT,
        "messages": OBJECTS,
        "continue_final_message": FLAG,
        "tools": OBJECTS,
        "chat_template_kwargs": OBJECT,
    },
    ignored={"add_generation_prompt": (True,), "add_special_tokens": (True,)},
)


# ---- reading of request bodies by these lists; each error names the field


#: tokens whose log-probs a client may ask for at each position, as OpenAI limits them
MOST_TOP_LOGPROBS = 20
_HUGE = 2.0**63
_ROLES = ("assistant", "developer", "system", "tool", "user")
_decode = msgspec.json.Decoder().decode


class Body:
    """The fields of one request that are not null, checked against the list of its route.

    values    honoured fields by their wire names
    sampling  overridden fields by their names in ``SamplingParams``
    ignored   names of fields without effect
    """

    __slots__ = ("ignored", "sampling", "values")

    def __init__(self, request: Mapping[str, Any], fields: Fields, path: str = "") -> None:
        self.values: dict[str, Any] = {}
        self.sampling: dict[str, float] = {}
        self.ignored: list[str] = []
        for name, value in request.items():
            if value is None:
                continue
            if (kind := fields.honoured.get(name)) is not None:
                self.values[name] = check(value, kind, path + name)
            elif (setting := fields.overridden.get(name)) is not None:
                self.sampling[setting[0]] = check(value, setting[1], path + name)
            elif name not in fields.accepted and value not in fields.ignored.get(name, ()):
                self.ignored.append(path + name)
        for name in fields.required:
            if name not in self.values:
                raise BadRequest(400, "field is missing", path + name, "missing_required_parameter")

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)


def read_json(text: str | bytes, path: str) -> Any:
    """Read JSON. Raises BadRequest; ``path`` is "" for the body."""
    try:
        return _decode(text)
    except MALFORMED as error:
        what = "is" if path else "the body is"
        raise BadRequest(400, f"{what} not valid JSON: {error}", path) from None


def read(body: bytes, fields: Fields) -> Body:
    """Read the JSON object of a request. Raises BadRequest."""
    request = read_json(body, "")
    if not isinstance(request, dict):
        raise BadRequest(400, "the body must be a JSON object")
    return Body(request, fields)


def check(value: Any, kind: Kind, path: str) -> Any:
    """Return ``value`` if it is of ``kind``. Raises BadRequest."""
    types = KINDS[kind]
    good = isinstance(value, types) and (not isinstance(value, bool) or bool in types)
    if good and isinstance(value, list):
        return _check_list(value, kind, path)
    if good and isinstance(value, (int, float)):
        good = abs(value) < _HUGE and (kind != COUNT or value >= 1)  # false for NaN
    if not good:
        raise BadRequest(400, f"must be {kind}, not {describe(value)}", path)
    return value


def _check_list(values: list[Any], kind: Kind, path: str) -> list[Any]:
    if kind == TOKENS:
        # One pass in C for the long lists of token ids; the loop below names the wrong element.
        if set(map(type, values)) <= {int} and (not values or min(values) >= 0):
            return values
        wrong = next(i for i, value in enumerate(values) if type(value) is not int or value < 0)
        raise BadRequest(400, f"must be a token id, not {describe(values[wrong])}", f"{path}[{wrong}]")
    element = {OBJECTS: (dict, "an object"), TEXTS: (str, "a string")}.get(kind)
    if element is not None:
        for i, value in enumerate(values):
            if not isinstance(value, element[0]):
                raise BadRequest(400, f"must be {element[1]}, not {describe(value)}", f"{path}[{i}]")
    return values


def describe(value: Any) -> str:
    """Describe a value of JSON in a few characters, for an error."""
    try:
        text = msgspec.json.encode(value).decode("utf-8", "replace")
    except RecursionError:
        return "a value of so many levels"
    return text if len(text) <= 40 else f"{text[:37]}..."


def limits(call: GatewayCall, body: Body) -> GatewayCall:
    """Set the fields that several dialects share: bounds, logprobs as a flag, and the stream."""
    values = body.values
    call.model = values.get("model", "")
    call.n = values.get("n", 1)
    call.stream = values.get("stream", False)
    call.include_usage = values.get("stream_options", {}).get("include_usage") is True
    call.stop = strings(values.get("stop", ()))
    call.stop_token_ids = tuple(values.get("stop_token_ids", ()))
    call.max_tokens = values.get("max_completion_tokens", values.get("max_tokens"))
    call.return_token_ids = values.get("return_token_ids", False)
    call.tokens_as_ids = values.get("return_tokens_as_token_ids", False)
    call.sampling = body.sampling
    call.ignored = body.ignored
    for name, path in _FORMS.items():
        if isinstance(wish := body.get(name), dict):
            _take_form(call, wish, path, name)
    return call


# ---- the form that a completion must have: JSON of a schema, or a grammar


#: field -> where it has the form; "": it is the form
_FORMS = {
    "response_format": "",
    "structured_outputs": "",
    "guided_decoding": "",
    "text": "format",
    "output_config": "format",
    "output_format": "",
}
_JSON_OBJECT = {"type": "json_schema", "json_schema": {"type": "object"}}


def _take_form(call: GatewayCall, wish: dict[str, Any], place: str, name: str) -> None:
    """Set the grammar that field ``name`` asks for. Raises BadRequest."""
    given = {key: value for key, value in wish.items() if value is not None}
    form = given.pop(place, None) if place else given
    path = f"{name}.{place}" if place else name
    if place and (given and given != {"verbosity": "medium"}):
        call.ignored.append(name)
    if form is None or form == {"type": "text"} or not check(form, OBJECT, path):
        return
    if (grammar := _grammar(form, path)) is None:
        call.ignored.append(name)
    else:
        call.grammar = grammar, name


def _grammar(form: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """Return a form of OpenAI, Anthropic or vLLM in xgrammar's words; None if it has none. Raises BadRequest."""
    if form.get("type") == "json_object" or form.get("json_object"):
        return _JSON_OBJECT
    if form.get("type") == "json_schema":
        inner = check(form["json_schema"], OBJECT, f"{path}.json_schema") if "json_schema" in form else form
        schema = inner.get("schema", {"type": "object"})
        return {"type": "json_schema", "json_schema": check(schema, OBJECT, f"{path}.schema")}
    if "json" in form:
        schema = read_json(form["json"], f"{path}.json") if isinstance(form["json"], str) else form["json"]
        return {"type": "json_schema", "json_schema": check(schema, OBJECT, f"{path}.json")}
    if "choice" in form:
        texts = check(check(form["choice"], LIST, f"{path}.choice"), TEXTS, f"{path}.choice")
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]}
    for name, key in (("regex", "pattern"), ("grammar", "grammar")):
        if name in form:
            return {"type": name, key: check(form[name], TEXT, f"{path}.{name}")}
    return None


def strings(value: str | list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Return stop strings, which are written as one string or as a list; empty ones stop nothing."""
    return tuple(text for text in ((value,) if isinstance(value, str) else value) if text)


def top_logprobs(value: int, path: str) -> int:
    """Return the number of most probable tokens at each position. Raises BadRequest."""
    if not 0 <= value <= MOST_TOP_LOGPROBS:
        raise BadRequest(400, f"must be from 0 to {MOST_TOP_LOGPROBS}, not {value}", path)
    return value


def chat_messages(request: Body) -> list[dict[str, Any]]:
    """Check the messages of a chat. Developer messages become system messages, which every template knows."""
    path = "messages"
    messages: list[dict[str, Any]] = request.get(path)
    if request.get("continue_final_message"):
        problem = "must not be true: a reply cannot be begun by the client"
        raise BadRequest(400, problem, "continue_final_message", "unsupported_parameter")
    if not messages:
        raise BadRequest(400, "must contain at least one message", path)
    for i, message in enumerate(messages):
        role = message.get("role")
        if role not in _ROLES:
            raise BadRequest(400, f"must be one of {', '.join(_ROLES)}", f"{path}[{i}].role")
        if role == "developer":
            message["role"] = "system"
        content = message.get("content")
        if content is None and role != "assistant":
            raise BadRequest(400, "must be a string or a list, not null", f"{path}[{i}].content")
        if content is not None and not isinstance(content, str):
            _check_parts(content, f"{path}[{i}].content")
        if message.get("tool_calls") is not None:
            _check_tool_calls(message["tool_calls"], f"{path}[{i}].tool_calls")
    return messages


def _check_parts(parts: Any, path: str) -> None:
    for k, part in enumerate(check(parts, OBJECTS, path) if isinstance(parts, list) else [parts]):
        if not isinstance(part, dict):
            raise BadRequest(400, f"must be a string or a list, not {describe(parts)}", path)
        if part.get("type") not in ("text", "refusal"):
            kind = describe(part.get("type"))
            raise BadRequest(400, f"must be text: parts of type {kind} are not supported", f"{path}[{k}].type")
        if not isinstance(part.get(part["type"]), str):
            raise BadRequest(400, "must be a string", f"{path}[{k}].{part['type']}")
        if part["type"] == "refusal":
            part["type"], part["text"] = "text", part.pop("refusal")


def _check_tool_calls(calls: Any, path: str) -> None:
    for k, call in enumerate(check(calls, OBJECTS, path)):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(400, "must be an object with a name", f"{path}[{k}].function")
        if not isinstance(function.get("arguments", ""), (str, dict)):
            raise BadRequest(400, "must be a string of JSON", f"{path}[{k}].function.arguments")


def chat_tools(tools: list[dict[str, Any]], path: str = "tools") -> list[dict[str, Any]]:
    """Check the tools of a chat. Raises BadRequest for a tool that is not a function with a name."""
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise BadRequest(400, "must be a function", f"{path}[{i}]")
        if not isinstance(function.get("name"), str):
            raise BadRequest(400, "must be a string", f"{path}[{i}].function.name")
    return tools


def tool_choice(call: GatewayCall, choice: Any) -> None:
    """Obey ``none``; no completion can be forced to call a tool, so every other choice than ``auto`` is ignored."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    call.parse_tools = bool(call.tools) and kind != "none"
    if kind not in ("none", "auto", None):
        call.ignored.append("tool_choice")
