"""Numbers and sizes of the micro-batches of a role, on real ranks."""

import numpy as np
import pytest

from realsys.config.allocation import ParallelLayout
from realsys.config.schema import Config
from tests.support.serving.hf_models import make_model
from tests.support.training.sample_records import make_ref, mask_of
from tests.support.training.train_ranks import build_role, run_ranks

CAPACITY = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen2")
    make_model().save_pretrained(path)
    return path


def fill(role, lengths):
    refs = [make_ref(f"t{i}/0", length, 2, 0.0, False, i) for i, length in enumerate(lengths)]
    for ref in refs:
        role.data.put(ref.sample_id, {"tokens": np.ones(ref.length, np.int32), "loss_mask": mask_of(ref)})
    return refs


def tokens_of(model, layout, lengths, *, gradients=True, **train):
    """Tokens of the micro-batches of rank 0."""
    config = Config.model_validate({"train": {"microbatch_tokens": CAPACITY, **train}})

    def body(rank, device):
        role = build_role(config, layout, rank, device, model)
        return [sum(batch.lengths) for batch in role.microbatches([fill(role, lengths)], gradients=gradients)]

    first, *others = run_ranks(layout.world_size, body, config, layout)
    assert all(other == first for other in others)
    return first


def test_pipeline_gets_four_micro_batches_per_stage(model):
    stages = ParallelLayout(pipeline=2)
    assert tokens_of(model, stages, [8] * 16) == [16] * 8
    assert tokens_of(model, stages, [8] * 5) == [8] * 5  # no more than sequences
    assert tokens_of(model, stages, [8] * 16, min_microbatches=3) == [48, 40, 40]
    assert tokens_of(model, ParallelLayout(), [8] * 16) == [64, 64]


def test_inference_has_a_capacity_of_its_own(model):
    single, lengths = ParallelLayout(), [8] * 30
    assert tokens_of(model, single, lengths) == [64, 64, 56, 56]
    assert tokens_of(model, single, lengths, gradients=False) == [64, 64, 56, 56]
    assert tokens_of(model, single, lengths, gradients=False, inference_microbatch_tokens=128) == [120, 120]
    assert tokens_of(model, single, lengths, inference_microbatch_tokens=128) == [64, 64, 56, 56]


def test_micro_batches_are_balanced_by_cost(model):
    """Attention makes a token of a long sequence more expensive: the long one gets fewer others."""
    single, lengths = ParallelLayout(), [50] + [2] * 27
    assert tokens_of(model, single, lengths, balance="tokens") == [52, 52]
    assert tokens_of(model, single, lengths, balance="flops") == [50, 54]
