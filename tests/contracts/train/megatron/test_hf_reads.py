"""A Hugging Face model is read once per replica group, not once per data rank; an error of one rank is one of all."""

from collections import Counter

import pytest
import torch
import xxhash

from realsys.config.allocation import ACTOR, ParallelLayout
from realsys.config.dataflow import role_settings
from realsys.config.schema import Config
from realsys.errors import ModelError
from realsys.train.megatron import collectives
from realsys.train.megatron.hf_model import HFReader
from realsys.train.megatron.train_engine import MegatronEngine
from tests.support.serving.hf_models import make_model
from tests.support.training.train_ranks import FORMED, run_ranks


def load(path, device, dtype="float32"):
    config = Config.model_validate({"model": {"dtype": dtype, "path": str(path)}})
    engine = MegatronEngine(config, role_settings(config, ACTOR), FORMED[ACTOR], device, trainable=False)
    engine.load(path)
    return engine


def reads(path, layout, dtype, monkeypatch):
    """Load on real ranks. The bytes of a batch are few, so that there are several."""
    monkeypatch.setattr(collectives, "_BATCH", 4096)
    read, sizes = HFReader.read, list[int]()

    def counted(reader, *part):
        found = read(reader, *part)
        sizes.append(found.nbytes)
        return found

    monkeypatch.setattr(HFReader, "read", counted)

    def body(rank, device):
        engine = load(path, device, dtype)
        content = b"".join(one.detach().view(torch.uint8).numpy().tobytes() for one in engine.module.parameters())
        groups = engine.groups
        return (groups.tensor_rank, groups.pipeline_rank), sum(sizes), xxhash.xxh3_64_hexdigest(content)

    return run_ranks(layout.world_size, body, Config(), layout)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("tensor", "pipeline", "data", "dtype"),
    [(1, 1, 2, "float32"), (1, 1, 3, "bfloat16"), (2, 1, 2, "bfloat16"), (1, 2, 2, "float32")],
)
def test_each_byte_is_read_once_per_group(tensor, pipeline, data, dtype, tied, tmp_path, monkeypatch):
    """Every rank has the weights that it would have read itself. With m2 the vocabulary is padded."""
    make_model(tied=tied).save_pretrained(tmp_path)
    with monkeypatch.context() as patch:
        alone = reads(tmp_path, ParallelLayout(1, pipeline, tensor), dtype, patch)
    together = reads(tmp_path, ParallelLayout(data, pipeline, tensor), dtype, monkeypatch)
    assert {(place, weights) for place, _, weights in together} == {(place, weights) for place, _, weights in alone}
    total = Counter[tuple[int, int]]()
    for place, size, _ in together:
        total[place] += size
    assert total == {place: size for place, size, _ in alone}
    assert all(size < 0.8 * total[place] for place, size, _ in together), "the ranks share the work"


@pytest.mark.parametrize("method", ["check", "read"])
def test_error_that_one_rank_meets_is_everyones(method, tmp_path, monkeypatch):
    make_model().save_pretrained(tmp_path)

    def fail(*_):
        raise ModelError("model.safetensors: cannot be read: Stale file handle")

    def body(rank, device):
        if rank:
            monkeypatch.setattr(HFReader, method, fail)
        with pytest.raises(ModelError) as caught:
            load(tmp_path, device)
        return str(caught.value)

    first, second = run_ranks(2, body, Config(), ParallelLayout(data=2))
    assert first == second == "model.safetensors: cannot be read: Stale file handle"
