"""Settings that the user left open adapt to the machine; those that were given do not."""

import contextlib
from dataclasses import replace

import pytest

from realsys.config.allocation import parse_allocation
from realsys.config.backend_rules import backend_rules
from realsys.config.compose import compose, given_fields
from realsys.config.dataflow import dataflow_of
from realsys.config.fields import replaced
from realsys.config.machine import Machine
from realsys.config.memory_check import largest_rank, place_of, spare_bytes
from realsys.config.rules import check_models
from realsys.config.schema import Config, GenerationConfig, SglangConfig, TinyModelConfig
from realsys.config.schema_cluster import ClusterConfig
from realsys.data.arith import make_tiny_model, write_char_tokenizer
from realsys.errors import ConfigError
from realsys.generation.backend import Backend
from realsys.launch.fit import fit
from tests.support.processes.config_trees import changed
from tests.support.serving.qwen_models import write_qwen


def machine(gpus):
    return Machine(cpus=8, memory_bytes=64 << 30, gpus=tuple(map(str, range(gpus))), torch_has_cuda=gpus > 0)


@pytest.mark.parametrize(
    ("gpus", "allocation"),
    [(0, "serve.d1+d1"), (1, "serve.d1|d1"), (2, "serve.d1+d1"), (4, "serve.d3+d1"), (8, "serve.d6+d2")],
)
def test_automatic_allocation_divides_the_gpus(gpus, allocation):
    config, lines = fit(Config(allocation="auto"), {"generation", "train"}, machine(gpus))
    assert config.allocation == allocation
    assert lines[0].startswith(f"set allocation={allocation}: this machine has ")
    assert lines[1:] == [] and not config.cluster.share_gpus


@pytest.mark.parametrize(
    ("settings", "allocation", "shared"),
    [
        ([], "serve.d1|d1", False),
        (["generation.backend=vllm"], "serve.d1|d1", False),
        (["weights.transport=memory"], "serve.d1|d1", False),
        (["weights.transport=group"], "serve.d1+d1", True),
        (["asynchronous.interruptible=false"], "serve.d1+d1", True),
        (["train.offload=optimizer"], "serve.d1+d1", True),
        (["generation.backend=tests.unit.launch.test_fit:Own"], "serve.d1+d1", True),
        (["cluster.share_gpus=true"], "serve.d1+d1", True),
        (["train.loop=evaluate"], "serve.d1+d1", True),
    ],
)
def test_one_gpu_is_used_in_turn_if_possible(settings, allocation, shared):
    """Otherwise server and rank share it all the time."""
    words = ["generation.backend=sglang", *settings, "allocation=auto"]
    config, _ = fit(changed(*words), {word.partition("=")[0] for word in words}, machine(1))
    assert (config.allocation, config.cluster.share_gpus) == (allocation, shared)


class Own(Backend):
    """A backend that says nothing about sleep."""

    def build(self, parts):
        raise NotImplementedError


@pytest.mark.parametrize(("gib", "share"), [(80, 0.88), (16, 0.83), (0, 0.85)])
def test_server_in_turn_leaves_the_libraries_of_a_rank(gib, share):
    generation = GenerationConfig(backend="sglang")
    config = Config(allocation="serve.d1+serve.d1|d1", generation=generation)
    config, lines = fit(config, {"generation", "train"}, replace(machine(2), gpu_bytes=gib << 30))
    assert config.generation.sglang.args == {"mem-fraction-static": share}
    assert lines[-1].endswith("servers and ranks use GPUs in turn; a rank that waits keeps about 1.0 GiB of libraries")


@pytest.mark.parametrize(("args", "allocation"), [({"tp-size": 2}, "serve.d3+d2"), ({"pp-size": 4}, "serve.d1+d4")])
def test_servers_of_several_gpus_leave_the_rest(args, allocation):
    """Also if the memory of the GPUs is not known."""
    generation = GenerationConfig(backend="sglang", sglang=SglangConfig(args=args))
    config, _ = fit(Config(allocation="auto", generation=generation), {"generation", "train"}, machine(8))
    assert config.allocation == allocation


def test_automatic_allocation_divides_the_gpus_of_all_nodes():
    cluster = ClusterConfig(nodes=4, gpus_per_node=8)
    _, lines = fit(Config(allocation="auto", cluster=cluster), {"generation.backend", "train"}, machine(0))
    assert lines[0] == "set allocation=serve.d24+d8: the 4 nodes have 32 GPUs"


