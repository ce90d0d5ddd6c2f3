"""A headless Chromium that a test or a picture drives over its DevTools protocol. It has a profile of its own."""

import asyncio
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from realsys.observe.page.app import ViewServer
from tests.support.view.shown_trial import live_status, sample_trial

START_S = 60.0
REPLY_S = 60.0
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--disable-extensions",
    "--disable-dev-shm-usage", "--disable-crash-reporter", "--disable-breakpad", "--force-color-profile=srgb",
    "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip
#: the page has drawn its data, or asks for its key
READY = "document.body?.dataset.ready || document.getElementById('keyForm')?.hidden === false"


class BrowserError(Exception):
    """The page or the browser failed."""


class Page:
    """One tab. ``problems`` collects errors of scripts, blocked resources, and requests that failed."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol. Raises BrowserError."""
        self._number += 1
        future = self._replies[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        async with asyncio.timeout(REPLY_S):
            reply = await future
        if "error" in reply:
            raise BrowserError(f"{method}: {reply['error'].get('message')}")
        return dict(reply["result"])

    async def open(self, url: str, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        """Open an address and wait until the page says that it has drawn its data."""
        phone = width < 600
        await self.call("Page.navigate", url="about:blank")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        await self.call("Page.navigate", url=url)
        await self.until(READY)

    async def run(self, script: str) -> Any:
        """Return the value of an expression, awaited. Raises BrowserError if it throws."""
        reply = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in reply:
            raise BrowserError(f"{script}: {reply['exceptionDetails'].get('exception', {}).get('description')}")
        return reply["result"].get("value")

    async def until(self, condition: str) -> None:
        """Return when an expression is true. Raises BrowserError after REPLY_S."""
        look = f"const look = () => ({condition}) ? done(true) : setTimeout(look, 20); look();"
        script = f"new Promise(done => {{ {look} }})"
        try:
            await self.run(script)
        except TimeoutError:
            raise BrowserError(f"never true: {condition}; {self.problems}") from None

    async def text(self, selector: str) -> str:
        """Return the text of an element as it is shown."""
        return str(await self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def picture(self, path: Path, height: int | None = None) -> None:
        """Write the whole page, or its first ``height`` pixels, as PNG."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {
            "x": 0,
            "y": 0,
            "width": size["width"],
            "height": min(height or size["height"], size["height"]),
            "scale": 1,
        }
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                if (future := self._replies.pop(event["id"], None)) is not None and not future.done():
                    future.set_result(event)
                continue
            self._note(event.get("method", ""), event.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.problems.append(str(details.get("exception", {}).get("description") or details.get("text")))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])


@contextlib.asynccontextmanager
async def chromium(program: str = "chromium") -> AsyncIterator[Page]:
    """Start a browser with one tab; end it, and everything that it started, at the end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = (program, *FLAGS, f"--user-data-dir={profile}", "about:blank")
        quiet = subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet, start_new_session=True)
        try:
            port = await _port(Path(profile) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session, _socket(session, port) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await page.call(f"{domain}.enable")
                yield page
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


@contextlib.asynccontextmanager
async def _socket(session: aiohttp.ClientSession, port: int) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """Connect to the tab."""
    async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
        target = next(tab for tab in await answer.json() if tab["type"] == "page")
    async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
        yield socket


async def _port(file: Path, process: asyncio.subprocess.Process) -> int:
    """Return the port of the browser once it has written it."""
    async with asyncio.timeout(START_S):
        while (port := _written_port(file)) is None:
            if process.returncode is not None:
                raise BrowserError(f"chromium ended with code {process.returncode}")
            await asyncio.sleep(0.05)
        return port


def _written_port(file: Path) -> int | None:
    lines = file.read_text().splitlines() if file.exists() else []
    return int(lines[0]) if len(lines) > 1 else None


async def _main(url: str, path: str, width: int, dark: bool, *scripts: str) -> None:
    async with chromium() as page:
        await page.open(url, width, 900, dark=dark)
        for script in scripts:
            await page.run(script)
        await page.picture(Path(path))
        print("\n".join(page.problems) or "no problem")


if __name__ == "__main__":
    address, target, pixels, scheme, *more = sys.argv[1:]
    asyncio.run(_main(address, target, int(pixels), scheme == "dark", *more))


# ---- A page of a trial in a headless browser, for tests that are not coroutines


class Browser:
    """One tab, and a server of a sample trial. ``servers``, ``bad``: what its manager says; None: no manager."""

    def __init__(self, runner: asyncio.Runner, page: Page, folder: Path) -> None:
        self._runner = runner
        self.page = page
        self.servers: int | None = None
        self.bad = 0
        self.paths = sample_trial(folder)
        self.server = ViewServer(self.paths, self._live, lambda: self.servers is not None)
        self.server.start()

    @property
    def status_page(self) -> str:
        return self.server.address

    def samples_page(self, state: str = "") -> str:
        """Return the address of the sample viewer; ``state``: what follows the key."""
        return self.server.address.replace("/#", "/view/samples#") + state

    def open(self, url: str, width: int = 1280, *, dark: bool = False) -> None:
        """Open an address. The tab forgets the key, and what happened before."""
        self.page.problems.clear()
        self.page.requests.clear()
        if self.do(self.page.run("location.protocol")) == "http:":
            self.do(self.page.run("sessionStorage.clear()"))
        self.do(self.page.open(url, width, dark=dark))

    def js(self, script: str) -> Any:
        return self.do(self.page.run(script))

    def until(self, condition: str) -> None:
        self.do(self.page.until(condition))

    def text(self, selector: str) -> str:
        return self.do(self.page.text(selector))

    def texts(self, selector: str) -> list[str]:
        return list(self.js(f"[...document.querySelectorAll({selector!r})].map(node => node.innerText)"))

    def do(self, work: Any) -> Any:
        return self._runner.run(work)

    async def _live(self) -> dict[str, Any] | None:
        return None if self.servers is None else live_status(self.servers, self.bad)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser and a server of a sample trial."""
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        context = chromium()
        page = runner.run(_entered(context))
        made = Browser(runner, page, Path(folder))
        try:
            yield made
        finally:
            made.server.close()
            runner.run(_left(context))


async def _entered(context: contextlib.AbstractAsyncContextManager[Page]) -> Page:
    return await context.__aenter__()


async def _left(context: contextlib.AbstractAsyncContextManager[Page]) -> None:
    await context.__aexit__(None, None, None)
