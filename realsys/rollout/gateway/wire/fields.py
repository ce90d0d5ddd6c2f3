"""Fields of the requests, per route: the only list of them.

honoured    the completion or the reply obeys the field
overridden  sampling settings: recorded, and replaced by the policy's unless ``rollout.gateway.sampling=request``
accepted    fields that need no action: labels of the caller, caches, priorities
ignored     fields that have no effect here, with the values that would have none anywhere

A field that is in none of the lists is tolerated. Its name, and that of an ignored field with another value, ends in
``Call.ignored``. A field whose value is null counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
        "tools": OBJECTS,
        "tool_choice": TEXT_OR_OBJECT,
        "max_completion_tokens": COUNT,
        "logprobs": FLAG,
        "top_logprobs": INTEGER,
        "reasoning_effort": TEXT,
        "chat_template_kwargs": OBJECT,
        "return_tokens_as_token_ids": FLAG,
    },
    overridden=_SAMPLING,
    accepted=frozenset((*_OPENAI_ACCEPTED, *_SERVER_ACCEPTED)),
    ignored=_SERVER_IGNORED
    | {
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "audio": (),
        "continue_final_message": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "include_reasoning": (True,),
        "modalities": (["text"],),
        "parallel_tool_calls": (True,),
        "prediction": (),
        "response_format": ({"type": "text"},),
        "verbosity": ("medium",),
        "web_search_options": (),
    },
    required=("messages",),
)

COMPLETIONS = Fields(
    honoured=_ROUTE
    | _REPLY
    | _LIMITS
    | {"prompt": TEXT_OR_LIST, "logprobs": INTEGER, "return_tokens_as_token_ids": FLAG},
    overridden=_SAMPLING,
    accepted=frozenset((*_OPENAI_ACCEPTED, *_SERVER_ACCEPTED)),
    ignored=_SERVER_IGNORED
    | {
        "add_special_tokens": (True,),
        "echo": (False,),
        "response_format": ({"type": "text"},),
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
        "chat_template_kwargs": OBJECT,
    },
    overridden={name: _OPENAI_SAMPLING[name] for name in ("temperature", "top_p")} | _SERVER_SAMPLING,
    accepted=frozenset((*_OPENAI_ACCEPTED, "client_metadata", "stream_options")),
    ignored={
        "context_management": (),
        "max_tool_calls": (),
        "parallel_tool_calls": (True,),
        "text": ({"format": {"type": "text"}}, {}),
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
    },
    overridden={name: _SAMPLING[name] for name in ("temperature", "top_p", "top_k")},
    accepted=frozenset(("metadata", "service_tier", "cache_control", "inference_geo", "speed")),
    ignored={
        "container": (),
        "context_management": (),
        "mcp_servers": ([],),
        "output_config": ({},),
        "output_format": (),
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
    honoured=_LIMITS | {"logprobs": INTEGER},
    overridden=_SAMPLING,
    accepted=frozenset(
        (*_SERVER_ACCEPTED, "detokenize", "flat_logprobs", "output_kind", "routed_experts_prompt_start", "skip_clone")
    ),
    ignored=_SERVER_IGNORED
    | {
        "add_special_tokens": (True, False),  # prompt and reply are token ids
        "extra_args": ({},),
        "guided_decoding": (),
        "prompt_logprobs": (),
        "skip_special_tokens": (True, False),
        "structured_outputs": (),
    },
)

TOKENIZE = Fields(
    honoured={
        "model": TEXT,
        "prompt": TEXT,
        "messages": OBJECTS,
        "tools": OBJECTS,
        "chat_template_kwargs": OBJECT,
    },
    ignored={"add_generation_prompt": (True,), "add_special_tokens": (True,), "continue_final_message": (False,)},
)
