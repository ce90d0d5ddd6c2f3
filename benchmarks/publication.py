"""The time that training waits for a weight version, and for the checksums of its record: on the critical path, as
before, and during the next step.

One bf16 model of a Qwen2 shape, 0.25 GB unless told otherwise, on the file system of ``--folder``. In each round both
ways run one after the other, each with a step of matrix products on one thread. Ratios are medians over the rounds of
the ratio in one round.

    on the path   the parameters are hashed for the record, then hashed, written and synced by the transport's writer
    in background ``WeightSaver.copy`` on the training thread; ``save`` on a second thread while the step runs

    python -m benchmarks.publication [--rounds 4] [--scale 0.5] [--folder /tmp]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks._table import report
from benchmarks.weights import Tensors, make_model
from realsys.train.megatron.device import Device
from realsys.train.requests import CopyWeightsRequest, SaveWeightsRequest
from realsys.train.worker.weight_saver import WeightSaver, checksums_of
from realsys.weights.contract import Share
from realsys.weights.disk.manifest import DiskPlan
from realsys.weights.disk.writer import DiskWriter, ShardWriter

STEP_S = 2.5  # seconds of a step, about


class Actor:
    """A role whose parameters are ``tensors``, as WeightSaver uses it."""

    def __init__(self, tensors: Tensors) -> None:
        self.name, self.device = "actor", Device(torch.device("cpu"), "gloo")
        self.groups = SimpleNamespace(rank=0, mesh=SimpleNamespace(layout=SimpleNamespace(world_size=1)))
        self.engine: Any = self
        self.is_offloaded = False
        self.settings = SimpleNamespace(lora=SimpleNamespace(rank=0))
        self._tensors = tensors

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()

    def onload(self) -> None: ...

    def offload(self) -> None: ...


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Rounds:
    """Seconds of each part, one number per round."""

    def __init__(self, root: Path, tensors: Tensors) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._root = root
        self._tensors = tensors
        self._path_writer = DiskWriter(ShardWriter())
        self._actor: Any = Actor(tensors)
        self._saver = WeightSaver(0, DiskWriter(ShardWriter()), 60.0)
        self._matrix = torch.randn(768, 768)
        products = 20
        self._products = max(1, round(products * STEP_S / timed(lambda: self._multiply(products))))

    def run(self, version: int) -> None:
        """Take a step in each way, and one without a version."""
        for tensor in self._tensors.values():
            tensor.add_(1e-3)
        plans = [self._folder(way, version) for way in ("path", "beside")]
        self._add("step alone", timed(lambda: self._multiply(self._products)))
        digest = timed(lambda: checksums_of(self._tensors))
        share = Share("actor", version, 0, 1, plans[0])
        write = timed(lambda: self._path_writer.write(share, self._tensors))
        step = timed(lambda: self._multiply(self._products))
        self._add("digest", digest)
        self._add("write", write)
        self._add("path", digest + write)
        self._add("step and path", digest + write + step)
        copy = timed(lambda: self._saver.copy(self._actor, CopyWeightsRequest("actor", version)))
        request = SaveWeightsRequest("actor", version, plans[1])
        saving = threading.Thread(target=self._saver.save, args=(request,))
        saving.start()
        step = timed(lambda: self._multiply(self._products))
        rest = timed(saving.join)  # a publication that is longer than the step
        self._add("copy", copy)
        self._add("rest", rest)
        self._add("beside", copy + rest)
        self._add("step and beside", copy + step + rest)

    def _folder(self, way: str, version: int) -> DiskPlan:
        folder = self._root / way / f"v{version:08d}.bench.tmp"
        folder.mkdir(parents=True)
        return DiskPlan(str(folder))

    def _multiply(self, products: int) -> None:
        for _ in range(products):
            self._matrix @ self._matrix

    def _add(self, what: str, seconds: float) -> None:
        self.seconds.setdefault(what, []).append(seconds)


def rows(seconds: dict[str, list[float]], size: float) -> Iterator[dict[str, Any]]:
    def row(what: str, key: str, base: str = "", of: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {"what": what, "seconds": statistics.median(seconds[key])}
        if base:
            pairs = zip(seconds[key], seconds[base], strict=True)
            found |= {"ratio": statistics.median(a / b for a, b in pairs), "of": of}
        return found

    yield row("on the path: checksums for the record", "digest")
    yield row("on the path: write of the version", "write")
    yield row("on the path: training waits", "path")
    yield row("in the background: copy to host memory", "copy") | {"GB/s": size / statistics.median(seconds["copy"])}
    yield row("in the background: wait for a write longer than the step", "rest")
    yield row("in the background: training waits", "beside", "path", "wait on the path")
    yield row("step without a version", "step alone")
    yield row("step with a version on the path", "step and path", "step alone", "step without a version")
    yield row("step with a version in the background", "step and beside", "step alone", "step without a version")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--scale", type=float, default=0.5, help="of the model; 1: 0.5 GB")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        master = make_model(Path(folder) / "model", options.scale)
        tensors = {name: tensor.bfloat16() for name, tensor in master.items()}
        del master
        measured = Rounds(Path(folder), tensors)
        for version in range(options.rounds + 1):
            measured.run(version)
        size = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
        # The first round allocates the memory of the copy.
        seconds = {what: values[1:] for what, values in measured.seconds.items()}
    report("publication", [*rows(seconds, size)], {"GB": size, "rounds": options.rounds, "threads": 1})


if __name__ == "__main__":
    main()
