"""Host memory of an update: servers of one host that stage in one shared copy, against a copy for each of them.

Each server is a process. ``shared`` is the product. ``alone`` stages into the server's own memory and then writes the
folder in /dev/shm that SGLang loads, as each server did before there were shared copies. Memory is what the processes
have of their own (RssAnon, beyond that before the update), plus the blocks of the files in /dev/shm; its peak, sampled
every 2 ms. Two versions are staged, one after the other.

    python -m benchmarks.host_staging [--servers 4] [--megabytes 256]
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks._table import report
from realsys.generation.weight_folder import FolderWriter
from realsys.weights.contract import WeightReader
from realsys.weights.disk import manifest
from realsys.weights.disk.stage import DiskReader
from realsys.weights.disk.writer import ShardWriter
from realsys.weights.host_copies import SharedCopies
from realsys.weights.host_places import SHARED_MEMORY
from realsys.weights.host_reader import HostReader

VERSIONS = 2


def write_versions(root: Path, megabytes: float) -> list[str]:
    model = root / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    count = round(megabytes * 1e6 / 2 / 16)
    paths = []
    for version in range(VERSIONS):
        tensors = {f"layer.{i}": torch.randn(count).bfloat16() for i in range(16)}
        tmp = manifest.prepare(root / "weights", version, "t")
        shard = ShardWriter().write(tmp / "model-00001-of-00001.safetensors", tensors)
        made = manifest.commit(tmp, version=version, incarnation="t", step=0, shards=[shard], model_dir=model)
        paths.append(str(made))
    return paths


def serve(pipe: Connection, make: Callable[[Path, Path], WeightReader], root: Path, memory: Path) -> None:
    """Stage every version that the pipe names; keep the folder until the next message, as long as SGLang loads it."""
    reader = make(root, memory)
    folders = FolderWriter(reader, root / "model")
    target = Path(tempfile.mkdtemp(dir=memory))
    pipe.send("ready")
    for version in range(VERSIONS):
        staged = folders.write(pipe.recv(), version, target / str(version))
        pipe.send("staged")
        pipe.recv()
        staged.release()
        pipe.send("released")
    reader.close()


def shared(root: Path, memory: Path) -> WeightReader:
    return HostReader(SharedCopies(root, root / "model", [memory]))


def alone(root: Path, memory: Path) -> WeightReader:
    return DiskReader()


def used(pids: list[int], memory: Path) -> int:
    """Return the processes' own memory and the files of the shared folder, in bytes."""
    total = 0
    for pid in pids:
        found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        total += int(found[1]) * 1024 if found else 0
    for file in memory.rglob("*.safetensors"):
        try:
            total += file.stat().st_blocks * 512
        except OSError:  # it was removed
            continue
    return total


def measure(make: Callable[[Path, Path], WeightReader], servers: int, root: Path, paths: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        context = multiprocessing.get_context("spawn")
        pipes, processes = [], []
        for _ in range(servers):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, make, root, Path(folder)))
            process.start()
            processes.append(process)
            pipes.append(mine)
        for pipe in pipes:
            pipe.recv()
        pids = [process.pid or 0 for process in processes]
        before, peak, over = used(pids, Path(folder)), 0, threading.Event()

        def sample() -> None:
            nonlocal peak
            while not over.wait(0.002):
                peak = max(peak, used(pids, Path(folder)) - before)

        sampler = threading.Thread(target=sample)
        sampler.start()
        start = time.monotonic()
        for path in paths:
            for message in (path, "release"):
                for pipe in pipes:
                    pipe.send(message)
                for pipe in pipes:
                    pipe.recv()
        seconds = time.monotonic() - start
        over.set()
        sampler.join()
        for process in processes:
            process.join()
    return {"peak": peak, "seconds": seconds / len(paths)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=256.0)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        paths = write_versions(root, options.megabytes)
        for make in (alone, shared):
            found = measure(make, options.servers, root, paths)
            models = found["peak"] / options.megabytes / 1e6
            rows.append(
                {
                    "what": make.__name__,
                    "peak MB": found["peak"] / 1e6,
                    "models": models,
                    "update_s": found["seconds"],
                }
            )
    report("host_staging", rows, vars(options))


if __name__ == "__main__":
    main()
