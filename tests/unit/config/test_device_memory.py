"""Predicted bytes of whole devices: published models, roles that share a worker, servers."""

import pytest

from realsys.cluster.topology import place
from realsys.config.allocation import ParallelLayout, parse_allocation
from realsys.config.dataflow import dataflow_of
from realsys.config.device_memory import COMMUNICATOR, GIB, LIBRARIES, rank_uses, server_use
from realsys.config.rank_memory import StepSettings, head_bytes, layer_bytes, shard_of, training_work
from realsys.model_files.config_json import read_model
from realsys.train.megatron.mesh import splits
from tests.support.processes.config_trees import changed
from tests.support.serving.qwen_models import write_qwen

PLAIN = StepSettings("bfloat16", 32768, 32768, False, False, 0, True)
OFF = [
    "train.recompute=false",
    "train.distributed_optimizer=false",
    "train.sequence_parallel=false",
    "train.head_chunk_tokens=0",
]


def math_config(folder, name, *overrides):
    return changed(f"model.path={write_qwen(folder, name)}", *overrides, experiment="math")


def ranks(config):
    return rank_uses(config, parse_allocation(config.allocation), dataflow_of(config), on_gpu=True)


@pytest.mark.parametrize(("name", "kib"), [("1.5B", 75), ("7B", 163), ("32B", 238)])
def test_layer_keeps_its_bytes_per_token(name, kib, tmp_path):
    model = read_model(write_qwen(tmp_path, name))
    assert layer_bytes(model, ParallelLayout(), PLAIN).kept / 1024 == pytest.approx(kib, abs=1)


@pytest.mark.parametrize(("name", "states", "layers"), [("1.5B", 26, 66), ("7B", 127, 143), ("32B", 550, 476)])
def test_unsharded_model_in_gib(name, states, layers, tmp_path):
    """Without any of the settings: 18 bytes per parameter, 32,768 tokens of activations, 28 GiB of logits."""
    model = read_model(write_qwen(tmp_path, name))
    shard = shard_of(model, ParallelLayout(), 0)
    assert 18 * shard.parameters / GIB == pytest.approx(states, rel=0.01)
    kept = 32768 * model.layers * layer_bytes(model, ParallelLayout(), PLAIN).kept
    assert kept / GIB == pytest.approx(layers, rel=0.01)
    logits = head_bytes(model, shard, ParallelLayout(), PLAIN) - 4 * 2 * model.hidden * 32768
    assert logits / GIB == pytest.approx(28, rel=0.01)


def test_first_stage_has_most_micro_batches_in_flight(tmp_path):
    """Without recompute stage 0 of 4 holds four micro-batches of its 7 layers, stage 2 holds two."""
    model, layout = read_model(write_qwen(tmp_path, "1.5B")), ParallelLayout(1, 4)
    work = [training_work(model, shard_of(model, layout, stage), layout, PLAIN, stage).layers for stage in range(3)]
    kept = 32768 * 7 * layer_bytes(model, layout, PLAIN).kept
    assert work[0] - work[2] == pytest.approx(2 * kept, rel=0.01)


def test_roles_of_a_worker_add_up(tmp_path):
    """A frozen reference beside the actor takes its weights, and nothing if it is offloaded."""
    alone = ranks(math_config(tmp_path, "1.5B", "allocation=serve.d1+d2"))[0][0]
    settings = ("allocation=serve.d1+d2", "train.ppo.kl.coef=0.1")
    both = ranks(math_config(tmp_path, "1.5B", *settings))[0][0]
    model = read_model(tmp_path / "1.5B")
    assert both.total - alone.total == both.others == 2 * model.parameters
    assert ranks(math_config(tmp_path, "1.5B", *settings, "roles.ref.offload=all"))[0][0].total == alone.total


def test_roles_on_separate_workers_are_separate(tmp_path):
    settings = ("allocation=serve.d1+actor.d2+ref.d1", "train.ppo.kl.coef=0.1")
    actor, reference = ranks(math_config(tmp_path, "1.5B", *settings))
    assert (actor[0].owner, actor[1]) == ("model_worker/0-1", 2)
    assert (reference[0].owner, reference[1], reference[0].gradients) == ("model_worker/2", 1, 0)


