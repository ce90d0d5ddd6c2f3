"""Sizes that a plan counts: disk, models, shards of ranks; and sampling that biases training."""

from dataclasses import replace

import pytest

from realsys.config.allocation import ACTOR, ParallelLayout
from realsys.config.dataflow import RoleSettings, dataflow_of
from realsys.config.rank_memory import States, StateSettings, shard_of, states_of
from realsys.config.rules import sampling_warnings
from realsys.config.schema import Config, SamplingConfig
from realsys.config.schema_train import LoraConfig, OptimizerConfig
from realsys.config.trial_sizes import batch_tokens, disk_bytes, model_of, record_bytes
from realsys.data.arith import make_tiny_model
from realsys.model_files.config_json import read_model
from tests.support.processes.config_trees import changed
from tests.support.serving.qwen_models import QWEN, write_qwen


def test_disk_counts_versions_and_checkpoints():
    config = changed("weights.keep_versions=3", "checkpoint.keep=2", "checkpoint.every_steps=5")
    count = model_of(config).parameters
    assert disk_bytes(config, dataflow_of(config)) == (3 + 2) * 4 * count + (2 + 1) * 12 * count
    none = changed("checkpoint.every_steps=0", "checkpoint.on_stop=false", "checkpoint.at_end=false")
    assert disk_bytes(none, dataflow_of(none)) == (2 + 2) * 4 * count


def test_records_are_bounded_by_the_longest_rows():
    config = changed("record.keep_steps=10")
    assert record_bytes(config) == 10 * 24 * batch_tokens(config) == 10 * 24 * 64 * 8 * 248
    assert record_bytes(changed("record.keep_steps=0")) == 0


# ---- The model that a memory prediction counts is the one that is made or read


@pytest.mark.parametrize("chat", [False, True])
def test_tiny_model_is_counted_as_written(chat, tmp_path):
    config = Config.model_validate({"model": {"tiny": {"chat": chat}}})
    make_tiny_model(config.model.tiny, tmp_path, seed=0)
    written, counted = read_model(tmp_path), model_of(config)
    assert (counted.vocab, counted.parameters) == (written.vocab, written.parameters)


# ---- Parameters and states of a rank, against the whole checkpoint and against sums by hand


BF16 = StateSettings("bfloat16", trained=True, distributed_optimizer=False, on_gpu=True)
ACTOR_SETTINGS = RoleSettings(ACTOR, "", "lm", "none", OptimizerConfig())


@pytest.mark.parametrize("name", [*QWEN, "3-4B"])
def test_one_rank_has_the_whole_checkpoint(name, tmp_path):
    model = read_model(write_qwen(tmp_path, name))
    assert shard_of(model, ParallelLayout(), 0).parameters == model.parameters


def test_stages_and_tensor_ranks_add_up(tmp_path):
    """28 layers over 3 stages are 10, 9 and 9. Norms are on every tensor rank; a tied head is a copy."""
    model = read_model(write_qwen(tmp_path, "1.5B"))
    shards = [shard_of(model, ParallelLayout(1, 3, 2), stage) for stage in range(3)]
    assert [shard.layers for shard in shards] == [10, 9, 9]
    norms = (2 * model.layers + 1) * model.hidden
    assert sum(2 * shard.parameters for shard in shards) == model.parameters + norms + model.vocab * model.hidden


def test_vocabulary_is_padded(tmp_path):
    model = read_model(write_qwen(tmp_path, "7B", vocab_size=152065))
    shard = shard_of(model, ParallelLayout(1, 1, 4), 0)
    assert shard.vocab == 38017 and shard.embedding == shard.head == 38017 * 3584


def test_states_of_full_training(tmp_path):
    """18 bytes per parameter in bf16; two data ranks share 12 of them. The fused step holds nothing more."""
    model = read_model(write_qwen(tmp_path, "7B"))
    count = model.parameters
    layout = ParallelLayout(2)
    whole = states_of(model, shard_of(model, layout, 0), layout, ACTOR_SETTINGS, BF16)
    assert whole == States(2 * count, 4 * count, 12 * count)
    shared = replace(BF16, distributed_optimizer=True)
    part = states_of(model, shard_of(model, layout, 0), layout, ACTOR_SETTINGS, shared)
    assert part == States(2 * count, 4 * count, count // 2 * 12)


@pytest.mark.parametrize(("on_gpu", "decay"), [(True, 0.1), (False, 0.1), (True, 0.0)])
def test_decay_of_sgd_copies_gradients(on_gpu, decay, tmp_path):
    model, layout = read_model(write_qwen(tmp_path, "7B")), ParallelLayout()
    settings = replace(ACTOR_SETTINGS, optimizer=OptimizerConfig(name="sgd", weight_decay=decay))
    shard = shard_of(model, layout, 0)
    found = states_of(model, shard, layout, settings, replace(BF16, on_gpu=on_gpu))
    assert found.optimizer == 8 * model.parameters
    assert found.temporary == (4 * (model.parameters if on_gpu else shard.largest) if decay else 0)


def test_frozen_role_has_weights_only(tmp_path):
    model = read_model(write_qwen(tmp_path, "7B"))
    frozen = replace(BF16, trained=False)
    assert states_of(model, shard_of(model, ParallelLayout(), 0), ParallelLayout(), ACTOR_SETTINGS, frozen) == States(
        2 * model.parameters
    )


def test_adapters_keep_their_bases_twice(tmp_path):
    """Rank 16 on `down` alone: [16, 18944] and [3584, 16] per layer."""
    model = read_model(write_qwen(tmp_path, "7B"))
    settings = replace(ACTOR_SETTINGS, lora=LoraConfig(rank=16, targets=["down"]))
    found = states_of(model, shard_of(model, ParallelLayout(), 0), ParallelLayout(), settings, BF16)
    adapters, bases = 28 * 16 * (18944 + 3584), 28 * 3584 * 18944
    assert found == States(2 * (model.parameters + bases + adapters), 4 * adapters, 12 * adapters)


def test_offload_moves_states_and_drops_gradients():
    states = States(weights=2, gradients=4, optimizer=12)
    assert [states.left(kind) for kind in ("none", "optimizer", "all")] == [18, 2, 0]
    assert [states.moved(kind) for kind in ("none", "optimizer", "all")] == [0, 12, 14]


# ---- Warnings about sampling settings


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"top_p": 0.9, "top_k": 50}, "generation.sampling.top_p=0.9, top_k=50: completions are drawn from a changed"),
        ({"min_p": 0.05}, "generation.sampling.min_p=0.05: "),
        ({"penalties": {"repetition": 1.1}}, "generation.sampling.penalties.repetition=1.1: "),
    ],
)
def test_sampling_that_biases_training_is_named_once(settings, named):
    (line,) = sampling_warnings(SamplingConfig(**settings))
    assert named in line


def test_temperature_and_stops_bias_nothing():
    assert not list(sampling_warnings(SamplingConfig(temperature=0.7, stop=["x"], top_k=0)))
