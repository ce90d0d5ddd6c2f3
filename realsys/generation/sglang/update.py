"""New weights for SGLang: staged and verified during generation, loaded in a pause.

    stage, verify ──> hold ──> [drain] ──> interrupt ──> load ──> resume
                                              │ SGLang reports versions per token: it retracts and resumes requests
                                              └ it does not: it returns them early, and the rest of each is a new
                                                request, so that every piece has one version

If completions were open, one token is requested behind them: once it arrives, SGLang samples with the new weights.
After a load that failed the weights are unknown: SGLang is killed, and starts again unsynced.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from realsys.errors import GenerationError, RealsysError, WeightsError
from realsys.generation.backend import Materialise, Materialised
from realsys.generation.protocol import PauseMode, UpdateResult
from realsys.generation.sglang.api import Piece, Reply
from realsys.generation.sglang.keeper import Run
from realsys.generation.sglang.traffic import Traffic

log = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]  # HF name -> shape

PAUSE, LOAD = "pause", "load"  # reasons to hold trips
_FIRST_TOKEN_TIMEOUT_S = 60.0


class Updater:
    """Runs one update at a time, and no pause during a load."""

    def __init__(
        self, traffic: Traffic, shapes: Shapes, materialise: Materialise, *, drain: bool, timeout_s: float
    ) -> None:
        self._traffic = traffic
        self._shapes = shapes
        self._materialise = materialise
        self._drain = drain
        self._timeout_s = timeout_s
        self._order = asyncio.Lock()
        self._control = asyncio.Lock()
        self._stopped: Run | None = None  # the run that was paused
        self._probe: asyncio.Future[list[Reply]] | None = None  # request for one token of the new version
        self.done = 0  # updates that succeeded

    async def pause(self, mode: PauseMode) -> None:
        async with self._control:
            run = self._traffic.serving()
            self._traffic.hold(PAUSE)
            if self._probe is not None:
                self._probe.cancel()
            await self._interrupt(run, mode)

    async def resume(self) -> None:
        async with self._control:
            run = self._traffic.serving()
            await self._resume_sglang(run)
            self._traffic.release(PAUSE)

    async def update(self, path: str, version: int, *, abort_all: bool) -> UpdateResult:
        """Stage, verify and load. A bad version is a result; raises GenerationError if SGLang does not serve."""
        async with self._order:
            run, begin = self._traffic.serving(), time.perf_counter()
            target = run.scratch / f"v{version:08d}"
            try:
                staged = await asyncio.to_thread(self._stage, path, version, target)
            except (RealsysError, OSError) as error:
                log.warning("update to version %d failed: %s", version, error)
                return UpdateResult(False, str(error), {"stage_s": time.perf_counter() - begin})
            timings = {**staged.timings, "stage_s": time.perf_counter() - begin}
            try:
                result = await self._swap(run, staged.directory, version, abort_all, timings)
                if result.success:
                    self._traffic.path = path
                return result
            finally:
                await asyncio.to_thread(shutil.rmtree, staged.directory, ignore_errors=True)

    def _stage(self, source: str, version: int, target: Path) -> Materialised:
        directory = target
        try:
            staged = self._materialise(source, version, target)
            directory = staged.directory
            check_shapes(directory, self._shapes)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return staged

    async def _swap(
        self, run: Run, directory: Path, version: int, abort_all: bool, timings: dict[str, float]
    ) -> UpdateResult:
        traffic, ready = self._traffic, time.perf_counter()
        async with self._control:
            if traffic.serving() is not run:
                raise GenerationError("SGLang was restarted while the weights were staged", retryable=True)
            traffic.hold(LOAD)
            try:
                if self._drain and PAUSE not in traffic.holds:
                    await traffic.drained(self._timeout_s)
                drained = time.perf_counter()
                if abort_all:
                    traffic.abort()
                loaded = await self._load(run, directory, version, "abort" if abort_all else "retract")
            finally:
                traffic.release(LOAD)
        if isinstance(loaded, str):
            return UpdateResult(False, loaded, timings)
        begin, end = loaded
        self.done += 1
        timings |= {"drain_s": drained - ready, "pause_s": time.perf_counter() - drained, "load_s": end - begin}
        if any(traffic.open_completions()) and await self._samples(run, version):
            timings["first_token_s"] = time.perf_counter() - end
        return UpdateResult(True, f"serving version {version}", timings)

    async def _samples(self, run: Run, version: int) -> bool:
        """Wait for one token of the new version, queued behind the completions. False if a pause or an end is first."""
        piece = Piece(f"first{version:08d}", [0], {"max_new_tokens": 1, "temperature": 0.0})
        if PAUSE in self._traffic.holds:
            return False
        probe = self._probe = asyncio.ensure_future(run.api.generate([piece], _FIRST_TOKEN_TIMEOUT_S))
        try:
            await asyncio.wait({probe})
            return not probe.cancelled() and probe.exception() is None and bool(probe.result()[0].output_ids)
        finally:
            probe.cancel()
            self._probe = None

    async def _load(self, run: Run, directory: Path, version: int, mode: PauseMode) -> tuple[float, float] | str:
        """Interrupt, load, resume. Returns when the load began and ended, or why SGLang had to be killed."""
        traffic = self._traffic
        try:
            await self._interrupt(run, mode)
            begin = time.perf_counter()
            await run.api.load(directory, version, self._timeout_s)
            loaded = time.perf_counter()
            traffic.version = version
            if PAUSE not in traffic.holds:
                await self._resume_sglang(run)
        except GenerationError as error:
            log.error("update to version %d failed, SGLang is restarted: %s", version, error)
            traffic.down(f"SGLang is killed, because its weights are unknown: {error}")
            run.child.kill()
            return str(error)
        return begin, loaded

    async def _interrupt(self, run: Run, mode: PauseMode) -> None:
        """Stop SGLang's work. Running requests stay there, or are returned early (see the module's drawing)."""
        traffic = self._traffic
        if mode == "abort":
            if self._stopped is run:
                await run.api.pause("retract")  # a completion that is paused in place would not be returned
            await traffic.recall(traffic.abort())
        elif not run.reports:
            await traffic.recall(traffic.under_way())
        if run.reports:
            await run.api.pause("retract" if mode == "abort" else mode)
            self._stopped = run

    async def _resume_sglang(self, run: Run) -> None:
        if self._stopped is run:
            await run.api.resume()
            self._stopped = None


def check_shapes(directory: Path, expected: Shapes) -> None:
    """Raise WeightsError unless the directory has exactly these tensors: SGLang keeps old values for missing ones."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        shapes.update(_shapes_in(path))
    wrong = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
    if wrong:
        name = wrong[0]
        raise WeightsError(
            f"{directory}: tensor {name} has shape {shapes.get(name, 'missing')}, the served model has "
            f"{expected.get(name, 'no such tensor')}; {len(wrong)} tensors differ"
        )


def _shapes_in(path: Path) -> Shapes:
    try:
        with safe_open(path, framework="numpy") as file:  # reads the header only
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is not a safetensors file: {error}") from error
