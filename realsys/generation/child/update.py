"""New weights for an engine: staged and verified during generation, loaded in a pause.

    stage, verify ──> hold ──> [drain] ──> interrupt ──> load ──> resume
                                              │ the engine returns requests early, and the rest of each is a new
                                              │ request: before new prompts, and of one version
                                              └ with a grammar, which cannot continue: retracts and resumes them, if
                                                it reports versions per token

If completions were open, one token is requested behind them: once it arrives, the engine samples with the new weights.
With ``asynchronous.kv_on_update=keep`` the load drops nothing. All requests are returned early, and the rest of each
finds its keys in the cache. SGLang could pause them in place, but with overlapped scheduling the batch that is computed
then ends after the load: its tokens would get the new version, and could be computed with weights of both.
After a load that failed the weights are unknown: the engine is killed, and starts again unsynced.

Sleep returns all requests early, too, and holds them until an update after ``wake`` has loaded weights. If the engine
dies asleep, the next one has memory and weights: it is awake.

A version with the weights of the one before is not written and not loaded: only its number is new. No request is
interrupted, and the cache stays.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from realsys.errors import GenerationError, RealsysError, WeightsError
from realsys.generation.backend import ASLEEP, Materialise, Materialised
from realsys.generation.child.contract import Piece, Reply, is_lost
from realsys.generation.child.requests import Traffic
from realsys.generation.child.supervisor import EngineRun
from realsys.generation.protocol import UNSYNCED, PauseMode, UpdateResult
from realsys.observe.spans import span

if TYPE_CHECKING:
    from realsys.weights.group import Senders

log = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]  # HF name -> shape

PAUSE, LOAD, SLEEP = "pause", "load", "sleep"  # reasons to hold trips
_FIRST_TOKEN_TIMEOUT_S = 60.0


class Updater:
    """Runs one update at a time, and no pause during a load."""

    def __init__(
        self, traffic: Traffic, shapes: Shapes, materialise: Materialise, *, ranks: int, drain: bool, timeout_s: float
    ) -> None:
        self._traffic = traffic
        self._shapes = shapes
        self._materialise = materialise
        self._ranks = ranks
        self._drain = drain
        self._timeout_s = timeout_s
        self._order = asyncio.Lock()
        self._control = asyncio.Lock()
        self._stopped: EngineRun | None = None  # the run that was paused
        self._asleep: EngineRun | None = None  # the run that has released its memory
        self._newest: EngineRun | None = None  # the run that has the version that was staged last
        self._probe: asyncio.Future[list[Reply]] | None = None  # request for one token of the new version
        self.done = 0  # updates that succeeded

    @asynccontextmanager
    async def between(self) -> AsyncIterator[bool]:
        """Let no update and no sleep begin. Gives True if the engine has the version that was staged last.

        Raises GenerationError if it has an earlier one, because it is not known which weights these are.
        """
        async with self._order:
            run = self._traffic.serving()
            if self._newest is not run and self._traffic.version != UNSYNCED:
                raise GenerationError("the last update failed: adapters need the next one", retryable=True)
            yield self._newest is run

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
            if SLEEP not in self._traffic.holds:  # else the load resumes it
                await self._resume_sglang(run)
            self._traffic.release(PAUSE)

    async def sleep(self) -> None:
        """Release the memory. Raises GenerationError if that fails, and kills the engine then."""
        async with self._order, self._control:
            traffic, run = self._traffic, self._traffic.serving()
            if self._asleep is run:
                return
            traffic.hold(LOAD)
            try:
                await self._drained()
                async with self._or_kill(run, "sleep"):
                    await self._interrupt(run, "retract", recall=True)
                    await run.api.idle()
                    await run.api.sleep(self._timeout_s)
                self._asleep, self._newest = run, None
                traffic.hold(SLEEP)
                traffic.unloaded()
            finally:
                traffic.release(LOAD)

    async def wake(self) -> None:
        """Take the memory again. Raises GenerationError if that fails, and kills the engine then."""
        async with self._control:
            run = self._traffic.serving()
            if self._asleep is run:
                async with self._or_kill(run, "wake"):
                    await run.api.wake(self._timeout_s)
                self._asleep = None

    async def update(self, path: str, version: int, *, abort_all: bool) -> UpdateResult:
        """Stage, verify and load. A bad version is a result; raises GenerationError if the engine does not serve."""
        async with self._order:
            run, begin = self._traffic.serving(), time.perf_counter()
            if self._asleep is run:
                return UpdateResult(False, ASLEEP)
            target = run.scratch / f"v{version:08d}"
            # Unknown until the update succeeds: a version may equal one that was staged and never loaded.
            loaded, self._newest = self._newest is run, None
            try:
                with span("stage", f"version/{version}"):
                    staged = await asyncio.to_thread(self._stage, path, version, target, loaded)
            except (RealsysError, OSError) as error:
                log.warning("update to version %d failed: %s", version, error)
                return UpdateResult(False, str(error), {"stage_s": time.perf_counter() - begin})
            timings = {**staged.timings, "stage_s": time.perf_counter() - begin}
            try:
                if staged.directory is None and staged.senders is None:
                    result = await self._renumber(run, version, abort_all, timings)
                else:
                    result = await self._swap(run, staged, version, abort_all, timings)
            finally:
                await asyncio.to_thread(staged.release)
            if result.success:
                self._traffic.path = path
                self._newest = run
                self.done += 1
            return result

    def _stage(self, source: str, version: int, target: Path, loaded: bool) -> Materialised:
        staged = self._materialise(source, version, target, loaded=loaded, group=True)
        try:
            if staged.directory is not None:
                check_shapes(staged.directory, self._shapes)
            elif staged.senders is not None:
                _compare(source, staged.senders.shapes, self._shapes)
        except BaseException:
            staged.release()
            raise
        return staged

    async def _renumber(self, run: EngineRun, version: int, abort_all: bool, timings: dict[str, float]) -> UpdateResult:
        """Serve the same weights as ``version``."""
        traffic, begin = self._traffic, time.perf_counter()
        async with self._control:
            self._check_serves(run)
            if abort_all:
                await traffic.recall(traffic.abort())
            if run.reports:
                try:
                    await run.api.renumber(version)
                except GenerationError as error:  # the weights are known; the next update loads them whole
                    return UpdateResult(False, str(error), timings)
            traffic.loaded(version, same=True)
        return UpdateResult(True, f"serving version {version}", {**timings, "load_s": time.perf_counter() - begin})

    def _check_serves(self, run: EngineRun) -> None:
        if self._traffic.serving() is not run:
            raise GenerationError(f"{run.child.name} was restarted while the weights were staged", retryable=True)

    async def _swap(
        self, run: EngineRun, staged: Materialised, version: int, abort_all: bool, timings: dict[str, float]
    ) -> UpdateResult:
        traffic, ready = self._traffic, time.perf_counter()
        async with self._control:
            self._check_serves(run)
            traffic.hold(LOAD)
            try:
                await self._drained()
                drained = time.perf_counter()
                if abort_all:
                    traffic.abort()
                with span("pause", f"version/{version}"):
                    loaded = await self._load(run, staged, version, abort_all)
            finally:
                traffic.release(LOAD)
        if isinstance(loaded, str):
            return UpdateResult(False, loaded, timings)
        begin, end = loaded
        timings |= {"drain_s": drained - ready, "pause_s": time.perf_counter() - drained, "load_s": end - begin}
        if any(traffic.open_completions()) and await self._samples(run, version):
            timings["first_token_s"] = time.perf_counter() - end
        return UpdateResult(True, f"serving version {version}", timings)

    async def _drained(self) -> None:
        if self._drain and PAUSE not in self._traffic.holds:
            await self._traffic.drained(self._timeout_s)

    async def _samples(self, run: EngineRun, version: int) -> bool:
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

    async def _load(
        self, run: EngineRun, staged: Materialised, version: int, abort_all: bool
    ) -> tuple[float, float] | str:
        """Interrupt, load, resume. Returns when the load began and ended, or why the version is not served.

        The engine then has its earlier weights, or had to be killed.
        """
        traffic = self._traffic
        flush = traffic.keys.drops(traffic.version, version)
        try:
            async with self._or_kill(run, f"update to version {version}"):
                # SGLang would return the requests of a pause without their tokens: these are retracted.
                recall = traffic.keys.keep and self._stopped is not run
                await self._interrupt(run, "abort" if abort_all else "retract", recall=recall)
                if flush and not run.reports:  # else it is paused
                    await run.api.idle()
                begin = time.perf_counter()
                problem = ""
                if staged.directory is not None:
                    await run.api.load(staged.directory, version, self._timeout_s, flush=flush)
                elif staged.senders is not None:
                    problem = await self._receive(run, staged.senders, version, flush)
                loaded = time.perf_counter()
                if not problem:
                    traffic.loaded(version)
                    traffic.holds.discard(SLEEP)  # those that it held are let go with the load
                if PAUSE not in traffic.holds:
                    await self._resume_sglang(run)
        except GenerationError as error:
            return str(error)
        return problem or (begin, loaded)

    async def _receive(self, run: EngineRun, senders: Senders, version: int, flush: bool) -> str:
        try:
            order = await senders.order(self._ranks, everything=run.api.whole)
        except WeightsError as error:
            return str(error)
        return await run.api.receive(order, version, self._timeout_s, flush=flush)

    @asynccontextmanager
    async def _or_kill(self, run: EngineRun, work: str) -> AsyncIterator[None]:
        """Kill the engine if ``work`` fails, because its weights are then unknown. Raises GenerationError with why."""
        traffic = self._traffic
        try:
            yield
        except GenerationError as error:
            # A lost connection is most often a death, whose cause is in the exit status and in the last lines.
            problem = f"{error}; {await run.child.last_words()}" if is_lost(error) else str(error)
            log.error("%s failed, %s is restarted: %s", work, run.child.name, problem)
            if traffic.run is run:  # it is not, if the engine has died
                traffic.down(f"{run.child.name} is killed, because its weights are unknown: {problem}")
            run.child.kill()
            raise GenerationError(problem, retryable=True) from error

    async def _interrupt(self, run: EngineRun, mode: PauseMode, *, recall: bool = False) -> None:
        """Stop the engine's work. Running requests stay there, or are returned early (see the module's drawing)."""
        traffic = self._traffic
        if mode == "abort" or recall or not run.reports:
            if self._stopped is run:
                await run.api.pause("retract")  # a completion that is paused in place would not be returned
            await traffic.recall(traffic.abort() if mode == "abort" else traffic.under_way())
        elif self._stopped is not run:
            await traffic.recall(traffic.divisible())
        if run.reports:
            await run.api.pause("retract" if mode == "abort" else mode)
            self._stopped = run

    async def _resume_sglang(self, run: EngineRun) -> None:
        if self._stopped is run:
            await run.api.resume()
            self._stopped = None


def check_shapes(directory: Path, expected: Shapes) -> None:
    """Raise WeightsError unless the directory has exactly these tensors: engines keep old values of others."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        shapes.update(_shapes_in(path))
    _compare(str(directory), shapes, expected)


def _compare(source: str, shapes: Shapes, expected: Shapes) -> None:
    wrong = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
    if wrong:
        name = wrong[0]
        raise WeightsError(
            f"{source}: tensor {name} has shape {shapes.get(name, 'missing')}, the served model has "
            f"{expected.get(name, 'no such tensor')}; {len(wrong)} tensors differ"
        )


def _shapes_in(path: Path) -> Shapes:
    try:
        with safe_open(path, framework="numpy") as file:  # reads the header only
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is not a safetensors file: {error}") from error
