"""Routes of the status page and the sample viewer: a thin ASGI shell over readers of the trial folder.

    /                       status page                  /view/run       identity, progress, evaluations, ledger, notes
    /view/samples           sample viewer                /view/curves    series of the step log
    /view/static/{file}     their styles and scripts     /view/live      status of the manager; null if none answers
    /view/api/sources       sources of samples
    /view/api/list          samples of a source that pass a filter
    /view/api/sample        one sample with its tokens

The routes of /view/api show data of the trial and need its token (``SECRET``). All are GET and change nothing. Files
are read in one thread, one request at a time (``Desk``), so that the event loop of a manager never waits for a disk.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from realsys.cluster.files import FileStamp, file_stamp
from realsys.cluster.http_server import Admission, Guard, HttpServer
from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError, RealsysError
from realsys.observe.page.trial_reader import TrialReader
from realsys.observe.samples.catalogue import Catalogue
from realsys.observe.samples.filters import PROMPT_END, Filter, choose

log = logging.getLogger(__name__)

SECRET = ("/view/api/sources", "/view/api/list", "/view/api/sample")
OPEN = ("/view/run", "/view/curves", "/view/live")

STATIC = Path(__file__).with_name("static")
TURN_S = 15.0  # longest wait for the request before
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
#: nothing of another host, no inline script, no markup from data
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

#: returns GET /status of the manager; None if no manager answers
Live = Callable[[], Awaitable[dict[str, Any] | None]]
T = TypeVar("T")


class Desk:
    """One request at a time reads the trial folder, in a thread that ends with it."""

    def __init__(self, paths: TrialPaths, is_running: Callable[[], bool]) -> None:
        self._paths = paths
        self._is_running = is_running
        self._turn = asyncio.Semaphore(1)
        self._config: FileStamp | None = None  # stamp of the configuration that both readers have
        self._trial: TrialReader | None = None
        self._catalogue: Catalogue | None = None

    async def read(self, work: Callable[[], T]) -> T:
        """Return the result of ``work``, which the thread computes. Raises TimeoutError after TURN_S without a turn.

        If the caller is cancelled the work continues, and its result serves the next request.
        """
        async with asyncio.timeout(TURN_S):
            await self._turn.acquire()
        thread = ThreadPoolExecutor(1, thread_name_prefix="view")
        result = asyncio.get_running_loop().run_in_executor(thread, work)
        result.add_done_callback(lambda _: self._turn.release())
        thread.shutdown(wait=False)
        return await asyncio.shield(result)

    def trial(self) -> TrialReader:
        """Return the reader of the trial; call it in ``read``. Raises ConfigError for a folder that is not one."""
        self._check_config()
        if self._trial is None:
            self._trial = TrialReader(self._paths, self._is_running)
        return self._trial

    def catalogue(self) -> Catalogue:
        """Return the samples of the trial; call it in ``read``. Raises ConfigError."""
        self._check_config()
        if self._catalogue is None:
            self._catalogue = Catalogue(self._paths)
        return self._catalogue

    def _check_config(self) -> None:
        """Forget both readers if the trial was resumed with another configuration since they read it."""
        stamp = file_stamp(self._paths.config)
        if stamp != self._config:
            self._config, self._trial, self._catalogue = stamp, None, None


def routes(paths: TrialPaths, live: Live, is_running: Callable[[], bool] = lambda: True) -> list[BaseRoute]:
    """Return the routes for the trial in ``paths``. ``is_running`` says if its launcher lives; it may read files."""
    desk = Desk(paths, is_running)

    def answers(make: Callable[[Request], object]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                return _json(await desk.read(lambda: make(request)))
            except RealsysError as error:
                return _json({"error": str(error)}, 400)
            except OSError as error:  # TimeoutError, too
                log.warning("%s: %s", request.url.path, error or type(error).__name__)
                return _json({"error": f"cannot be read now: {error or 'reading takes long; try again'}"}, 503)

        return endpoint

    async def status(request: Request) -> Response:
        return _json(await live())

    return [
        Route("/", _page("status.html")),
        Route("/view/samples", _page("samples.html")),
        Route("/view/static/{name}", _static),
        Route("/view/run", answers(lambda _: desk.trial().run())),
        Route("/view/curves", answers(lambda request: desk.trial().curve_document(_seen(request)))),
        Route("/view/live", status),
        Route("/view/api/sources", answers(lambda _: desk.catalogue().sources())),
        Route("/view/api/list", answers(lambda request: _listed(desk.catalogue(), request))),
        Route("/view/api/sample", answers(lambda request: _sample(desk.catalogue(), request))),
    ]


def _seen(request: Request) -> int:
    text = request.query_params.get("seen", "")
    return int(text[:12]) if text[:12].isdecimal() else -1


def _listed(catalogue: Catalogue, request: Request) -> dict[str, Any]:
    source = catalogue.open(request.query_params.get("source", ""))
    found = choose(source, Filter.of(request.query_params), time.monotonic)
    firsts = {row.group: row.sample_id for row in reversed(found.rows)}
    prompts = {group: source.prompt(sample_id)[-PROMPT_END:] for group, sample_id in firsts.items()}
    return {"title": source.title, "prompts": prompts, **msgspec.structs.asdict(found)}


def _sample(catalogue: Catalogue, request: Request) -> object:
    return catalogue.open(request.query_params.get("source", "")).view(request.query_params.get("id", ""))


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, _HEADERS, "application/json")


def _page(name: str) -> Callable[[Request], Awaitable[Response]]:
    content = (STATIC / name).read_bytes()

    async def page(request: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type="text/html")

    return page


#: read once: no request names a file of the disk
_FILES = {path.name: path.read_bytes() for path in sorted(STATIC.iterdir()) if path.suffix in (".css", ".js")}


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _FILES:
        return _json({"error": "not found"}, 404)
    return Response(_FILES[name], headers=_HEADERS, media_type=_TYPES[Path(name).suffix])


# ---- `realsys view`: the page of a trial on a loopback port, whether the trial runs or has ended


class ViewServer:
    """Server of one trial on 127.0.0.1, in a thread. ``address`` has its key in the fragment.

    Other users of the machine can connect to the port, so every route that shows the trial needs the key.
    """

    def __init__(self, paths: TrialPaths, live: Live, is_running: Callable[[], bool], port: int = 0) -> None:
        """Raises ConfigError if the port is taken."""
        self.key = secrets.token_urlsafe(16)
        app = Guard(
            Starlette(routes=routes(paths, live, is_running)),
            Admission(self.key, (*OPEN, *SECRET)),
            max_body=0,
            error=lambda message: {"error": message},
        )
        try:
            self._server = HttpServer(app, "127.0.0.1", port)
        except RealsysError as error:
            raise ConfigError("--port", port, str(error)) from None
        self.address = f"{self._server.url}/#key={self.key}"

    def start(self) -> None:
        """Serve in a thread. Raises WaitTimeout if it does not start."""
        self._server.start()

    def close(self) -> None:
        """Stop. Raises WaitTimeout if that takes too long."""
        self._server.close()


def serve_view(
    paths: TrialPaths,
    live: Live,
    is_running: Callable[[], bool],
    port: int = 0,
    say: Callable[[str], None] = print,
    *,
    about: str = "",
) -> None:
    """Serve until Ctrl-C. ``say`` gets ``about`` and the address, once it can be opened. Raises ConfigError."""
    server = ViewServer(paths, live, is_running, port)
    server.start()
    try:
        say(f"{about}\n{server.address}" if about else server.address)
        threading.Event().wait()
    except KeyboardInterrupt:
        say("")
    finally:
        server.close()
