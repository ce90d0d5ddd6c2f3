"""A page of a trial in a headless browser, for tests that are not coroutines."""

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from realsys.observe.page.app import ViewServer
from tests.support.view.chromium import Page, chromium
from tests.support.view.shown_trial import live_status, sample_trial


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