@pytest.mark.parametrize(
    ("allocation", "communicators"),
    [("d1", 0), ("d2", 1), ("d2m2", 3), ("d2p4", 4), ("d2p2m2", 6), ("actor.d2+ref.d2", 2), ("actor.d2m2+ref.d1", 4)],
)
def test_communicators_take_memory(allocation, communicators, tmp_path):
    """One for each axis with several ranks and for all of them; one for the world if roles have ranks of their own."""
    settings = (f"allocation=serve.d1+{allocation}", "train.ppo.kl.coef=0.1")
    uses = ranks(math_config(tmp_path, "1.5B", *settings))
    assert uses[0][0].libraries == LIBRARIES + COMMUNICATOR * communicators
    placed = parse_allocation(f"serve.d1+{allocation}")
    made = splits(place(placed, ["actor", "ref"]).values(), placed.workers)
    groups = {group for split in made for group in split if 0 in group and len(group) > 1}
    assert len(groups) + (placed.workers > 1) == communicators


@pytest.mark.parametrize("tensor", [1, 2])
def test_turns_leave_libraries_of_the_other_side(tensor, tmp_path):
    """Each side has all of the GPU in its turn but for these; a rank and a server elsewhere have no such part."""
    settings = ("generation.backend=sglang", "train.ppo.kl.coef=0.1")

    def uses(separator):
        text = f"serve.d1m{tensor}{separator}d1m{tensor}+ref.d2"
        config = math_config(tmp_path, "1.5B", f"allocation={text}", *settings)
        server = server_use(config, parse_allocation(text), on_gpu=True)
        return {use.owner.partition(" ")[0]: use for use, _ in ranks(config)} | {"server": server}

    apart, in_turn = uses("+"), uses("|")
    rank, server = (in_turn[name] for name in ("model_worker/0-1" if tensor > 1 else "model_worker/0", "server"))
    assert (rank.waiting, server.waiting) == (server.libraries, rank.libraries)
    assert server.libraries == LIBRARIES + COMMUNICATOR * (tensor > 1) < rank.libraries
    for name, use in in_turn.items():
        waiting = {"waiting": use.waiting}
        assert use.parts() == apart[name].parts() | waiting and bool(use.waiting) == (use in (rank, server))
    assert "while servers sleep" in rank.owner and "while ranks wait" in server.owner


def test_role_that_moves_between_steps_stays_beside_others(tmp_path):
    """The peak counts the other roles, unless offload says that they move around each call."""
    settings = ("train.ppo.kl.coef=0.1", "generation.backend=sglang")
    texts = ("allocation=serve.d1+d1", "allocation=serve.d1|d1")
    apart, in_turn = (ranks(math_config(tmp_path, "1.5B", text, *settings))[0][0] for text in texts)
    assert in_turn.others == apart.others > 0
    moved = ranks(math_config(tmp_path, "1.5B", texts[1], *settings, "roles.ref.offload=all"))[0][0]
    assert moved.others == 0


def test_embedded_server_allocates_its_whole_cache(tmp_path):
    """7B: 57,344 bytes per position; 65 rows of 28,672 positions are 107 GB."""
    config = math_config(tmp_path, "7B", "generation.backend=embedded", "allocation=serve.d1+d1")
    use = server_use(config, parse_allocation("serve.d1+d1"), on_gpu=True)
    assert use.cache == 65 * 28672 * 57344 + 64 * 28672 * 16
    assert (use.weights, use.libraries) == (2 * read_model(tmp_path / "7B").parameters, LIBRARIES)
    service = config.model_copy(update={"train": config.train.model_copy(update={"loop": "serve"})})
    served = server_use(service, parse_allocation("serve.d1+d1"), on_gpu=True)
    assert (served.weights, served.cache, served.head) == (9 * use.weights, 9 * use.cache, 9 * use.head)


def test_other_servers_split_the_model(tmp_path):
    config = math_config(tmp_path, "32B", "generation.backend=sglang", "allocation=serve.d1m2+d1")
    use = server_use(config, parse_allocation("serve.d1m2+d1"), on_gpu=True)
    norms = (2 * 64 + 1) * 5120  # whole on each GPU
    assert use.weights == read_model(tmp_path / "32B").parameters + norms
    assert use.cache == 28672 * 2 * 64 * 8 * 128 * 2 // 2


@pytest.mark.parametrize(
    ("args", "gpus"), [("{tp-size: 2}", 2), ("{pp-size: 4}", 4), ("{pp-size: 2, tp-size: 4}", 8), ("{dp-size: 4}", 1)]
)
def test_sizes_of_sglang_split_the_model(args, gpus, tmp_path):
    """Copies do not split it; the last stage has the head, but not the embedding."""
    given = ["generation.backend=sglang", f"generation.sglang.args={args}"]
    config, allocation = math_config(tmp_path, "32B", "allocation=serve.d1+d1", *given), parse_allocation("serve.d1+d1")
    use, model = server_use(config, allocation, on_gpu=True), read_model(tmp_path / "32B")
    assert use.weights == pytest.approx(2 * model.parameters / gpus, rel=0.08)
    assert use.cache == 28672 * 2 * 64 * 8 * 128 * 2 // gpus
