"""Pictures of the status page and the sample viewer of a trial, for the docs: part of `make pictures`.

The page of an ended trial has no servers; pictures of a run that goes on are made by its manager's address and token.
"""

import asyncio
import shutil
from pathlib import Path

from realsys.config.paths import TrialPaths
from realsys.observe.page.app import ViewServer
from realsys.train.record_files import recorded_steps
from tests.support.view.chromium import chromium

WIDTH, PHONE, HEIGHT = 1280, 390, 844
BROWSER = "chromium"
#: colours some tokens of the longest wrong completion, and shows one of them
_POINT = "document.querySelector('#turns .sampled span:nth-child(20)').click()"


def view_pictures(paths: TrialPaths, images: Path) -> list[Path]:
    """Write status_page.png, sample_viewer.png, and status_phone.png into ``images``; [] without a browser."""
    if shutil.which(BROWSER) is None:
        return []

    async def live() -> None:
        return None

    server = ViewServer(paths, live, lambda: False)
    server.start()
    try:
        return asyncio.run(_take(server, paths, images))
    finally:
        server.close()


async def _take(server: ViewServer, paths: TrialPaths, images: Path) -> list[Path]:
    made = [images / name for name in ("status_page.png", "status_phone.png", "sample_viewer.png")]
    wrong = f"&source=step:{max(recorded_steps(paths.records))}&verdict=wrong&order=stalest"
    async with chromium(BROWSER) as page:
        await page.open(server.address, WIDTH)
        await page.picture(made[0], 1450)
        await page.open(server.address, PHONE, HEIGHT, dark=True)
        await page.picture(made[1], HEIGHT)
        await page.open(server.address.replace("/#", "/view/samples#") + wrong, WIDTH)
        await page.run(_POINT)
        await page.picture(made[2], 760)
    return made
