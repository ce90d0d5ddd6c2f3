"""The way of the weights from trainer to server: staging against a file copy, the pause, deltas against whole versions.

One bf16 model of a Qwen2 shape, 0.5 GB unless told otherwise, on the file system of ``--folder``; in each round all
that is compared runs one after the other, and ratios are medians over the rounds of the ratio in one round.

    stage     read and verify every tensor into new memory, against shutil.copyfile of the same files
    pause     what an engine stands still for an update without running answers, against a copy of the same tensors in
              memory, which is the bare load on an accelerator; on a CPU it is a swap of pointers
    delta     float32 master weights take steps of lr * clamp(N(0, 1), -1, 1), as Adam's are at most; a version is
              written whole and as a delta, and staged by a server without a past and by one that holds the last
              version; ``break-even``: a server is faster with deltas where it reads files slower than that

    python -m benchmarks.weights [--rounds 5] [--scale 1.0] [--folder /tmp]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks._table import report
from realsys.config.schema import EmbeddedConfig, GenerationConfig
from realsys.generation.embedded.decoder import fuse
from realsys.generation.embedded.engine import build_engine
from realsys.model_files.config_json import read_model
from realsys.weights.disk import manifest
from realsys.weights.disk.stage import DiskReader, HeldWeights, stage
from realsys.weights.disk.writer import ShardWriter

Tensors = dict[str, torch.Tensor]
RATES = (1e-6, 1e-5)
SCALE_OF_WEIGHTS = 0.02


def make_model(folder: Path, scale: float) -> Tensors:
    """config.json in ``folder``, and float32 weights: about 0.25 G of them times ``scale``."""
    folder.mkdir()
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": max(1, round(14 * scale)),
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.ones(shape) if len(shape) == 1 else SCALE_OF_WEIGHTS * torch.randn(shape, generator=generator)
        for name, shape in read_model(folder).tensor_shapes().items()
    }


def train(master: Tensors, lr: float, seed: int) -> Tensors:
    """One step of the size of Adam's, in place; the weights as they are served."""
    generator = torch.Generator().manual_seed(seed)
    # One draw for all tensors, begun elsewhere in each: drawing a number takes longer than everything measured here.
    noise = torch.randn(1 << 22, generator=generator).clamp_(-1, 1).mul_(lr)
    for index, tensor in enumerate(master.values()):
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), noise.numel()):
            part = flat[start : start + noise.numel()]
            part += noise.roll(977 * index + start)[: part.numel()]
    return {name: tensor.bfloat16() for name, tensor in master.items()}


class Publisher:
    """Writes versions of one kind below one folder."""

    def __init__(self, root: Path, model: Path, writer: ShardWriter) -> None:
        self._root, self._model, self._writer = root, model, writer
        self.newest = Path()
        self._version = -1

    @property
    def version(self) -> int:
        return self._version

    def publish(self, tensors: Tensors, *, whole: bool = False) -> tuple[float, int]:
        """Return seconds and bytes of the files; only the last two versions are kept, with their bases."""
        start = time.perf_counter()
        self._version += 1
        tmp = manifest.prepare(self._root, self._version, "bench")
        shard = self._writer.write(tmp / "model-00001-of-00001.safetensors", tensors, "" if whole else self.newest.name)
        self.newest = manifest.commit(
            tmp, version=self._version, incarnation="bench", step=0, shards=[shard], model_dir=self._model
        )
        seconds = time.perf_counter() - start
        manifest.prune(self._root, keep=2)
        return seconds, shard.size


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def staging(published: Publisher, rounds: int) -> Iterator[dict[str, Any]]:
    [file] = published.newest.glob("model-*.safetensors")
    size, copy = file.stat().st_size / 1e9, file.parent.parent / "copy"
    copies, stages, verify = [], [], []
    for _ in range(rounds + 1):
        seconds, _ = timed(lambda: shutil.copyfile(file, copy))
        copies.append(seconds)
        copy.unlink()
        seconds, staged = timed(lambda: stage(published.newest, published.version))
        stages.append(seconds)
        verify.append(staged.timings["verify_s"])
        del staged
    # The first round warms up: page cache, and memory that the process has never had.
    copies, stages, verify = copies[1:], stages[1:], verify[1:]
    yield {"what": "file copy", "seconds": statistics.median(copies), "GB/s": size / statistics.median(copies)}
    yield {
        "what": "stage",
        "seconds": statistics.median(stages),
        "GB/s": size / statistics.median(stages),
        "ratio": statistics.median(a / b for a, b in zip(copies, stages, strict=True)),
        "of": "bandwidth of the file copy",
        "verify_s": statistics.median(verify),
    }


