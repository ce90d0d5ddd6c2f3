"""Makes the README's pictures again: `make pictures`, or `make pictures TRIAL=DIR` from a trial of experiment=arith.

run experiment=arith ──> curves.png ──> docs/images/arith_curves.png
                    ──> realsys view ──> Chromium ──> docs/images/status_page.png, status_phone.png, sample_viewer.png
                    ──> live display, 80x24 ──> docs/images/display.svg
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console, Group

from realsys.config.paths import TrialPaths, read_config
from realsys.errors import WaitTimeout
from realsys.observe.curves import draw_curves
from realsys.observe.page.app import ViewServer
from realsys.observe.screen.display import Frame, expected_workers, lines
from realsys.observe.screen.progress import TrialProgress, ask_once
from realsys.train.record_files import recorded_steps
from tests.support.polling import poll
from tests.support.view.chromium import chromium

IMAGES = Path(__file__).parents[3] / "docs" / "images"
_LOOK_S = 1.0
_RUN_S = 3600.0  # the run takes minutes on two cores
_STOP_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trial", nargs="?", type=Path, help="folder of a trial; without one, a run is made")
    trial = parser.parse_args().trial
    with contextlib.nullcontext(_ended(trial)) if trial else _run() as (paths, progress):
        curves(paths)
        display(paths, progress)
        status_page(paths)
    return 0


def _ended(trial: Path) -> tuple[TrialPaths, TrialProgress]:
    progress = TrialProgress()
    progress.read(trial / "steps.jsonl")
    return TrialPaths(trial.resolve()), progress


@contextlib.contextmanager
def _run() -> Iterator[tuple[TrialPaths, TrialProgress]]:
    """Run the experiment of the README. The progress is one from its middle."""
    scratch = Path(tempfile.gettempdir()) / "realsys"
    paths, middle = TrialPaths(scratch / "runs" / "arith" / "readme"), TrialProgress()
    words = ["run", "experiment=arith", f"fileroot={scratch / 'runs'}", "--trial", "readme", "--plain"]
    try:
        with subprocess.Popen([sys.executable, "-m", "realsys", *words]) as run:

            def look() -> None:
                nonlocal middle
                progress = _look(paths)
                if progress.step[0] <= progress.step[1] / 2 and progress.train and progress.status:
                    middle = progress

            watch(run, look)
        if run.returncode:
            sys.exit(run.returncode)
        yield paths, middle
    finally:
        shutil.rmtree(paths.root, ignore_errors=True)


def watch(run: subprocess.Popen[bytes], look: Callable[[], None], timeout_s: float = _RUN_S) -> None:
    """Call ``look`` about once per second until the run has ended. After ``timeout_s``: stop it, raise WaitTimeout."""

    def has_ended() -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(_LOOK_S)
        look()
        return run.poll() is not None

    try:
        poll(has_ended, f"the end of the run whose pictures are made (process {run.pid})", timeout_s)
    except WaitTimeout:
        run.terminate()
        try:
            run.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            run.kill()
        raise


def _look(paths: TrialPaths) -> TrialProgress:
    progress = TrialProgress()
    if paths.config.exists():
        progress.read(paths.steps)
        asyncio.run(ask_once(read_config(paths.config), paths, progress))
    return progress


def curves(paths: TrialPaths) -> None:
    draw_curves(read_config(paths.config), paths)
    _put(paths.curves, "arith_curves.png")


def display(paths: TrialPaths, progress: TrialProgress) -> None:
    """Draw the live display as it was at ``progress``."""
    console = Console(record=True, width=80, height=24, force_terminal=True, file=open(os.devnull, "w"))  # noqa: SIM115
    config = read_config(paths.config)
    name = f"{config.experiment}/{config.trial}"
    began, now = (progress.warmup or progress.train)[0]["time"], progress.train[-1]["time"]
    eta = config.asynchronous.max_staleness
    frame = Frame(name, f"runs/{name}", eta, expected_workers(config), elapsed_s=now - began)
    console.print(Group(*lines(progress, frame, 79, 23)))
    console.save_svg(str(IMAGES / "display.svg"), title="realsys run experiment=arith", unique_id="display")
    print(f"wrote {IMAGES / 'display.svg'}")


def status_page(paths: TrialPaths) -> None:
    """Take pictures of the status page and the sample viewer of the ended trial. Left out without Chromium."""
    made = view_pictures(paths, IMAGES)
    print(
        "\n".join(f"wrote {path}" for path in made) or "the status page has no new picture: chromium is not installed"
    )


def _put(picture: Path, name: str) -> None:
    shutil.copyfile(picture, IMAGES / name)
    print(f"wrote {IMAGES / name}")


if __name__ == "__main__":
    sys.exit(main())


# ---- Pictures of the status page and the sample viewer of a trial, for the docs: part of `make pictures`


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