@pytest.mark.parametrize(
    ("nodes", "servers", "given", "readers"),
    [(0, 64, "", 0), (3, 24, "", 0), (64, 2, "", 0), (4, 24, "", 2), (64, 64, "", 2), (64, 64, "storage_readers", 0)],
)
def test_few_of_many_hosts_read_the_storage(nodes, servers, given, readers):
    """A choice on the command line stays, also that all hosts read the storage."""
    cluster = ClusterConfig(nodes=nodes, gpus_per_node=8 if nodes else 0)
    config = Config(allocation=f"serve.d{servers}+d1", cluster=cluster)
    config, lines = fit(config, {"generation.backend", f"weights.{given}"}, machine(0))
    assert config.weights.storage_readers == readers
    chosen = [line for line in lines if line.startswith("set weights.storage_readers=2: servers on up to ")]
    assert len(chosen) == (readers > 0)


@pytest.mark.parametrize(
    ("servers", "gpus", "values", "given", "workers", "reason"),
    [
        (384, 8, {}, set(), 24, "1,536 groups of 16, 64 in a worker; 384 servers run 64 episodes each"),
        (384, 8, {"asynchronous": {"max_staleness": 0}}, set(), 8, "512 groups of 16, 64 in a worker; stal"),
        (40, 8, {"generation": {"embedded": {"max_running": 32, "max_queued": 32}}}, {"generation"}, 2, ""),
        (6, 8, {}, set(), 2, ""),
        (384, 8, {}, {"rollout.workers"}, 2, ""),
        (384, 0, {}, set(), 2, ""),
    ],
)
def test_rollout_workers_keep_many_servers_busy(servers, gpus, values, given, workers, reason):
    """Two workers would give 2,048 episodes to any number of servers."""
    cluster = {"nodes": 64, "gpus_per_node": gpus}
    config = Config.model_validate({"allocation": f"serve.d{servers}+d128", "cluster": cluster, **values})
    config, lines = fit(config, given, machine(0))
    assert config.rollout.workers == workers
    chosen = [line for line in lines if "rollout.workers" in line]
    assert len(chosen) == bool(reason) and all(
        line.startswith(f"set rollout.workers={workers}: {reason}") for line in chosen
    )


@pytest.mark.parametrize(
    ("size", "gib", "generation", "episodes"),
    [
        ("7B", 80, {}, 72),  # the cache has 1,034,000 tokens, and half of the longest sequence is 14,336
        ("1.5B", 141, {}, 256),
        ("1.5B", 141, {"sglang": {"args": {"max-running-requests": 90}}}, 90),
        ("1.5B", 141, {"sglang": {"args": {"mem-fraction-static": 0.3}}}, 100),
        ("1.5B", 141, {"sglang": {"args": {"mem-fraction-static": 0.3, "dp-size": 2}}}, 200),
        ("1.5B", 141, {"backend": "embedded", "embedded": {"max_running": 80}}, 80),
    ],
)
def test_server_runs_what_its_cache_holds(size, gib, generation, episodes, tmp_path):
    """Of 48 servers. A server on a GPU of unknown size runs 64."""
    values = {"allocation": "serve.d48+d16", "model": {"path": str(write_qwen(tmp_path, size)), "dtype": "bfloat16"}}
    values |= {"generation": {"backend": "sglang", **generation}}
    values |= {"cluster": {"nodes": 14, "gpus_per_node": 8, "gpu_memory_gb": gib}}
    _, lines = fit(Config.model_validate(values), {"generation", "data"}, machine(0))
    [chosen] = [line for line in lines if "rollout.workers" in line]
    assert f"; 48 servers run {episodes} episodes each" in chosen


