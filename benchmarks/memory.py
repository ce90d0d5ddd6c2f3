"""Memory of ModelWorkers over many train steps: resident size, held samples, live tensors.

    python -m benchmarks.memory [--steps 1000]

Two real ranks (data parallel, gloo) serve what the master would send them: groups of ever new answers arrive, heavy
in the tail; transfers bring them where the plan wants them; actor_inf; actor_train with two minibatches; clear. What is
held is looked at after each clear, when it should be nothing:

    samples, arrays_kib   in the DataManager
    tensors, tensors_kib  alive in the process: parameters, gradients, optimizer state, and whatever was forgotten
    rss_mib               resident memory; ``slope`` is the fitted growth per 1,000 steps after the first tenth

Growth of native memory shows in rss only; allocators keep what they once had, so its first steps are left out.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import torch

from benchmarks._records import group_of, single_turn
from benchmarks._table import report
from benchmarks._training import heavy_lengths
from realsys.buffer.minibatches import plan_minibatches, sequence_refs
from realsys.buffer.redistribute import plan_call
from realsys.cluster.topology import Mesh, whole_mesh
from realsys.config.allocation import ACTOR, ParallelLayout
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.data.char_model import VOCAB_SIZE, make_tiny_model
from realsys.train.call_service import ModelWorkerService, WorkerParts
from realsys.train.data_manager import DataManager
from realsys.train.megatron.device import Device
from realsys.types import (
    ClearRequest,
    Group,
    InitializeRequest,
    MfcRequest,
    SampleMeta,
    Ticket,
    TransferRequest,
)
from realsys.weights.disk.shards import ShardWriter
from realsys.weights.disk.writer import DiskWriter
from tests.support.training.train_ranks import FORMED, run_ranks

LAYOUT = ParallelLayout(data=2)
GROUPS, ANSWERS, LIMIT, PROMPT = 4, 4, 256, 8
MINIBATCHES = 2


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds after a step."""

    step: int
    samples: int
    array_bytes: int
    tensors: int
    tensor_bytes: int
    rss_bytes: int


def held_after(step: int, data: DataManager) -> Held:
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return Held(step, len(data), data.nbytes, len(tensors), sum(storages.values()), psutil.Process().memory_info().rss)


class Message:
    """A request as the stream delivers it: encoded."""

    def __init__(self, handler: str, payload: msgspec.Struct) -> None:
        self.handler, self._payload = handler, msgspec.msgpack.encode(payload)

    def decode(self, type: Any) -> Any:
        return msgspec.msgpack.decode(self._payload, type=type)


class NoMaster:
    """The stream's end where nobody listens: requests are handed to the service directly, replies are dropped."""

    def next_request(self, timeout_s: float) -> None:
        return None

    def reply(self, request: Any, payload: msgspec.Struct) -> None: ...

    def reply_error(self, request: Any, exc: BaseException) -> None: ...


def groups_of(step: int) -> list[Group]:
    """The batch of one step, the same on every rank; no two steps have the same lengths."""
    rng = np.random.default_rng(step)
    lengths = heavy_lengths(GROUPS * ANSWERS, LIMIT, step).reshape(GROUPS, ANSWERS)
    groups = []
    for number in range(GROUPS):
        answers = [
            single_turn(
                rng.integers(3, VOCAB_SIZE, length).astype(np.int32),
                rng.uniform(-4, -3, length - PROMPT).astype(np.float32),
                np.zeros(length - PROMPT, np.int32),
                float(rng.choice([-5.0, 5.0])),
            )
            for length in lengths[number]
        ]
        groups.append(group_of(Ticket(f"s{step}g{number}", 0, number, n=ANSWERS), answers))
    return groups


