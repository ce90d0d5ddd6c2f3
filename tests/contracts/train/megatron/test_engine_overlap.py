"""Gradients that are reduced during the backward pass equal those that are reduced after it."""

import pytest
import torch

from tests.support.serving.hf_models import make_model
from tests.support.training.engine_ranks import NLL, REFS, make_config, make_settings, on_ranks

STEPS = 3  # Megatron reduces the first batch after the backward pass, and overlaps from the second on


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    torch.set_num_threads(1)
    folders = {tied: tmp_path_factory.mktemp(f"tied-{tied}") for tied in (True, False)}
    for tied, folder in folders.items():
        make_model(tied=tied).save_pretrained(folder)
    return folders


def weights_after_steps(rank):
    """Train with several micro-batches; in the last step data rank 1 has no sequence. A forward pass is between."""
    engine, first = rank.engine, rank.engine.groups.data_rank == 0
    engine.use_optimizer("train", engine.settings.optimizer)
    for step in range(STEPS):
        batches = rank.micro_batches(3)
        if step == STEPS - 1:
            batches = [rank.packer.pack(refs if first else []) for refs in (REFS[:4], REFS[4:])]
        engine.logprobs(batches)
        engine.accumulate(batches, NLL)
        assert engine.step(1e-3).applied
    return rank.weights()


@pytest.mark.parametrize(
    ("text", "tied", "train"),
    [
        ("d2", True, {}),
        ("d2", False, {"distributed_optimizer": True}),
        ("d2p2", True, {}),
        ("d2m2", True, {"sequence_parallel": True}),
    ],
)
def test_overlapped_reduction_does_not_change_the_weights(text, tied, train, paths):
    runs = [
        on_ranks(
            text, paths[tied], weights_after_steps, make_config(overlap_grad_reduce=each, **train), make_settings()
        )
        for each in (True, False)
    ]
    for ours, expected in zip(*runs, strict=True):
        assert ours.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(ours[name], tensor), name