@pytest.mark.parametrize(
    ("settings", "prompt", "blamed"),
    [
        (["generation.sampling.max_new_tokens=24"], 399, None),
        (["generation.sampling.max_new_tokens=24", "data.max_prompt_tokens=500"], 500, "data.max_prompt_tokens=500"),
        (["generation.sampling.max_new_tokens=400"], 1024, "data.max_prompt_tokens=1024"),
        ([], 1024, "generation.sampling.max_new_tokens=27648"),
    ],
)
def test_prompt_leaves_room_for_rows_of_an_agent(settings, prompt, blamed, tmp_path):
    """Two completions, and 65 tokens of feedback, in one row of a model with 512 positions."""
    make_tiny_model(TinyModelConfig(), tmp_path, seed=1)
    write_char_tokenizer(tmp_path)
    words = ["experiment=math", f"model.path={tmp_path}", "rollout.agent=multi_turn", *settings]
    words += ["rollout.agent_args.feedback_tokens=65", "data.train=none.jsonl"]
    config, lines = fit(compose(words), given_fields(words), machine(0))
    assert config.data.max_prompt_tokens == prompt
    said = f"set data.max_prompt_tokens={prompt}: the model has 512 positions, and multi_turn needs 113 of them"
    assert any(line.startswith(said) for line in lines) == (blamed is None)
    with pytest.raises(ConfigError, match=blamed) if blamed else contextlib.nullcontext():
        check_models(config, parse_allocation(config.allocation), dataflow_of(config))


@pytest.mark.parametrize("gpus_here", [0, 1, 8])
def test_settings_fit_the_described_nodes(gpus_here):
    """A login node has other GPUs than the nodes, or none."""
    config, lines = fit(
        Config(allocation="auto", cluster=ClusterConfig(nodes=2, gpus_per_node=8)), set(), machine(gpus_here)
    )
    assert lines[0] == "set generation.backend=sglang: the nodes have GPUs" and config.allocation == "serve.d12+d4"
    config, _ = fit(Config(allocation="auto", cluster=ClusterConfig(nodes=2)), set(), machine(gpus_here))
    assert config.generation.backend == "embedded" and not config.cluster.share_gpus


@pytest.mark.parametrize(
    ("allocation", "args", "share"),
    [
        ("serve.d1+d1", {}, 0.45),
        ("serve.d2+d1", {}, 0.3),
        ("serve.d2+d1", {"mem_fraction_static": 0.2}, None),
        ("serve.d1m2+d1", {}, 0.45),
    ],
)
def test_shared_gpu_is_split_evenly(allocation, args, share):
    generation = GenerationConfig(backend="sglang", sglang=SglangConfig(args=args))
    config = Config(allocation=allocation, generation=generation, cluster=ClusterConfig(share_gpus=True))
    config, _ = fit(config, set(), machine(2 if "m2" in allocation else 1))
    assert config.generation.sglang.args == (args if share is None else {"mem-fraction-static": share})


def test_server_gets_what_the_rank_leaves(tmp_path):
    """An even split would leave much of a large GPU unused, and be too much of a small one."""
    generation, cluster = GenerationConfig(backend="sglang"), ClusterConfig(share_gpus=True)
    model = {"path": str(write_qwen(tmp_path, "1.5B")), "dtype": "bfloat16"}
    train = {"head_chunk_tokens": 2048, "recompute": True, "microbatch_tokens": 32768}
    values = {"allocation": "serve.d1+d1", "generation": generation, "cluster": cluster, "model": model, "train": train}
    shares = []
    for gib in (120, 56):
        gpu = replace(machine(1), gpu_bytes=gib << 30)
        config, lines = fit(Config.model_validate(values), {"generation", "data"}, gpu)
        share = config.generation.sglang.args["mem-fraction-static"]
        rank = largest_rank(config) / gpu.gpu_bytes
        assert 0.88 < share + rank <= 0.9
        assert f"a rank needs about {rank * gib:.1f} of {gib} GiB" in lines[-1]
        shares.append(share)
    assert shares[0] > 0.45 > shares[1]


ROWS = "generation.embedded.cache_rows"


@pytest.mark.parametrize(
    ("rollout", "allocation", "rows"),
    [
        ({"agent": "multi_turn"}, "serve.d1+d1", 160 - 64),
        ({"agent": "multi_turn"}, "serve.d2+d1", 80 - 64),
        ({"agent": "multi_turn", "workers": 1, "max_concurrent": 20}, "serve.d1+d1", 80 - 64),
        ({"agent": "multi_turn", "workers": 1, "max_concurrent": 16}, "serve.d1+d1", 0),
        ({"agent": "single_turn"}, "serve.d1+d1", 0),
    ],
)
def test_episodes_of_several_turns_get_rows(rollout, allocation, rows):
    """Rows for those that do not run: admission lets 5 batches of 8 groups of 4 be in progress."""
    values = {"allocation": allocation, "rollout": {"group_size": 4, **rollout}, "train": {"batch_groups": 8}}
    lengths = {"data": {"max_prompt_tokens": 64}, "generation": {"sampling": {"max_new_tokens": 64}}}
    config, lines = fit(Config.model_validate({**values, **lengths}), set(), machine(0))
    assert config.generation.embedded.cache_rows == rows
    assert len([line for line in lines if line.startswith(f"set {ROWS}={rows}: ")]) == (rows > 0)


