"""Neutral forms of all requests and replies of the gateway, and the contract of a dialect. No I/O.

    bytes ──Dialect.parse──> GatewayCall ──(gateway, engine, parser)──> GatewayReply ──Dialect.reply, .events──> bytes

A dialect is one wire format of a language-model endpoint, such as OpenAI's chat completions. Whatever a client speaks,
the gateway sees a ``GatewayCall`` whose messages have the form of OpenAI's chat completions.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from realsys.errors import RealsysError
from realsys.generation.completion import Completion

#: input of the engine: messages for the chat template, a text, or token ids
CallKind = Literal["chat", "text", "tokens"]
ChoiceEnd = Literal["stop", "length", "tool_calls"]


class BadRequest(RealsysError):
    """A request that must be changed before it is sent again.

    ``field`` is the path of the wrong field, ``code`` OpenAI's error code; both may be "".
    """

    def __init__(self, status: int, message: str, field: str = "", code: str = "") -> None:
        self.status = status
        self.message = message
        self.field = field
        self.code = code
        super().__init__(f"{field}: {message}" if field else message)


@dataclass(slots=True)
class GatewayCall:
    """One request.

    messages            of kind chat, as OpenAI's chat completions have them; developer messages became system messages
    tools               of kind chat, in the same form
    text                of kind text
    token_ids           of kind tokens, from the field ``token_field``
    stop                strings that end a completion and do not belong to its text
    stop_token_ids      further tokens that end a completion
    max_tokens          limit of the completion; None: the client set none
    sampling            settings of the client by their names in ``SamplingParams``; the policy's replace them
    logprobs            the reply has the log-prob of each token, and those of the ``top_logprobs`` most probable ones
    return_token_ids    the reply has the token ids and the weight version of each sampled token
    tokens_as_ids       tokens in log-probs are written ``token_id:N``
    parse_tools         tool calls in the completion become ``Choice.tool_calls``
    options             further arguments of the chat template
    grammar             form of the completion, in xgrammar's words, and the field that asks for it; None: any text
    ignored             names of fields that the client set and that have no effect
    """

    kind: CallKind
    model: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_field: str = "token_ids"
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    sampling: dict[str, float] = field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = 0
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    parse_tools: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    grammar: tuple[dict[str, Any], str] | None = None
    ignored: list[str] = field(default_factory=list)

    def texts(self) -> Iterator[str]:
        """Yield all texts that the model may get."""
        todo: list[Any] = [self.text, self.messages, self.tools]
        while todo:
            value = todo.pop()
            if isinstance(value, str):
                yield value
            elif isinstance(value, (list, dict)):
                todo += value.values() if isinstance(value, dict) else value


@dataclass(slots=True)
class Choice:
    """One completion of a call.

    text        what the client reads: without reasoning, tool calls, the end-of-text token and the stop string
    reasoning   None if the completion has none
    tool_calls  in the form of OpenAI's chat completions: id, type, function (name, arguments as JSON text)
    stop        the stop string that ended the completion, if one did
    malformed   number of malformed tool calls, which stay in the text
    """

    completion: Completion
    text: str
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: ChoiceEnd = "stop"
    stop: str | None = None
    malformed: int = 0

    def message(self) -> dict[str, Any]:
        """Return the assistant message in chat form, as a later request of the client will contain it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


class TokenTexts(Protocol):
    """Bytes of single tokens, for log-probs."""

    def token_bytes(self, token: int) -> bytes: ...


@dataclass(slots=True)
class ReplyHead:
    """The part of a reply that is known before the completion. ``created``: unix seconds."""

    id: str
    created: int
    model: str


@dataclass(slots=True)
class GatewayReply(ReplyHead):
    """The completions of one call. ``vocabulary`` is needed for replies with log-probs only."""

    prompt_tokens: list[int]
    choices: list[Choice]
    vocabulary: TokenTexts | None = None

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.completion.tokens) for choice in self.choices)


@dataclass(slots=True)
class Sent:
    """The part of one choice that a stream has sent. ``events``: number of its events."""

    reasoning: str = ""
    text: str = ""
    events: int = 0

    def rest(self, choice: Choice) -> tuple[str, str]:
        """Return the reasoning and the text that are left to send. Reasoning that grew after the text is left out."""
        reasoning = "" if self.text else (choice.reasoning or "")[len(self.reasoning) :]
        return reasoning, choice.text[len(self.text) :]

    def begins(self, choice: Choice) -> bool:
        """Return True if it is the beginning of ``choice``."""
        return (choice.reasoning or "").startswith(self.reasoning) and choice.text.startswith(self.text)


class Dialect(Protocol):
    """One wire format.

    A stream is ``opening``, then any number of ``part``, both while the completion is sampled, then ``events``. If the
    call fails after the opening, ``error_event`` ends the stream.
    """

    def parse(self, body: bytes, headers: Mapping[str, str]) -> GatewayCall:
        """Read a request. ``headers`` have names in lower case. Raises BadRequest."""
        ...

    def reply(self, call: GatewayCall, reply: GatewayReply) -> bytes:
        """Return the JSON body of the reply."""
        ...

    def opening(self, call: GatewayCall, head: ReplyHead) -> bytes:
        """Return the first server-sent events of a stream; b"" if it has none before the completion."""
        ...

    def part(self, call: GatewayCall, head: ReplyHead, index: int, sent: Sent, reasoning: str, text: str) -> bytes:
        """Return the events of further reasoning and text of choice ``index``, and add them to ``sent``.

        b"" if the format has its text in the last event only.
        """
        ...

    def events(self, call: GatewayCall, reply: GatewayReply, sent: Sequence[Sent]) -> Iterator[bytes]:
        """Yield the server-sent events after those of ``sent``, one for each choice, up to the end of the stream."""
        ...

    def error(self, status: int, message: str, field: str = "", code: str = "") -> bytes:
        """Return the JSON body of an error, in the form that the client's SDK reads."""
        ...

    def error_event(self, status: int, message: str) -> bytes:
        """Return the server-sent event of an error in a stream that has begun."""
        ...


# ---- ids of tool calls
#
# Nine letters or digits, which every client and chat template accepts (Mistral's want just nine).
# The first seven name the completion, the last two number its tool calls. So a client may send the tool calls of one
# completion apart from each other, and they can be joined again.


_DIGITS = string.digits + string.ascii_letters
_NAME = 7
_LENGTH = 9


def call_id(completion: str, index: int) -> str:
    """Return the id of tool call ``index`` of a completion, which ``completion`` names."""
    number = int.from_bytes(hashlib.blake2b(completion.encode(), digest_size=8).digest(), "big")
    return _base62(number, _NAME) + _base62(index, _LENGTH - _NAME)


def same_completion(first: str, second: str) -> bool:
    """Return True if both are ids of ``call_id`` for tool calls of one completion."""
    return len(first) == len(second) == _LENGTH and first[:_NAME] == second[:_NAME] and first.isalnum()


def _base62(number: int, length: int) -> str:
    digits = []
    for _ in range(length):
        number, digit = divmod(number, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(reversed(digits))
