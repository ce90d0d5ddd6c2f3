"""Train steps on two real ranks, and what each rank holds after them."""

import gc
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensor

from realsys.algorithm.minibatches import plan_minibatches, sequence_refs
from realsys.algorithm.redistribute import plan_call
from realsys.algorithm.sequence_buffer import owners_of
from realsys.cluster.topology import Mesh, whole_mesh
from realsys.config.allocation import ACTOR, ParallelLayout
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.data.arith import make_tiny_model
from realsys.model_calls import ClearRequest, InitializeRequest, MfcRequest, TransferRequest
from realsys.model_files.architecture import vocabulary_size
from realsys.train.megatron.device import Device
from realsys.train.worker.call_service import ModelWorkerService, WorkerParts
from realsys.train.worker.data_manager import DataManager
from realsys.types import Group, SampleMeta, Ticket
from realsys.weights.disk.writer import DiskWriter, ShardWriter
from tests.support.training.packers import PROMPT, heavy_lengths
from tests.support.training.played_master import Message
from tests.support.training.sample_records import group_of, single_turn
from tests.support.training.train_ranks import FORMED, run_ranks

LAYOUT = ParallelLayout(data=2)
GROUPS, COMPLETIONS, LIMIT = 4, 4, 256
MINIBATCHES = 2


@dataclass(frozen=True, slots=True)
class Held:
    """Samples, tensors and memory of one rank after a step."""

    step: int
    samples: int
    array_bytes: int
    tensors: int
    tensor_bytes: int
    rss_bytes: int


def held_after(step: int, data: DataManager) -> Held:
    # Fake ones, which a test before this one may have left, have no storage.
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return Held(step, len(data), data.nbytes, len(tensors), sum(storages.values()), psutil.Process().memory_info().rss)


class NoMaster:
    """A stream without a master: the service gets its requests directly, replies are dropped."""

    def next_request(self, timeout_s: float) -> None:
        return None

    def serve_in_background(self, *handlers: str) -> None: ...

    def next_background(self, timeout_s: float) -> None: ...

    def reply(self, request: Any, payload: msgspec.Struct) -> None: ...

    def reply_error(self, request: Any, exc: BaseException) -> None: ...


def groups_of(step: int) -> list[Group]:
    """Return the batch of one step, the same on every rank; no two steps have the same lengths."""
    rng = np.random.default_rng(step)
    lengths = heavy_lengths(GROUPS * COMPLETIONS, LIMIT, step).reshape(GROUPS, COMPLETIONS)
    groups = []
    for number in range(GROUPS):
        completions = [
            single_turn(
                rng.integers(3, vocabulary_size(chat=False), length).astype(np.int32),
                rng.uniform(-4, -3, length - PROMPT).astype(np.float32),
                np.zeros(length - PROMPT, np.int32),
                float(rng.choice([-5.0, 5.0])),
            )
            for length in lengths[number]
        ]
        groups.append(group_of(Ticket(f"s{step}g{number}", 0, number, n=COMPLETIONS), completions))
    return groups


def requests_of(step: int, rank: int, samples: list[list[SampleMeta]], mesh: Mesh) -> Iterator[Message]:
    """Yield the requests of the master to ``rank`` for one train step."""
    refs = sequence_refs(samples)
    plan = plan_minibatches(refs, MINIBATCHES, mesh.layout.data)
    keys = ["tokens", "loss_mask", "behav_logprobs"]
    owners = dict.fromkeys(keys, owners_of(samples))
    transfers = plan_call(mesh, plan, keys, owners).by_worker(plan)
    yield Message("transfer", transfers.get(rank, TransferRequest([], [])))
    inference = MfcRequest("actor_inf", ACTOR, "actor_inf", step, step, plan)
    training = MfcRequest("actor_train", ACTOR, "actor_train", step, step, plan, args={"lr": 1e-4})
    for request in (inference, training):
        yield Message("mfc", request.share(mesh.coordinates(rank)[0]))
    yield Message("clear", ClearRequest([ref.sample_id for ref in refs]))


def arrive(step: int, rank: int, data: DataManager) -> list[list[SampleMeta]]:
    """Give the groups to the ranks in turn; return the announcements of all ranks, as the master has them."""
    announced = []
    for number, group in enumerate(groups_of(step)):
        owner = number % LAYOUT.data
        arrived = (data if owner == rank else DataManager(owner)).add_group(group)
        assert arrived is not None
        announced.append(arrived.samples)
    return announced


def serve(rank: int, device: Device, config: Config, model: Path, steps: int, every: int) -> list[Held]:
    """Serve ``steps`` train steps on this rank; return its ``Held`` after every ``every``-th."""
    mesh, data = whole_mesh(LAYOUT), DataManager(rank)
    writer = DiskWriter(ShardWriter())
    parts = WorkerParts(rank, FORMED, NoMaster(), data, device, writer)
    service = ModelWorkerService(config, TrialPaths(model), parts)
    service.handle(Message("initialize", InitializeRequest(ACTOR, str(model))))
    found = []
    for step in range(steps):
        for message in requests_of(step, rank, arrive(step, rank, data), mesh):
            service.handle(message)
        if step % every == 0 or step == steps - 1:
            gc.collect()
            found.append(held_after(step, data))
    return found


def run(steps: int, every: int) -> list[list[Held]]:
    """Run ``steps`` train steps; return for each rank its ``Held`` after every ``every``-th."""
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