@pytest.mark.parametrize("given", [{ROWS}, set()])
def test_rows_for_turns_leave_most_memory(given):
    """Rows of 28k tokens would take more than there is. A choice on the command line stays, also that of no row."""
    values = {"rollout": {"agent": "multi_turn"}, "train": {"batch_groups": 64}}
    config = Config.model_validate(values)
    here = machine(0)
    chosen, _ = fit(config, given, here)
    if given:
        assert chosen.generation.embedded.cache_rows == 0
        return
    before, after = spare(config, here), spare(chosen, here)
    assert 0 < chosen.generation.embedded.cache_rows < 1024
    assert 0.74 * before < after < 0.8 * before


def spare(config, here):
    place = place_of(config, parse_allocation(config.allocation), backend_rules(config), here)
    return spare_bytes(config, place)


def test_gpu_with_one_owner_is_not_split():
    generation, cluster = GenerationConfig(backend="sglang"), ClusterConfig(share_gpus=True)
    config = Config(allocation="serve.d1+d1", generation=generation, cluster=cluster)
    assert fit(config, {"train"}, machine(2)) == (config, [])


def test_other_allocations_stay_as_they_are():
    config = Config(allocation="serve.d1+d2")
    assert fit(config, {"generation", "train"}, machine(8)) == (config, [])


@pytest.mark.parametrize(
    ("gpus", "given", "model", "backend"),
    [
        (1, set(), {}, "sglang"),
        (0, set(), {}, "embedded"),
        (1, {"generation"}, {}, "embedded"),
        (1, {"generation.backend"}, {}, "embedded"),
        (1, set(), {"small_on_gpu": True}, "embedded"),
    ],
)
def test_open_engine_on_gpus_is_sglang(gpus, given, model, backend):
    config = Config.model_validate({"model": model})
    config, lines = fit(config, given | {"train"}, machine(gpus))
    assert config.generation.backend == backend
    assert lines == (["set generation.backend=sglang: this machine has GPUs"] if backend == "sglang" else [])


SAVED = {
    "recompute": True,
    "distributed_optimizer": True,
    "sequence_parallel": True,
    "head_chunk_tokens": 2048,
    "overlap_grad_reduce": False,
}


@pytest.mark.parametrize(
    ("gpus", "cluster", "train", "given", "saved"),
    [
        (2, {}, {}, set(), SAVED),
        (0, {}, {}, set(), {}),
        (0, {"nodes": 2, "gpus_per_node": 8}, {}, set(), {**SAVED, "overlap_grad_reduce": True}),
        (0, {"gpu_memory_gb": 79}, {}, set(), SAVED),
        (2, {}, {}, {"train.recompute"}, {**SAVED, "recompute": False}),
        (2, {}, {"head_chunk_tokens": 64}, set(), {**SAVED, "head_chunk_tokens": 64}),
        (2, {}, {"optimizer": {"name": "sgd"}}, set(), {**SAVED, "distributed_optimizer": False}),
    ],
)
def test_training_on_gpus_saves_memory(gpus, cluster, train, given, saved):
    """In every experiment, unless the user has chosen or the optimizer cannot be sharded."""
    config = Config.model_validate({"cluster": cluster, "train": train, "allocation": "serve.d1+d1"})
    fitted, lines = fit(config, given | {"generation"}, machine(gpus))
    defaults = Config().train
    assert {name: getattr(fitted.train, name) for name in SAVED} == {
        name: saved.get(name, getattr(defaults, name)) for name in SAVED
    }
    changed = [name for name in SAVED if getattr(fitted.train, name) != getattr(config.train, name)]
    assert sorted(line.partition("=")[0] for line in lines) == sorted(f"set train.{name}" for name in changed)


