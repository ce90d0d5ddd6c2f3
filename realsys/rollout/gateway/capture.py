"""Capture: all model calls of one episode that arrive over HTTP, and the rows that they become.

    request ──> Requests ──repeat──────────────────────────────────────────────┐
                   └─new──> Call ──Conversation.plan──> session.generate ──record──> Reply ──sent──> delivered

One object per episode. It does no network I/O: ``routes`` notifies it of replies that were sent and of connections
that broke. A call continues when its connection breaks, because an SDK whose timeout has passed repeats the request. It
is cancelled if no repeat arrives within the window.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from realsys.data.chat import text_of
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import MALFORMED, AgentError, DataError
from realsys.generation.client import SamplingSpec
from realsys.generation.completion import Completion
from realsys.manager.client import RolloutSuperseded
from realsys.manager.messages import LONGEST_PIN, POLICY
from realsys.reward.verifiers.contract import is_metric_name
from realsys.rollout.conversation import CompletionNode, Conversation, RequestPlan
from realsys.rollout.environments import Response
from realsys.rollout.gateway.choices import StreamedChoice, Vocabulary, opens_reasoning, read_choice
from realsys.rollout.gateway.dialect import BadRequest, Choice, Dialect, GatewayCall, GatewayReply, ReplyHead
from realsys.rollout.gateway.generate import SESSION_HEADER
from realsys.rollout.gateway.repeated_requests import RequestEntry, Requests
from realsys.rollout.gateway.replies import may_pass
from realsys.rollout.gateway.sampling import CallLimits, Mode, Wishes, check_tokens, ignored, spec_of
from realsys.types import CONSTRAINED, Row

if TYPE_CHECKING:
    from realsys.rollout.gateway.parser import Parser

ENDED = "the episode has ended"
COUNTS = ("calls", "retries", "undelivered", "branches")
NO_REWARDS: Mapping[str, float] = MappingProxyType({})
#: bounds on the failures and names of the model that are kept of one episode: agents can make any number of both
MOST_FAILURES, MOST_MODELS, MOST_IGNORED, _LONGEST_NAME = 64, 64, 16, 200
LONG_TEXT = 50_000  # characters; tokenising more would keep other episodes waiting
_ROLE = b'"role"'
UNSEEN = 2  # times the row limit is what a request may have: templates leave out parts, such as earlier reasoning
#: errors that are no failure of the engine: mistakes of the agent, and the end of the attempt
_NO_FAILURE = (BadRequest, DataError, AgentError, RolloutSuperseded)


class CaptureSession(Protocol):
    """The attributes of EpisodeSession that this module needs."""

    sampled: int

    @property
    def spec(self) -> SamplingSpec: ...

    async def generate(
        self,
        token_ids: list[int],
        spec: SamplingSpec | None = None,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
        *,
        policy: str = "",
        or_trained: bool = False,
    ) -> Completion: ...


@dataclass(frozen=True, slots=True)
class Shared:
    """Parts that all episodes of a gateway share. ``counts``: calls, retries, undelivered, branches of the worker."""

    tokenizer: TextTokenizer
    parser: Callable[[], Parser]
    vocabulary: Vocabulary
    limits: CallLimits
    mode: Mode
    window_s: float
    chat: bool = True
    grammars: bool = False
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    wishes: Wishes = field(default_factory=Wishes)
    counting: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(1)
    )  # one long text is counted at a time


@dataclass(slots=True)
class Exchange:
    """One request with its repeats, and the task that samples its completions.

    streamed  completions of a stream, as far as they are sampled
    news      done when there are more tokens in them; a new one is then in its place
    """

    entry: RequestEntry
    call: GatewayCall
    head: ReplyHead
    session: str  # its X-Session-ID
    task: asyncio.Task[GatewayReply]
    nodes: list[CompletionNode] = field(default_factory=list)
    streamed: list[StreamedChoice] = field(default_factory=list)
    news: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def add(self, choice: StreamedChoice, tokens: Sequence[int]) -> None:
        """Add tokens that were sampled to a choice of ``streamed``."""
        choice.add(tokens)
        self.news.set_result(None)
        self.news = asyncio.get_running_loop().create_future()


class Capture:
    """The calls of one episode. ``base_url`` ends with /v1; ``api_key`` names the episode."""

    def __init__(
        self,
        session: CaptureSession,
        base_url: str,
        api_key: str,
        shared: Shared,
        on_close: Callable[[Capture], None] = lambda capture: None,
    ) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self.sampling: Mode = shared.mode  # an agent may set it for its episode
        self._received: dict[str, list[CompletionNode]] = {}  # id of a reply that the agent has -> its completions
        self._session = session
        self._shared = shared
        self._on_close = on_close
        self._name = f"{secrets.token_hex(6)}-"  # begin of the ids of its completions
        self._conversation = Conversation(shared.tokenizer, shared.chat)
        self._echoes = Echoes()
        self._requests = Requests(shared.window_s)
        self._exchanges: dict[int, Exchange] = {}
        self._nodes: list[CompletionNode] = []
        self._by_session: dict[str, list[CompletionNode]] = {}
        self._failures: dict[bytes, Exception] = {}  # requests whose last reply was an error of the engine
        self._models = {POLICY: None}  # names that the agent gave to the model, in order
        self._asked: dict[str, float] = {}  # sampling settings that the agent sent last
        self._ignored: dict[str, int] = {}  # fields without effect, and how often the agent sent them
        self._running = 0  # completions that are sampled now
        self._reserved = 0  # tokens that the running calls may sample
        self._turns = 0
        self._malformed = 0  # tool calls that stay in the text
        self._constrained = 0  # completions that were kept to a grammar
        self._timer: asyncio.TimerHandle | None = None
        self.closed = ""  # cause of the end
        self.turn = asyncio.Lock()  # a burst of this episode is read one request at a time; others come between them

    @property
    def error(self) -> Exception | None:
        """First failure of a call that no retry has repaired. The episode fails with it, whatever the agent returns."""
        return next(iter(self._failures.values()), None)

    @property
    def context_length(self) -> int:
        """Tokens of prompt and completion together."""
        return self._shared.limits.row

    @property
    def waiting(self) -> int:
        """Number of requests whose agent waits for the reply."""
        return self._requests.waiting

    def models(self) -> list[str]:
        """Return the names of the model: ``policy``, and those that the agent has used."""
        return list(self._models)

    def rows(self, rewards: Mapping[str, float] = NO_REWARDS) -> list[Row]:
        """Build one row per branch, of the completions that the agent has received.

        ``rewards``: id of a completion -> reward for its last token; with n > 1 of each of its choices. Raises
        AgentError for an id that is not known.
        """
        for name, reward in rewards.items():
            if name not in self._received:
                raise AgentError(f"reward for {name!r}: the agent has received no completion with this id")
            for node in self._received[name]:
                node.reward = float(reward)
        return self._conversation.rows()

    def exclude(self, sessions: Collection[str]) -> None:
        """Take the completions of these sessions (X-Session-ID) out of training. In other rows they are context."""
        for session in sessions:
            for node in self._by_session.get(session, ()):
                node.trained = False

    def last(self) -> Response:
        """Return the completion of the policy in training that was delivered last. Raises AgentError without one."""
        first = [nodes[0].completion for nodes in self._received.values()]
        completions = [completion for completion in first if completion is not None and not completion.policy]
        if not completions:
            raise AgentError("the agent has received no completion")
        completion = completions[-1]
        text = self._shared.tokenizer.completion_text(completion.tokens.tolist())
        return Response(text, completion.finish_reason, len(completion.tokens), len(completions) - 1)

    def metrics(self) -> dict[str, float]:
        """Return numbers of the episode for the step log."""
        drift = self._conversation.drift
        numbers = {
            "gateway/calls": self._turns,
            "gateway/retries": self._requests.repeats,
            "gateway/undelivered": self._undelivered(),
            "gateway/branches": drift["branch"],
            "gateway/malformed_calls": self._malformed,
            CONSTRAINED: self._constrained,
            "gateway/boundary_inserted": drift["boundary_inserted"],
        }
        return {name: float(value) for name, value in (numbers | self._ignored | self._asked).items()}

    def check_body(self, body: bytes) -> None:
        """Refuse a body with more messages than a row has tokens before it is decoded. Raises BadRequest."""
        limits = self._shared.limits
        if (messages := body.count(_ROLE)) >= limits.row:  # in a text of JSON the quotes are escaped
            raise limits.too_long(f"the request has {messages} messages")

    async def tokens_of(self, call: GatewayCall) -> list[int]:
        """Return the tokens that the engine would receive for ``call``. Raises BadRequest, DataError."""
        await self._check_size(call)
        return self._plan(call).tokens

    def begin(self, dialect: Dialect, body: bytes, headers: Mapping[str, str]) -> Exchange:
        """Start a call, or join the one that this request repeats. Raises AgentError, BadRequest."""
        if self.closed:
            raise AgentError(self.closed)
        self._expire()
        # Agents of one episode that name their sessions do not repeat each other.
        session = headers.get(SESSION_HEADER, "")
        digest = hashlib.blake2b(f"{type(dialect).__name__} {session} ".encode() + body, digest_size=16).digest()
        retry = headers.get("x-stainless-retry-count", "0") != "0"
        try:
            entry, new = self._requests.begin(digest, headers.get("idempotency-key", ""), retry)
        except ValueError as error:
            raise BadRequest(400, str(error)) from None
        if not new:
            self._shared.counts["retries"] += 1
            return self._exchanges[entry.number]
        try:
            return self._start(entry, dialect.parse(body, headers), session)
        except Exception as error:
            self._requests.fail(entry, may_pass(error))
            raise

    def sent(self, exchange: Exchange) -> None:
        """Note that the whole reply was sent to an open connection."""
        if self._requests.sent(exchange.entry, time.monotonic()):
            for node in exchange.nodes:
                self._conversation.deliver(node)
            self._received[exchange.head.id] = exchange.nodes

    def broken(self, exchange: Exchange) -> None:
        """Note that the connection broke before the agent had the whole reply."""
        now = time.monotonic()
        self._requests.broken(exchange.entry, now)
        if self._timer is None and not self.closed and (end := self._requests.next_end()) is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, end - now), self._expire_and_watch)

    async def close(self, cause: str = ENDED) -> None:
        """Cancel the calls that run; later ones are refused with ``cause``."""
        if self.closed:
            return
        self.closed = cause
        self._on_close(self)
        if self._timer is not None:
            self._timer.cancel()
        tasks = [exchange.task for exchange in self._exchanges.values() if not exchange.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._exchanges.clear()
        self._shared.counts["undelivered"] += self._undelivered()
        self._shared.counts["branches"] += self._conversation.drift["branch"]

    def _start(self, entry: RequestEntry, call: GatewayCall, session: str) -> Exchange:
        check_tokens(call, self._shared.vocabulary.size)
        self._shared.limits.admit(call, self._turns, self._running, self._session.sampled)
        self._turns += 1
        self._shared.counts["calls"] += 1
        call.ignored += ignored(call, self.sampling, self._shared.grammars)
        self._shared.wishes.note_ignored(call.ignored)
        for name in (f"gateway/ignored_{name}" for name in call.ignored):
            if name in self._ignored or (len(self._ignored) < MOST_IGNORED and is_metric_name(name)):
                self._ignored[name] = self._ignored.get(name, 0) + 1
        self._asked |= self._shared.wishes.note(call, self.sampling)
        if len(self._models) < MOST_MODELS and len(call.model) <= _LONGEST_NAME:
            self._models.setdefault(call.model or POLICY)
        head = ReplyHead(f"{self._name}{entry.number}", int(time.time()), call.model or POLICY)
        exchange = Exchange(entry, call, head, session, asyncio.create_task(self._complete(entry.number)))
        # Without a connection no coroutine reads the error of a call, and asyncio would log that.
        exchange.task.add_done_callback(lambda task: self._end(call, task))
        self._running += call.n  # now, not when the task begins: requests may arrive before it
        self._exchanges[entry.number] = exchange
        return exchange

    async def _complete(self, number: int) -> GatewayReply:
        """Sample the completions of an exchange and record them."""
        exchange = self._exchanges[number]
        call, entry, session = exchange.call, exchange.entry, self._session
        reserved = 0
        try:
            await self._check_size(call)
            plan = self._plan(call)
            room = self._shared.limits.room(len(plan.tokens), session.sampled, call.n, self._reserved)
            opened = call.grammar is not None and opens_reasoning(self._shared.tokenizer, plan.tokens)
            spec = spec_of(call, session.spec, self.sampling, room, opened=opened)
            self._constrained += call.n * bool(spec.structural_tag)
            reserved = spec.max_new_tokens * call.n
            self._reserved += reserved
            if call.stream:
                make = partial(StreamedChoice, self._shared.tokenizer, self._shared.parser(), call, plan.tokens)
                exchange.streamed = [make() for _ in range(call.n)]
            listeners = [partial(exchange.add, choice) for choice in exchange.streamed]
            name = call.model if call.model != POLICY and len(call.model) <= LONGEST_PIN else ""
            completions = await _all(
                session.generate(
                    plan.tokens, spec, listeners[k] if listeners else None, policy=name, or_trained=bool(name)
                )
                for k in range(call.n)
            )
            choices = [self._record(exchange, plan, completion) for completion in completions]
        except Exception as error:
            del self._exchanges[number]
            self._requests.fail(entry, may_pass(error))
            self._note_failure(entry, error)
            raise
        finally:
            self._reserved -= reserved
        self._requests.complete(entry)
        self._failures.pop(entry.digest, None)
        head = exchange.head
        return GatewayReply(head.id, head.created, head.model, plan.tokens, choices, self._shared.vocabulary)

    def _end(self, call: GatewayCall, task: asyncio.Task[GatewayReply]) -> None:
        self._running -= call.n
        if not task.cancelled():
            task.exception()

    async def _check_size(self, call: GatewayCall) -> None:
        """Refuse texts that fit in no row: by their size, before any work, then by their tokens, which another thread
        counts. What is left takes no time that other episodes would notice. Raises BadRequest.
        """
        limits, tokenizer = self._shared.limits, self._shared.tokenizer
        most = UNSEEN * limits.row  # tokens
        if len(call.token_ids) >= limits.row:
            raise limits.too_long(f"the request has {len(call.token_ids)} tokens")
        if len(call.messages) >= limits.row:  # a template writes at least a token for each
            raise limits.too_long(f"the request has {len(call.messages)} messages")
        if (size := sum(map(len, call.texts()))) > most * tokenizer.longest_token:
            raise limits.too_long(f"the request has {size} characters")
        if size <= LONG_TEXT:
            return
        async with self._shared.counting:
            tokens = await asyncio.to_thread(tokenizer.count, "\n".join(call.texts()))
        if tokens > most:
            raise limits.too_long(f"the request has {tokens} tokens")

    def _note_failure(self, entry: RequestEntry, error: Exception) -> None:
        """Keep a failure of the engine. A call that was refused, or may be repeated, does not use up a turn."""
        if may_pass(error) or isinstance(error, (BadRequest, DataError)):
            self._turns -= 1
        if not isinstance(error, _NO_FAILURE):
            known = entry.digest in self._failures or len(self._failures) < MOST_FAILURES
            # Failures beyond the limit share one entry, which no repeat removes.
            self._failures[entry.digest if known else b""] = error

    def _record(self, exchange: Exchange, plan: RequestPlan, completion: Completion) -> Choice:
        shared, name = self._shared, f"{exchange.head.id}.{len(exchange.nodes)}"
        choice = read_choice(shared.tokenizer, shared.parser(), exchange.call, plan.tokens, completion, name)
        self._malformed += choice.malformed
        self._echoes.remember(choice)
        node = self._conversation.record(plan, completion, choice.message(), choice.stop)
        node.trained = not completion.policy
        exchange.nodes.append(node)
        self._nodes.append(node)
        self._by_session.setdefault(exchange.session, []).append(node)
        return choice

    def _plan(self, call: GatewayCall) -> RequestPlan:
        """Return the plan of a call. Its tokens extend the recorded ones. Raises DataError."""
        if call.kind == "tokens":
            return self._conversation.plan_tokens(call.token_ids)
        if call.kind == "text":
            return self._conversation.plan_text(call.text)
        try:
            return self._conversation.plan(self._echoes.restore(call.messages), call.tools, call.options)
        except MALFORMED as error:
            raise DataError(f"the messages cannot be shown to the model: {error}") from None

    def _undelivered(self) -> int:
        return sum(not node.delivered for node in self._nodes)

    def _expire_and_watch(self) -> None:
        """Cancel abandoned calls at the end of their window."""
        self._timer = None
        self._expire()
        if (end := self._requests.next_end()) is not None and not self.closed:
            delay = max(0.0, end - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._expire_and_watch)

    def _expire(self) -> None:
        for entry in self._requests.due(time.monotonic()):
            exchange = self._exchanges.pop(entry.number, None)
            if exchange is not None:
                exchange.task.cancel()  # no effect if it is done


async def _all(calls: Iterable[Coroutine[Any, Any, Completion]]) -> list[Completion]:
    """Await all calls; the first failure cancels the others."""
    first, *others = calls
    if not others:
        return [await first]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in (first, *others)]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


# ---- changes that clients make to assistant messages before they send them back
#
# A conversation stays one row only if its history equals the replies of the gateway. Two changes are known. Both can
# be undone exactly, because the episode remembers its replies:
#
#     a stop string     cut from the text by the API, and written again by the client (code agents of smolagents)
#     tool calls        written as text, "Calling tools:" and the repr of a list (tool agents of smolagents); calls that
#                       the client read from the text itself are appended in the same way


_CALLS = "Calling tools:\n["


class Echoes:
    """Replies of one episode that clients are known to change."""

    def __init__(self) -> None:
        self._stopped: dict[str, str] = {}  # text with its stop string -> text that was returned
        self._calls: dict[str, dict[str, Any]] = {}  # id -> tool call that was returned

    def remember(self, choice: Choice) -> None:
        """Note a completion that is returned to the client."""
        if choice.stop is not None:
            self._stopped[(choice.text + choice.stop).strip()] = choice.text
        for call in choice.tool_calls:
            self._calls[call["id"]] = call

    def restore(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages as they were returned to the client. Raises DataError for a content that is no text."""
        return [self._restored(message) if message.get("role") == "assistant" else message for message in messages]

    def _restored(self, message: dict[str, Any]) -> dict[str, Any]:
        text = text_of(message.get("content")) or ""
        if message.get("tool_calls") or not (self._stopped or _CALLS in text):
            return message
        content, calls = self._split(text)
        content = self._stopped.get(content.strip(), content)
        if content == text:
            return message
        return message | {"content": content} | ({"tool_calls": calls} if calls else {})

    def _split(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Split a text into what the model wrote and the calls that the client wrote behind it."""
        head, mark, _ = text.rpartition(_CALLS)
        if not mark:
            return text, []
        try:
            written = ast.literal_eval(text[len(head) + len(mark) - 1 :])
            ids = [call["id"] for call in written]
        except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
            return text, []
        return head.strip(), [self._calls[number] for number in ids if number in self._calls]