def pausing(published: Publisher, rounds: int) -> Iterator[dict[str, Any]]:
    """The engine's own account of updates, and a copy of its weights, in turn."""
    config = GenerationConfig(embedded=EmbeddedConfig(max_running=1, max_queued=1, context_length=64))

    engine = build_engine(published.newest, config, DiskReader().stage, dtype=torch.bfloat16)
    staged = stage(published.newest, published.version)
    weights = [
        fuse(engine.core.arch, staged.tensors, dtype=torch.bfloat16, device=torch.device("cpu")) for _ in range(2)
    ]
    del staged
    copies, pauses, totals = [], [], []
    engine.start()
    with closing(engine):
        for _ in range(rounds):
            copies.append(timed(lambda: weights[0].copy_from(weights[1]))[0])
            seconds, result = timed(engine.update(str(published.newest), published.version).result)
            assert result.success, result.message
            pauses.append(result.timings["pause_s"])
            totals.append(seconds)
    pause = statistics.median(pauses)
    yield {"what": "update in all", "seconds": statistics.median(totals)}
    yield {"what": "bare load: copy in memory", "seconds": statistics.median(copies)}
    ratio = statistics.median(a / b for a, b in zip(pauses, copies, strict=True))
    yield {"what": "pause", "seconds": pause, "ratio": ratio, "of": "time of the copy in memory"}


def deltas(root: Path, model: Path, master: Tensors, lr: float, rounds: int) -> Iterator[dict[str, Any]]:
    whole = Publisher(root / "whole", model, ShardWriter())
    delta = Publisher(root / "delta", model, ShardWriter(deltas=True, full_every=rounds + 2))
    held = HeldWeights(everything=True)
    found: dict[str, list[float]] = {}
    even = []
    for index in range(rounds + 1):
        tensors = train(master, lr, index)
        written = [whole.publish(tensors, whole=True), delta.publish(tensors)]
        full_s, full = timed(lambda: stage(whole.newest, whole.version))
        full_read, full_work = full.counts["bytes_read"], full.timings["verify_s"]
        del full
        delta_s, staged = timed(lambda: stage(delta.newest, delta.version, held))
        assert all(torch.equal(staged.tensors[name], tensor) for name, tensor in tensors.items())
        if index:  # the first version is whole in both
            row = {
                "write_s": (written[0][0], written[1][0]),
                "bytes_written": (written[0][1], written[1][1]),
                "stage_s": (full_s, delta_s),
                "bytes_read": (full_read, staged.counts["bytes_read"]),
            }
            work = staged.timings["verify_s"] + staged.timings["apply_s"] - full_work
            even.append((full_read - staged.counts["bytes_read"]) / work / 1e9)
            for name, (of_full, of_delta) in row.items():
                found.setdefault(name + " full", []).append(of_full)
                found.setdefault(name + " delta", []).append(of_delta)
        del staged
    for name in ("bytes_written", "write_s", "bytes_read", "stage_s"):
        of_full, of_delta = found[name + " full"], found[name + " delta"]
        unit, scale = ("MB", 1e6) if name.startswith("bytes") else ("seconds", 1.0)
        yield {
            "what": f"delta at lr {lr:g}: {name}",
            unit: statistics.median(of_delta) / scale,
            "ratio": statistics.median(a / b for a, b in zip(of_delta, of_full, strict=True)),
            "of": f"{statistics.median(of_full) / scale:.3g} of the whole version",
        }
    yield {"what": f"delta at lr {lr:g}: break-even", "GB/s": statistics.median(even)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the model; 1: 0.5 GB")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder)
        master = make_model(root / "model", options.scale)
        published = Publisher(root / "one", root / "model", ShardWriter())
        _, size = published.publish({name: tensor.bfloat16() for name, tensor in master.items()})
        rows = [*staging(published, options.rounds), *pausing(published, options.rounds)]
        shutil.rmtree(root / "one")
        for lr in RATES:
            rows += deltas(root / f"{lr:g}", root / "model", master, lr, options.rounds)
    report("weights", rows, {"GB": size / 1e9, "rounds": options.rounds, "threads": 1})


if __name__ == "__main__":
    main()