def requests_of(step: int, samples: list[list[SampleMeta]], mesh: Mesh) -> Iterator[Message]:
    """What the master sends for one train step."""
    refs = sequence_refs(samples)
    plan = plan_minibatches(refs, MINIBATCHES, mesh.layout.data)
    keys = ["tokens", "loss_mask", "behav_logprobs"]
    owners = {key: {meta.sample_id: [meta.owner] for group in samples for meta in group} for key in keys}
    yield Message("transfer", TransferRequest(plan_call(mesh, plan, keys, owners), refs))
    yield Message("mfc", MfcRequest("actor_inf", ACTOR, "actor_inf", step, step, plan))
    yield Message("mfc", MfcRequest("actor_train", ACTOR, "actor_train", step, step, plan, args={"lr": 1e-4}))
    yield Message("clear", ClearRequest([ref.sample_id for ref in refs]))


def arrive(step: int, rank: int, data: DataManager) -> list[list[SampleMeta]]:
    """Groups come in at the ranks in turn; returns the announcements of all, as the master has them."""
    announced = []
    for number, group in enumerate(groups_of(step)):
        owner = number % LAYOUT.data
        arrived = (data if owner == rank else DataManager(owner)).add_group(group)
        assert arrived is not None
        announced.append(arrived.samples)
    return announced


def serve(rank: int, device: Device, config: Config, model: Path, steps: int, every: int) -> list[Held]:
    """``steps`` train steps on this rank; what it held after every ``every``-th."""
    mesh, data = whole_mesh(LAYOUT), DataManager(rank)
    writer = DiskWriter(ShardWriter())
    parts = WorkerParts(rank, FORMED, NoMaster(), data, device, writer)
    service = ModelWorkerService(config, TrialPaths(model), parts)
    service.handle(Message("initialize", InitializeRequest(ACTOR, str(model))))
    found = []
    for step in range(steps):
        for message in requests_of(step, arrive(step, rank, data), mesh):
            service.handle(message)
        if step % every == 0 or step == steps - 1:
            gc.collect()
            found.append(held_after(step, data))
    return found


def run(steps: int, every: int) -> list[list[Held]]:
    """Per rank what it held, over ``steps`` train steps."""
    tiny = {"hidden_size": 32, "head_dim": 8, "intermediate_size": 64}
    config = Config.model_validate(
        {"model": {"tiny": tiny}, "train": {"microbatch_tokens": 512, "ppo": {"minibatches": MINIBATCHES}}}
    )
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        make_tiny_model(config.model.tiny, model, seed=1)
        found: list[list[Held]] = run_ranks(
            LAYOUT.data, lambda rank, device: serve(rank, device, config, model, steps, every), config, LAYOUT
        )
    return found


def slope(history: list[Held]) -> float:
    """MiB per 1,000 steps of resident memory after the first tenth of the steps."""
    late = [held for held in history if held.step >= history[-1].step / 10]
    return float(1000 * np.polyfit([held.step for held in late], [held.rss_bytes for held in late], 1)[0] / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    started = time.perf_counter()
    histories = run(options.steps, every=max(1, options.steps // 50))
    seconds = time.perf_counter() - started
    shown = np.unique(np.linspace(0, len(histories[0]) - 1, 6).astype(int))
    rows = [
        {
            "rank": rank,
            "step": held.step,
            "samples": held.samples,
            "arrays_kib": round(held.array_bytes / 2**10, 1),
            "tensors": held.tensors,
            "tensors_kib": round(held.tensor_bytes / 2**10, 1),
            "rss_mib": round(held.rss_bytes / 2**20, 1),
        }
        for rank, history in enumerate(histories)
        for held in (history[i] for i in shown)
    ]
    slopes = {f"slope_mib_rank{rank}": round(slope(history), 2) for rank, history in enumerate(histories)}
    meta = {"steps": options.steps, "seconds": round(seconds, 1), "sequences": GROUPS * ANSWERS, **slopes}
    report("memory", rows, meta)
    forgotten = [asdict(held) for history in histories for held in history if held.samples or held.array_bytes]
    if forgotten:
        raise SystemExit(f"samples are held after clear: {forgotten[0]}")


if __name__ == "__main__":
    main()
