"""Engine and trainer are compared on tokens of an earlier version, with the weights that the trainer kept."""

from threading import Event

import numpy as np
import pytest
import torch

from realsys.cluster.topology import place
from realsys.config.allocation import parse_allocation
from realsys.config.schema import Config
from realsys.train.megatron import lora
from realsys.train.megatron.offload import OffloadCopies, WeightSnapshot
from tests.support.training.ppo_batch import Worker, deal, make_batch, make_models, save_models, whole
from tests.support.training.train_ranks import run_ranks

REFS, ARRAYS = make_batch()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    yield save_models(make_models(), tmp_path_factory.mktemp("models"))


def dealt(layout):
    """Return the number of ranks, their meshes, and the samples of data rank 0 with their loss tokens."""
    placed = parse_allocation(f"sglang.d1+actor.{layout}")
    meshes = place(placed, ["actor"])
    own = [ref.sample_id for ref in deal(REFS, meshes["actor"].layout.data)[0]]
    return placed.workers, meshes, own, sum(ref.loss_tokens for ref in REFS if ref.sample_id in own)


@pytest.mark.parametrize(
    ("layout", "rank"), [("d1", 0), ("d2", 0), ("m2", 0), ("p2", 0), ("d2p2", 0), ("d1", 4), ("m2", 4)]
)
def test_tokens_are_scored_with_their_own_version(folders, layout, rank):
    """The log-probs of version 0 count as recorded by the engine; then the weights move far, to version 1."""
    config = Config.model_validate({"train": {"microbatch_tokens": 48, "lora": {"rank": rank}}})
    ranks, meshes, own, compared = dealt(layout)

    def body(rank, device):
        worker = Worker(rank, device, config, meshes, folders)
        worker.fill(ARRAYS)
        worker.call("actor_inf", "actor", [REFS], snapshot={"take": True})
        scored = worker.spread(REFS, "prox_logprobs")
        for ref in REFS:
            sampled = {"behav_logprobs": scored[ref.sample_id]["prox_logprobs"].copy()}
            worker.fill({ref.sample_id: sampled | {"versions": np.zeros(ref.loss_tokens, np.int32)}})
        role = worker.roles["actor"]
        engine = role.engine
        if engine.snapshot is not None:
            engine.snapshot.finish()
        with torch.no_grad():
            for parameter in engine.module.parameters():  # type: ignore[union-attr]
                if parameter.requires_grad:
                    parameter.mul_(1.5).add_(0.02)
        lora.merge(engine.module)  # type: ignore[arg-type]
        moved = {name: tensor.clone() for name, tensor in engine.export()}
        plan = {"version": 0, "samples": own, "take": True}
        outcome = worker.call("actor_inf", "actor", [REFS], version=1, snapshot=plan)
        untouched = all(torch.equal(tensor, moved[name]) for name, tensor in engine.export())
        kept = engine.snapshot.version if engine.snapshot else None
        gone = worker.call("actor_inf", "actor", [REFS], version=2, snapshot={"version": 7, "samples": own})
        return outcome.stats, gone.stats, untouched, kept, role.groups.data_rank, role.groups.last_stage

    for stats, gone, untouched, kept, data_rank, last in run_ranks(ranks, body, config):
        assert untouched, "the weights in training must be back, bit by bit"
        assert kept == (1 if data_rank == 0 else None)
        if last:
            assert stats["agreement/tokens"] == compared
            assert stats["agreement/difference_max"] < 1e-5 < 0.01 < stats["logprob_difference_mean"]
            assert gone["agreement/tokens"] == 0, "a snapshot of another version must not be compared"


@pytest.mark.parametrize("layout", ["d1", "d2p2"])
def test_step_without_inference_compares_before_it_trains(folders, layout):
    """`actor_train` scores tokens of its own version, with the weights before the first update."""
    config = Config.model_validate({"train": {"microbatch_tokens": 48, "ppo": {"use_decoupled_loss": False}}})
    ranks, meshes, own, compared = dealt(layout)

    def body(rank, device):
        worker = Worker(rank, device, config, meshes, folders)
        worker.fill(ARRAYS)
        worker.call("actor_inf", "actor", [REFS])
        for name, own_arrays in worker.spread(REFS, "prox_logprobs").items():
            sampled = own_arrays["prox_logprobs"].copy()  # as if the engine had recorded them
            worker.fill({name: {"behav_logprobs": sampled, "versions": np.zeros(len(sampled), np.int32)}})
        stats = [
            worker.call("actor_train", "actor", [REFS], lr=1e-2, snapshot={"version": version, "samples": own}).stats
            for version in (0, 0, 3)
        ]
        return stats, worker.roles["actor"].groups.last_stage

    for (first, second, other), last in run_ranks(ranks, body, config):
        if last:
            assert first["agreement/tokens"] == second["agreement/tokens"] == compared
            assert first["agreement/difference_max"] < 1e-5 < 1e-3 < second["agreement/difference_max"]
            assert other["agreement/tokens"] == 0 and first["loss"] != 0


def test_step_waits_for_the_copy(folders):
    """The copy begins in actor_inf and goes on until the optimizer comes. It has the weights before the step."""
    config = Config.model_validate({"train": {"microbatch_tokens": 48}})

    def body(rank, device):
        worker = Worker(rank, device, config, whole("d1", "actor"), folders)
        worker.fill(ARRAYS)
        engine, needed, take, finish = worker.roles["actor"].engine, Event(), OffloadCopies.take, WeightSnapshot.finish

        def slow(copies, tensors):
            assert needed.wait(60)
            return take(copies, tensors)

        def finishing(snapshot):
            needed.set()
            return finish(snapshot)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OffloadCopies, "take", slow)
            patch.setattr(WeightSnapshot, "finish", finishing)
            worker.call("actor_inf", "actor", [REFS], snapshot={"take": True})
            before = [each.detach().clone() for each in engine.module.parameters()]  # type: ignore[union-attr]
            waits = not needed.is_set()
            engine.use_optimizer("rl", engine.settings.optimizer)
            for parameter in engine.module.parameters():  # type: ignore[union-attr]
                parameter.main_grad.fill_(1.0)  # type: ignore[attr-defined,operator]
            assert engine.step(0.1).applied
        kept = engine.snapshot.finish().values()
        moved = any(
            not torch.equal(one, two)
            for one, two in zip(before, engine.module.parameters(), strict=True)  # type: ignore[union-attr]
        )
        return waits, moved, all(torch.equal(one, two) for one, two in zip(before, kept, strict=True))

    assert run_ranks(1, body, config) == [(True, True, True)]
