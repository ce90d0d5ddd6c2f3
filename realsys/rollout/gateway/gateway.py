"""Gateway: the OpenAI endpoint of a RolloutWorker. Each episode has its own address and key.

    EpisodeSession ──open──> Gateway ──Capture──> base_url, api_key ──> agent ──HTTP──> Routes ──> Capture

The server starts when the first episode reads its address, so a worker whose agents only call ``session.generate`` has
no server. With a configured port it starts with the worker, so that a port which is in use ends the worker early.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from typing import TYPE_CHECKING

from realsys.cluster.http_server import HttpServer
from realsys.cluster.lease import CheckAlive, unleased
from realsys.config.backend_rules import backend_rules
from realsys.config.schema import Config
from realsys.config.trial_sizes import longest_sequence
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import RealsysError
from realsys.rollout.gateway.capture import COUNTS, Capture, CaptureSession, Shared
from realsys.rollout.gateway.choices import AUTO, CHANNELS, NONE, Vocabulary, format_of
from realsys.rollout.gateway.routes import MAX_BODY, Routes
from realsys.rollout.gateway.sampling import CallLimits

if TYPE_CHECKING:
    from realsys.rollout.gateway.parser import Parser

MOST_CLOSED = 10_000  # keys of ended episodes that are kept: their calls get 410, those with a wrong key 401
LEAST_BODY = 1 << 20
#: seconds in which an agent that lost its connection gets the same completion again: SDKs retry within seconds
RETRY_WINDOW_S = 60.0
_STOP_S = 5.0


class Gateway:
    """One per RolloutWorker, on the event loop of its episodes."""

    def __init__(
        self,
        shared: Shared,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        max_body: int = MAX_BODY,
        check_alive: CheckAlive = unleased,
    ) -> None:
        """Start the server if ``port`` is given. Raises RealsysError if the port is in use."""
        self._shared = shared
        self._address = host, port
        self._routes = Routes(self._find, max_body, check_alive)
        self._captures: dict[str, Capture] = {}
        self._closed: dict[str, str] = {}  # key -> cause of the end; the oldest first
        self._server: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None
        if port:
            self._start()

    def counts(self) -> dict[str, int]:
        """Return the calls, retries, undelivered completions and branches of all episodes. Any thread may call it."""
        return {f"gateway_{name}": self._shared.counts[name] for name in COUNTS}

    def open(self, session: CaptureSession) -> Capture:
        """Give an episode its address. Raises RealsysError if the server cannot run."""
        server = self._server or self._start()
        if self._serving is not None and self._serving.done():
            raise RealsysError(f"the gateway at {server.url} has ended")
        key = secrets.token_urlsafe(24)
        capture = Capture(session, f"{server.url}/e/{key}/v1", key, self._shared, self._ended)
        self._captures[key] = capture
        return capture

    async def close(self) -> None:
        """End all episodes and the server."""
        for capture in list(self._captures.values()):
            await capture.close("the RolloutWorker stops")
        if self._server is not None and self._serving is not None:
            self._server.stop()
            await asyncio.wait({self._serving}, timeout=_STOP_S)
            self._serving.cancel()

    def _start(self) -> HttpServer:
        self._server = HttpServer(self._routes, *self._address)
        self._server.listen()
        self._serving = asyncio.create_task(self._server.serve(), name="gateway")
        return self._server

    def _find(self, key: str) -> Capture | str | None:
        """Return the episode of a key, or the cause of its end, or None for a wrong key."""
        return self._captures.get(key) or self._closed.get(key)

    def _ended(self, capture: Capture) -> None:
        if self._captures.pop(capture.api_key, None) is not None:
            self._closed[capture.api_key] = capture.closed
            if len(self._closed) > MOST_CLOSED:
                del self._closed[next(iter(self._closed))]


def gateway_of(config: Config, tokenizer: TextTokenizer, index: int = 0, check_alive: CheckAlive = unleased) -> Gateway:
    """Build the gateway of RolloutWorker ``index``. Raises ConfigError, RealsysError."""
    settings = config.rollout.gateway
    tool_format = format_of(tokenizer.chat_source) if settings.tool_format == AUTO else settings.tool_format
    shared = Shared(
        tokenizer,
        functools.cache(lambda: _parser(config, tokenizer)),
        Vocabulary(tokenizer),
        CallLimits.of(config.rollout, longest_sequence(config)),
        settings.sampling,
        RETRY_WINDOW_S,
        chat=config.data.chat_template,
        grammars=backend_rules(config).grammars() and tool_format not in CHANNELS,
    )
    port = settings.port + index if settings.port else 0
    # A character takes up to 6 bytes in JSON; clients also send fields that the model does not get.
    useful = max(LEAST_BODY, 8 * shared.limits.row * tokenizer.longest_token)
    return Gateway(shared, settings.host, port, max_body=min(MAX_BODY, useful), check_alive=check_alive)


def check(config: Config, tokenizer: TextTokenizer) -> None:
    """Raise ConfigError for a format of tool calls that is not known, or whose parser cannot be built."""
    if config.rollout.gateway.tool_format != AUTO or format_of(tokenizer.chat_source) != NONE:
        _parser(config, tokenizer)


def _parser(config: Config, tokenizer: TextTokenizer) -> Parser:
    """Build the parser. The first chat calls this, not the start: the import of its library takes half a second."""
    from realsys.rollout.gateway.parser import parser_of

    return parser_of(tokenizer, config.rollout.gateway.tool_format, config.rollout.gateway.reasoning_format)
