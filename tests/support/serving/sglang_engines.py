"""The engine over SGLang with ``sglang_stand_in`` in its place, for tests of what starts, watches and updates one."""

import functools
import os
import queue
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from realsys.errors import WeightsError
from realsys.generation.backend import Change, Materialised
from realsys.generation.child.engine import ChildEngine, Model
from realsys.generation.child.supervisor import Settings
from realsys.generation.completion import Completion
from realsys.generation.protocol import SamplingParams
from realsys.generation.sampling_rules import Limits
from realsys.generation.sglang.api import SglangApi
from realsys.generation.sglang.process import Launch
from tests.support.serving import sglang_stand_in

SHAPES = {"a": (2, 3), "b": (4,)}
STALLING = SamplingParams(max_new_tokens=10, temperature=0.5)
WAIT_S = 60.0
Changes = queue.SimpleQueue[Change]


@dataclass(frozen=True)
class StandIn:
    """In place of process.Launch."""

    flags: tuple[str, ...] = ()
    api: type[SglangApi] = SglangApi
    model_path: Path = Path("/models/base")
    tensor: int = 1

    def command(self, port: int) -> list[str]:
        return [sys.executable, sglang_stand_in.__file__, *self.flags, "--port", str(port)]

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def sized(self):
        return self

    def after_failure(self, error: str) -> None:
        return None


def materialise(source: str, version: int, target: Path, *, loaded: bool = False, group: bool = False) -> Materialised:
    """Stage as the worker does, without manifests: the folder's name selects the defect, or ``same`` weights."""
    name = Path(source).name
    if name == "same" and loaded:
        return Materialised(None, {}, lambda: None)
    if name == "corrupt":
        raise WeightsError(f"{source} is corrupt")
    target.mkdir(parents=True)
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    if name == "partial":
        del tensors["b"]
    save_file(tensors, target / "model.safetensors")
    if name in ("broken", "deadly"):
        (target / name).touch()
    return Materialised(target, {"verify_s": 0.25}, functools.partial(shutil.rmtree, target, ignore_errors=True))


class Engines:
    """Makes engines; those that it started are closed with it."""

    def __init__(self) -> None:
        self._started: list[ChildEngine] = []

    def __call__(
        self, *flags: str, start: bool = True, launch: Launch | None = None, **settings: object
    ) -> tuple[ChildEngine, Changes]:
        """Start an engine over a stand-in with these flags; return it with the state that it reports."""
        changes: Changes = queue.SimpleQueue()
        limits = Limits(vocabulary=97, eos=(96,), context=64, capacity=8, tokenizer=False, model_path="/models/base")
        bounds = ("start_timeout_s", "load_timeout_s", "silence_timeout_s")
        values = {**dict.fromkeys(bounds, WAIT_S), "max_restarts": 2, "first_backoff_s": 0.01, **settings}
        model, settings = Model(limits, SHAPES), Settings(**values)
        engine = ChildEngine(launch or StandIn(flags), model, materialise, settings, changes.put)
        if start:
            engine.start()
            self._started.append(engine)
            assert changes.get(timeout=WAIT_S) == Change(0)
        return engine, changes

    def close(self) -> None:
        for engine in self._started:
            engine.close()


@contextmanager
def engines() -> Iterator[Engines]:
    made = Engines()
    try:
        yield made
    finally:
        made.close()


def helper_of(text: str) -> int:
    """The pid that the stand-in printed of its helper."""
    return int(text.partition("helper ")[2].split()[0])


def generate(engine: ChildEngine, prompt: list[int], rid: str = "", **params: object) -> Future[list[Completion]]:
    return engine.generate(rid, prompt, SamplingParams(**{"max_new_tokens": 4, **params}))