@pytest.mark.parametrize(
    ("size", "allocation", "gib"),
    [
        ("1.5B", "serve.d6+d2", 141),
        ("1.5B", "serve.d6+d2", 80),
        ("7B", "serve.d4+d2m2", 80),
        ("7B", "serve.d4+d1p4", 80),
    ],
)
@pytest.mark.parametrize("given", [set(), {"train.recompute"}])
def test_fewest_layers_are_recomputed(size, allocation, gib, given, tmp_path):
    """Also if the user writes ``auto``: with one layer less, 6 GiB would not stay free."""
    train = {"distributed_optimizer": True, "sequence_parallel": True, "head_chunk_tokens": 2048}
    model = {"path": str(write_qwen(tmp_path, size)), "dtype": "bfloat16"}
    values = {"allocation": allocation, "model": model, "train": train | ({"recompute": "auto"} if given else {})}
    gpu = replace(machine(8), gpu_bytes=gib << 30)
    config, lines = fit(Config.model_validate(values), given | {"generation", "data"}, gpu)
    number = config.train.recompute
    assert isinstance(number, int) and not isinstance(number, bool)

    def fits(layers):
        changed = replaced(config, ["train", "recompute"], layers)
        return largest_rank(changed) <= 0.97 * ((gib - 6) << 30)

    assert fits(number) and (number == 0 or not fits(number - 1))
    assert (number > 0) == (gib < 100)
    [line] = [line for line in lines if "train.recompute" in line]
    assert line.startswith(f"set train.recompute={number}: the first layers of each stage; a training rank needs ")


@pytest.mark.parametrize(
    ("cluster", "gib", "reason"),
    [({}, 0, "memory"), ({"share_gpus": True}, 80, "servers share"), ({}, 40, "with fewer layers")],
)
def test_all_layers_are_recomputed(cluster, gib, reason, tmp_path):
    """If memory is unknown, if a server gets what a rank leaves, and if it is needed or not enough."""
    model = {"path": str(write_qwen(tmp_path, "7B")), "dtype": "bfloat16"}
    config = Config.model_validate({"allocation": "serve.d1+d1", "model": model, "cluster": cluster})
    gpu = replace(machine(8), gpu_bytes=gib << 30)
    config, lines = fit(config, {"generation", "data"}, gpu)
    assert config.train.recompute is True
    [line] = [line for line in lines if "train.recompute" in line]
    assert line.startswith("set train.recompute=True: ") and reason in line


@pytest.mark.parametrize(
    ("dtype", "given", "chosen"),
    [("bfloat16", set(), "float32"), ("float32", set(), "model"), ("bfloat16", {"model.head_dtype"}, "model")],
)
def test_logits_on_gpus_are_fp32(dtype, given, chosen):
    config = Config.model_validate({"model": {"dtype": dtype}, "allocation": "serve.d1+d1"})
    assert fit(config, given | {"generation"}, machine(2))[0].model.head_dtype == chosen


def test_choice_in_a_file_is_not_open(tmp_path):
    """Also if it is the default of the schema."""
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - arith\nexperiment: ours\ntrain:\n  recompute: false\n"
    (tmp_path / "experiment" / "ours.yaml").write_text(text)
    overrides = ["experiment=ours"]
    given = given_fields(overrides, config_dir=tmp_path)
    config, lines = fit(compose(overrides, config_dir=tmp_path), given, machine(1))
    assert not config.train.recompute and config.train.head_chunk_tokens == 2048
    assert not any("recompute=" in line for line in lines)


@pytest.mark.parametrize(("given", "problems"), [((), 0), (("evaluation.problems",), 512)])
def test_open_evaluation_is_off_without_servers(given, problems):
    """And no engine is chosen for GPUs that have no server."""
    config = changed("train.ppo.algorithm=sft", "allocation=d2", "evaluation.problems=512", "model.small_on_gpu=false")
    fitted, lines = fit(config, given, machine(2))
    assert (fitted.evaluation.problems, fitted.generation.backend) == (problems, "embedded")
    said = "set evaluation.problems=0: allocation=d2 has no servers to sample from"
    assert (said in lines) == (not given)


@pytest.mark.parametrize(("gpus", "problems", "allocation"), [(0, 0, "d1"), (8, 0, "d8"), (8, 5, "serve.d6+d2")])
def test_automatic_allocation_has_servers_for_what_is_sampled(gpus, problems, allocation):
    words = ["train.ppo.algorithm=sft", "allocation=auto", f"evaluation.problems={problems}"]
    config, _ = fit(changed(*words), {word.partition("=")[0] for word in words}, machine(gpus))
    assert config.allocation == allocation
