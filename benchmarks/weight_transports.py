"""Hand-over of a weight version by each transport: seconds from the rank's copy until a server has verified it.

One rank in a process of its own, one bf16 model of a Qwen2 shape. In each round both transports hand over one version:

    disk              written and synced to ``--folder``, committed, staged (from the page cache)
    memory            written to shared memory, committed, staged through the link by a server on the rank's host
    memory elsewhere the same version staged by a server that sees no link, over HTTP on the loopback device

Every version changes all weights. ``ratio``: sum over that of disk in the same round, median over the rounds.

    python -m benchmarks.weight_transports [--rounds 5] [--scale 0.5] [--folder /tmp]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from benchmarks._table import report
from benchmarks.weights import make_model
from realsys.config.compose import compose
from realsys.weights.contract import PublisherParts, Share, Transport, WriterParts, build_transport
from realsys.weights.host_copies import SharedCopies
from realsys.weights.host_places import SHARED_MEMORY
from realsys.weights.host_reader import HostReader

TOKEN = "secret"


def transport(name: str) -> Transport:
    return build_transport(compose(["experiment=arith", f"weights.transport={name}"]))


def rank(pipe: Connection, name: str, trial: Path, scale: float) -> None:
    """Write a version, all of it new, for each plan that the pipe brings."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tensors = {key: value.bfloat16() for key, value in make_model(Path(folder) / "model", scale).items()}
    writer = transport(name).writer(WriterParts(trial=trial, token=TOKEN))
    while (message := pipe.recv()) is not None:
        version, plan = message
        for tensor in tensors.values():
            tensor.add_(1e-2)
        report_of_rank = writer.write(Share("actor", version, 0, 1, plan), tensors)
        pipe.send(msgspec.msgpack.encode(report_of_rank))


class Sides:
    """Rank, publisher and the servers of one transport. ``host``: memory of a server's host."""

    def __init__(self, name: str, root: Path, scale: float) -> None:
        self.root = root / name
        self.root.mkdir()
        self._model = root / "model"
        self.publisher = transport(name).publisher(
            PublisherParts(self.root / "weights", self._model, "0001", token=TOKEN)
        )
        self._pipe, theirs = multiprocessing.Pipe()
        self._rank = multiprocessing.get_context("spawn").Process(target=rank, args=(theirs, name, self.root, scale))
        self._rank.start()

    def write(self, version: int) -> tuple[str, int]:
        plan = self.publisher.prepare(version, "")
        self._pipe.send((version, msgspec.to_builtins(plan)))
        committed = self.publisher.commit(version, version, plan, [msgspec.msgpack.decode(self._pipe.recv())])
        self.publisher.prune([committed.locator])
        return committed.locator, committed.size

    def server(self, host: Path) -> HostReader:
        return HostReader(SharedCopies(self.root, self._model, [host], token=TOKEN))

    def close(self) -> None:
        self._pipe.send(None)
        self._rank.join()


def hide(folder: Path) -> None:
    """Let the links of a version lead nowhere, as another host sees them."""
    for link in [path for path in folder.iterdir() if path.is_symlink()]:
        link.unlink()
        link.symlink_to("/of-another-host")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=0.5, help="of the model; 1: 0.5 GB")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds: dict[str, list[tuple[float, float]]] = {"disk": [], "memory": [], "memory elsewhere": []}
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as memory,
    ):
        root, size = Path(folder), 0
        make_model(root / "model", options.scale)
        hosts = {name: Path(memory) / name.replace(" ", "-") for name in seconds}
        for host in hosts.values():
            host.mkdir()
        with (
            closing(Sides("disk", root, options.scale)) as disk,
            closing(Sides("memory", root, options.scale)) as ranks,
        ):
            servers = {name: (disk if name == "disk" else ranks).server(host) for name, host in hosts.items()}
            for version in range(options.rounds + 1):
                for name, sides in (("disk", disk), ("memory", ranks)):
                    start = time.perf_counter()
                    locator, size = sides.write(version)
                    written = time.perf_counter() - start
                    for reader in [each for each in servers if each.split()[0] == name]:
                        if reader != name:
                            hide(Path(locator))
                        start = time.perf_counter()
                        staged = servers[reader].stage(locator, version)
                        seconds[reader].append((written, time.perf_counter() - start))
                        staged.release()
            for server in servers.values():
                server.close()
    rows = []
    for name, rounds in seconds.items():
        later = rounds[1:]  # the first round allocates memory
        ratios = [sum(own) / sum(base) for own, base in zip(later, seconds["disk"][1:], strict=True)]
        row = {"transport": name, "write_s": statistics.median(w for w, _ in later)}
        rows.append(row | {"stage_s": statistics.median(s for _, s in later), "ratio": statistics.median(ratios)})
    report("weight_transports", rows, {"GB": size / 1e9, "rounds": options.rounds, "threads": 1})


if __name__ == "__main__":
    main()
