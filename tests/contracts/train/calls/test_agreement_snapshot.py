"""Engine and trainer are compared on tokens of an earlier version, with the weights that the trainer kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from realsys.cluster.topology import place
from realsys.config.allocation import parse_allocation
from realsys.config.schema import Config
from realsys.train.megatron.device import Device
from realsys.train.megatron.layers import lora
from tests.support.training.ppo_batch import Worker, deal, make_batch, make_models, save_models
from tests.support.training.train_ranks import run_ranks

REFS, ARRAYS = make_batch()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    yield save_models(make_models(), tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("layout", "rank"), [("d1", 0), ("d2", 0), ("m2", 0), ("p2", 0), ("d2p2", 0), ("d1", 4), ("m2", 4)]
)
def test_tokens_are_scored_with_their_own_version(folders: dict[str, Path], layout: str, rank: int) -> None:
    """The log-probs of version 0 count as recorded by the engine; then the weights move far, to version 1."""
    config = Config.model_validate({"train": {"microbatch_tokens": 48, "lora": {"rank": rank}}})
    placed = parse_allocation(f"sglang.d1+actor.{layout}")
    meshes = place(placed, ["actor"])
    own = [ref.sample_id for ref in deal(REFS, meshes["actor"].layout.data)[0]]
    compared = sum(ref.loss_tokens for ref in REFS if ref.sample_id in own)

    def body(rank: int, device: Device) -> Any:
        worker = Worker(rank, device, config, meshes, folders)
        worker.fill(ARRAYS)
        worker.call("actor_inf", "actor", [REFS], snapshot={"take": True})
        scored = worker.spread(REFS, "prox_logprobs")
        for ref in REFS:
            sampled = {"behav_logprobs": scored[ref.sample_id]["prox_logprobs"].copy()}
            worker.fill({ref.sample_id: sampled | {"versions": np.zeros(ref.loss_tokens, np.int32)}})
        engine = worker.roles["actor"].engine
        with torch.no_grad():
            for parameter in engine.module.parameters():  # type: ignore[union-attr]
                if parameter.requires_grad:
                    parameter.mul_(1.5).add_(0.02)
        lora.merge(engine.module)  # type: ignore[arg-type]
        moved = {name: tensor.clone() for name, tensor in engine.export()}
        plan = {"version": 0, "samples": own, "take": True}
        outcome = worker.call("actor_inf", "actor", [REFS], version=1, snapshot=plan)
        untouched = all(torch.equal(tensor, moved[name]) for name, tensor in engine.export())
        role = worker.roles["actor"]
        kept = role.snapshot.version if role.snapshot else None
        gone = worker.call("actor_inf", "actor", [REFS], version=2, snapshot={"version": 7, "samples": own})
        return outcome.stats, gone.stats, untouched, kept, role.groups.data_rank, role.groups.last_stage

    for stats, gone, untouched, kept, data_rank, last in run_ranks(placed.workers, body, config):
        assert untouched, "the weights in training must be back, bit by bit"
        assert kept == (1 if data_rank == 0 else None)
        if last:
            assert stats["agreement/tokens"] == compared
            assert stats["agreement/difference_max"] < 1e-5 < 0.01 < stats["logprob_difference_mean"]
            assert gone["agreement/tokens"] == 0, "a snapshot of another version must not be compared"
