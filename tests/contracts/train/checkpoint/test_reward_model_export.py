"""A trained reward model, which began as a language model, gives the same scores wherever it is loaded."""

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from realsys.config.allocation import ParallelLayout
from realsys.errors import ModelError
from realsys.model_files.config_json import read_model
from realsys.train.checkpoint.model_export import export_checkpoint
from realsys.train.checkpoint.saver import load_checkpoint
from realsys.train.requests import CopyWeightsRequest, SaveWeightsRequest
from realsys.train.worker.weight_saver import WeightSaver
from realsys.weights.contract import PublisherParts
from realsys.weights.disk.plain_folders import materialise
from realsys.weights.disk.transport import DiskPublisher
from realsys.weights.disk.writer import DiskWriter, ShardWriter
from tests.support.serving.hf_models import VOCAB
from tests.support.training.checkpoint_ranks import BEFORE, SINGLE, Setup, complete, make_models, save, train
from tests.support.training.sample_records import make_ref, mask_of

LENGTHS = (5, 17, 2, 9)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


def rows():
    rng = np.random.default_rng(4)
    return [rng.integers(0, VOCAB, length).astype(np.int32) for length in LENGTHS]


def scores_of(role):
    """Scores of ``rows`` by number, on the ranks of the last stage."""
    refs = [make_ref(f"row-{i}", len(tokens), 1) for i, tokens in enumerate(rows())]
    for ref, tokens in zip(refs, rows(), strict=True):
        role.data.put(ref.sample_id, {"tokens": tokens, "loss_mask": mask_of(ref)})
    data = role.groups.mesh.layout.data
    batches = role.microbatches([refs[d::data] for d in range(data)], gradients=False)
    found = {}
    for batch, scores in zip(batches, role.engine.scores(batches), strict=role.groups.last_stage):
        found |= dict(zip((ref.sample_id for ref in batch.refs), scores.tolist(), strict=True))
    return found


def joined(ranks):
    merged = {name: score for found in ranks for name, score in found.items()}
    return [merged[f"row-{i}"] for i in range(len(LENGTHS))]


def transformers_scores(folder):
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    with torch.no_grad():
        return [model(torch.from_numpy(tokens).long()[None]).logits.item() for tokens in rows()]


@pytest.mark.parametrize(
    "setup",
    [
        Setup(ParallelLayout(data=2), distributed=True, algorithm="reward_model"),
        Setup(ParallelLayout(pipeline=2), model="tied", algorithm="reward_model"),
        Setup(ParallelLayout(tensor=2), lora=4, algorithm="reward_model"),
    ],
    ids=str,
)
def test_exported_reward_model_gives_the_scores_of_the_ranks(setup, models, tmp_path):
    """From a checkpoint, from the version that the ranks publish, and as another role's model."""
    model, tmp = models[setup.model], tmp_path / f"step-{BEFORE:08d}.tmp"
    tmp.mkdir()
    publisher = DiskPublisher(PublisherParts(tmp_path / "weights", model, "0001"), keep=9)
    plan = publisher.prepare(BEFORE, "")

    def body(role):
        saver = WeightSaver(role.groups.rank, DiskWriter(ShardWriter()), 60.0)
        saver.copy(role, CopyWeightsRequest("actor", 0))  # the score that it is 0 in must not be published again
        train(role, range(BEFORE))
        save(role, tmp, BEFORE)
        saver.copy(role, CopyWeightsRequest("actor", BEFORE))
        reply = saver.save(SaveWeightsRequest("actor", BEFORE, msgspec.to_builtins(plan)))
        return scores_of(role), msgspec.to_builtins(reply.report)

    ranks = setup.run(body, model)
    expected = joined(found for found, _ in ranks)
    assert len({round(score, 4) for score in expected}) == len(LENGTHS), "the scores tell rows apart"
    version = publisher.commit(BEFORE, BEFORE, plan, [report for _, report in ranks])
    export_checkpoint(complete(tmp, setup.layout, BEFORE), tmp_path / "exported", setup.config, model)
    materialise(tmp_path / "weights" / f"v{BEFORE:08d}.0001", tmp_path / "published", BEFORE)
    assert version
    for folder in (tmp_path / "exported", tmp_path / "published"):
        assert transformers_scores(folder) == pytest.approx(expected, abs=1e-5)
        assert read_model(folder, "value").has_score
        with pytest.raises(ModelError, match="no language-model head"):
            read_model(folder)
    alone = Setup(SINGLE, algorithm="reward_model")
    assert joined(alone.run(scores_of, tmp_path / "exported")) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("lora", [0, 4])
def test_resumed_reward_model_gives_the_same_scores(lora, models, tmp_path):
    setup, tmp = Setup(lora=lora, algorithm="reward_model"), tmp_path / f"step-{BEFORE:08d}.tmp"
    tmp.mkdir()

    def begin(role):
        train(role, range(BEFORE))
        save(role, tmp, BEFORE)
        return scores_of(role)

    expected = joined(setup.run(begin, models["untied"]))
    directory = complete(tmp, setup.layout, BEFORE)

    def resume(role):
        load_checkpoint(role, directory)
        return scores_of(role)

    assert joined(setup.run(resume, models["untied"])) == expected
