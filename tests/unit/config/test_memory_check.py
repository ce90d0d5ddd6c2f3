"""What does not fit is refused with the number and the cheapest change; the shipped experiment fits."""

from dataclasses import replace

import pytest

from realsys.config.allocation import parse_allocation
from realsys.config.backend_rules import backend_rules
from realsys.config.device_memory import GIB, OnHost, server_use
from realsys.config.fields import replaced
from realsys.config.machine import Machine
from realsys.config.memory_check import (
    Place,
    check_memory,
    device_lines,
    host_line,
    largest_rank,
    place_of,
    turns_line,
)
from realsys.config.memory_remedies import Remedy, ranks_fit, smallest_training
from realsys.config.rules import check
from realsys.errors import ConfigError
from realsys.launch.fit import fit
from tests.support.processes.config_trees import changed
from tests.unit.config.test_device_memory import OFF, math_config

H100 = 79 * GIB
SGLANG = ["generation.backend=sglang", "generation.sglang.python=/bin/true"]
LORA = ["train.lora.rank=8", "train.microbatch_tokens=28672"]
EIGHT = Machine(64, 1024 * GIB, tuple("01234567"), torch_has_cuda=True, gpu_bytes=H100)


def gpus(config, ranks_beside=0):
    allocation = parse_allocation(config.allocation)
    here = OnHost(allocation.workers, allocation.inference.data, 4, ranks_on_gpu=True, servers_on_gpu=True)
    return Place(H100, 1024 * GIB, here, owners=[(ranks_beside, 1)])


def refusal(config, place):
    with pytest.raises(ConfigError) as caught:
        check_memory(config, place)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(("name", "allocation"), [("1.5B", "serve.d6+d2"), ("7B", "serve.d4+d2m2")])
def test_shipped_experiment_fits_eight_gpus(name, allocation, tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text("".join(f'{{"prompt": "{n}+1", "answer": "2"}}\n' for n in range(100)))
    config = math_config(tmp_path, name, f"data.train={data}", *SGLANG)
    config, _ = fit(config, set(), EIGHT)
    assert config.allocation == allocation
    check(config, EIGHT)


def test_defaults_without_the_settings_are_refused(tmp_path):
    """1.5B needs 129 GiB; chunks of logits and smaller micro-batches are cheaper than recompute, and not enough."""
    error = refusal(config := math_config(tmp_path, "1.5B", *OFF, *SGLANG, "allocation=serve.d6+d2"), gpus(config))
    assert "model_worker/0-1 needs about 1" in str(error) and "76.6 GiB are usable" in str(error)
    assert "set " in str(error) and "then it needs" in str(error)


@pytest.mark.parametrize(
    ("name", "overrides", "change"),
    [
        (
            "7B",
            ["serve.d4+d2m2", "train.distributed_optimizer=false", "train.microbatch_tokens=49152"],
            "distributed_optimizer=true",
        ),
        (
            "1.5B",
            ["serve.d6+d2", "train.head_chunk_tokens=0", "train.microbatch_tokens=65536"],
            "microbatch_tokens=28672",
        ),
    ],
)
def test_cheapest_change_is_named(name, overrides, change, tmp_path):
    config = math_config(tmp_path, name, *SGLANG, f"allocation={overrides[0]}", *overrides[1:])
    assert f": set train.{change}, then it needs" in str(refusal(config, gpus(config)))


def test_named_change_is_enough(tmp_path):
    config = math_config(tmp_path, "7B", *OFF, *SGLANG, "allocation=serve.d4+d4")
    message = str(refusal(config, gpus(config)))
    words = message.partition(": set ")[2].partition(", then")[0].split()
    values = dict(word.split("=") for word in words)
    applied = changed(*(f"{key}={value}" for key, value in _tree(config, values).items()), experiment="math")
    assert ranks_fit(applied, H100)


def _tree(config, values):
    off = dict(word.split("=") for word in OFF)
    return (
        {"model.path": config.model.path, "generation.backend": "sglang", "allocation": config.allocation}
        | off
        | values
    )


def test_other_allocation_is_named_if_settings_fail(tmp_path):
    config = math_config(tmp_path, "7B", *SGLANG, "allocation=serve.d7+d1")
    error = refusal(config, gpus(config))
    assert error.field == "allocation" and "set allocation=serve.d4+d2m2" in str(error)


def test_stages_of_a_server_fit_small_gpus(tmp_path):
    """32B on four GPUs of 39 GiB: each has a quarter of the weights."""
    config = math_config(tmp_path, "32B", *SGLANG, "allocation=serve.d1+d8", "generation.sglang.args.pp-size=4")
    place = replace(gpus(config), gpu_bytes=39 * GIB, host_bytes=0)
    check_memory(config, replace(place, here=replace(place.here, ranks_on_gpu=False)))


def test_other_allocation_counts_gpus_of_servers(tmp_path):
    """Three servers of two GPUs each, and two ranks: the other allocation has 8 GPUs, too."""
    config = math_config(tmp_path, "7B", *SGLANG, "allocation=serve.d3+d2", "generation.sglang.args.tp-size=2")
    config = replaced(config, ["train", "distributed_optimizer"], value=False)
    small = replace(gpus(config), gpu_bytes=60 * GIB)
    assert "set allocation=serve.d2+d1m4" in str(refusal(config, small))


def test_too_large_a_model_says_so(tmp_path):
    config = math_config(tmp_path, "32B", *SGLANG, "allocation=serve.d2m2+d4")
    assert smallest_training(config, 8, H100) is None
    assert "use more GPUs" in str(refusal(config, gpus(config)))


def test_adapters_make_a_large_model_fit(tmp_path):
    config = math_config(tmp_path, "32B", *SGLANG, "allocation=serve.d2m2+m4", "train.lora.rank=16")
    check_memory(config, gpus(config))


def test_cache_of_the_embedded_engine_is_bounded(tmp_path):
    embedded = ["generation.backend=embedded", "allocation=serve.d4+d2m2"]
    error = refusal(config := math_config(tmp_path, "7B", *embedded), gpus(config))
    assert error.field == "generation.embedded.max_running"
    running = int(str(error).partition("set generation.embedded.max_running=")[2].split()[0])
    check_memory(math_config(tmp_path, "7B", *embedded, f"generation.embedded.max_running={running}"), gpus(config))
    refusal(math_config(tmp_path, "7B", *embedded, f"generation.embedded.max_running={running + 1}"), gpus(config))


def test_server_beside_a_rank_counts_both(tmp_path):
    """On one GPU a server has what the rank leaves."""
    config = math_config(tmp_path, "1.5B", *SGLANG, "allocation=serve.d1+d1")
    check_memory(config, gpus(config))
    larger = math_config(tmp_path, "14B", *SGLANG, "allocation=serve.d1+d1", *LORA)
    check_memory(larger, gpus(larger))
    assert "beside a training rank" in str(refusal(larger, gpus(larger, ranks_beside=1)))


@pytest.mark.parametrize("servers", [2, 3])
def test_servers_of_one_gpu_are_counted(servers, tmp_path):
    """Each has a part of what the rank leaves; the number of completions that is named fits, and no more does."""
    one = Machine(64, 1024 * GIB, ("0",), torch_has_cuda=True, gpu_bytes=H100)

    def config(running):
        given = ["generation.backend=embedded", f"allocation=serve.d{servers}+d1", "cluster.share_gpus=true"]
        return math_config(tmp_path, "1.5B", *given, *LORA, f"generation.embedded.max_running={running}")

    def place(config):
        return place_of(config, parse_allocation(config.allocation), backend_rules(config), one)

    error = refusal(wanted := config(64), place(wanted))
    other = f"{servers - 1} other server" + "s" * (servers > 2)
    assert f"beside a training rank with {largest_rank(wanted) / GIB:.1f} GiB and {other}, " in str(error)
    running = int(str(error).partition("set generation.embedded.max_running=")[2].split()[0])
    check_memory(fitting := config(running), place(fitting))
    use = server_use(fitting, parse_allocation(fitting.allocation), on_gpu=True)
    assert 0.9 * H100 < servers * use.total + largest_rank(fitting) <= 0.97 * H100


def test_host_memory_names_its_parts():
    config = changed()
    here = OnHost(2, 1, 4)
    check_memory(config, Place(0, 8 * GIB, here))
    error = refusal(config, Place(0, 9 * GIB // 4, here))
    assert "of host memory, 2.2 GiB are free" in str(error) and "processes" in str(error)


@pytest.mark.parametrize(
    ("free", "changes"),
    [
        (322, "train.engine_check=0"),
        (307, "train.engine_check=0 weights.delta=off"),
        (237, "train.offload=none"),
        (187, "train.engine_check=0 weights.delta=off train.offload=none"),
    ],
)
def test_host_of_gpus_names_a_change(free, changes, tmp_path):
    """7B on 8 GPUs: snapshot 20 GiB, copies of deltas 14, offloaded optimizer 123, and 181 without these."""
    given = ["allocation=serve.d4+d2m2", "weights.delta=auto", "train.offload=optimizer"]
    config = math_config(tmp_path, "7B", *SGLANG, *given)
    place = replace(gpus(config), host_bytes=free * GIB)
    assert f": set {changes}, then it needs" in str(refusal(config, place))


def test_named_change_must_fit_the_gpus(tmp_path):
    """Without offload of the reference a rank needs 60 GiB, with it 54."""
    given = ["allocation=serve.d4+d2m2", "train.ppo.kl.coef=0.1", "roles.ref.offload=all"]
    config = math_config(tmp_path, "7B", *SGLANG, *given)
    large = replace(gpus(config), host_bytes=207 * GIB)
    assert ": set roles.ref.offload=none, then it needs" in str(refusal(config, large))
    assert "use a smaller model" in str(refusal(config, replace(large, gpu_bytes=57 * GIB)))


def test_logits_on_a_cpu_are_chunked(tmp_path):
    """Without GPUs the same changes are tried against the memory of the host."""
    config = math_config(tmp_path, "1.5B", *OFF, "allocation=serve.d1+d1", "train.microbatch_tokens=28672")
    config = config.model_copy(update={"generation": changed().generation})
    error = refusal(config, Place(0, 150 * GIB, OnHost(1, 1, 4)))
    assert error.field.startswith("train.") and "then it needs" in str(error)


def test_plan_for_another_machine_needs_its_gpu_memory(tmp_path):
    """A login node without GPUs and with little memory plans for GPUs elsewhere."""
    login = Machine(4, 8 * GIB)
    config = math_config(tmp_path, "7B", *SGLANG, "allocation=serve.d4+d2m2", "cluster.gpu_memory_gb=79")
    allocation = parse_allocation(config.allocation)
    place = place_of(config, allocation, backend_rules(config), login)
    assert (place.gpu_bytes, place.host_bytes, place.here.ranks_on_gpu) == (H100, 0, True)
    check_memory(config, place)
    smaller = math_config(tmp_path, "7B", *SGLANG, "allocation=serve.d4+d2m2", "cluster.gpu_memory_gb=39")
    assert "37.8 GiB are usable" in str(refusal(smaller, place_of(smaller, allocation, backend_rules(smaller), login)))


NODES = ["cluster.nodes=4", "cluster.gpus_per_node=8", "cluster.gpu_memory_gb=79", "allocation=serve.d8+d8m2"]


def test_each_node_is_checked_with_its_own_processes(tmp_path):
    """Two nodes of ranks, one of servers, one without: not the sum of the trial, and not the login node."""
    config = math_config(tmp_path, "7B", *SGLANG, *NODES, "cluster.memory_gb_per_node=900")
    place = place_of(config, parse_allocation(config.allocation), backend_rules(config), Machine(4, 8 * GIB))
    assert [(here.ranks, here.servers) for here in place.nodes.values()] == [(8, 0), (8, 0), (0, 8), (0, 0)]
    check_memory(config, place)
    assert "node0, the fullest node, 900.0 are free" in host_line(config, place)
    small = math_config(tmp_path, "7B", *SGLANG, *NODES, "cluster.memory_gb_per_node=40")
    place = place_of(small, parse_allocation(small.allocation), backend_rules(small), Machine(4, 8 * GIB))
    assert "node0 needs about" in str(error := refusal(small, place)) and "40.0 GiB are free" in str(error)


def test_table_has_a_line_per_kind_of_device(tmp_path):
    config = math_config(tmp_path, "7B", *SGLANG, "allocation=serve.d4+d2m2")
    head, rank, server = device_lines(config, gpus(config))
    assert head.split()[:4] == ["device,", "GiB", "weights", "gradients"]
    assert rank.split()[0] == "model_worker/0-3" and rank.split()[-1] == "76.6"
    assert server.split()[0] == "generation_server/0-3" and server.split()[-1] == "69.5"
    assert len({len(line) for line in (head, rank, server)}) == 1
    assert "staged" in host_line(config, gpus(config))


def test_turns_have_a_line_and_a_row_each(tmp_path):
    """Servers of their own have a row, too: without the libraries of a rank, and of its communicator."""
    config = math_config(tmp_path, "1.5B", *SGLANG, "allocation=serve.d1+serve.d2|d2")
    _, rank, own, server = device_lines(config, place := gpus(config))
    assert rank.startswith("model_worker/0-1 while servers sleep ") and rank.split()[-1] == "76.6"
    assert own.startswith("generation_server/0  ") and server.startswith("generation_server/1-2 while ranks wait ")
    assert float(server.split()[-2]) - float(own.split()[-2]) == pytest.approx(1.4, abs=0.11)
    offloaded = place.fullest_host(config)[1].offload / GIB
    line = turns_line(config, place)
    assert line.startswith("2 of 3 servers and 2 of 2 training ranks use the same devices in turn; ")
    assert line.endswith(f"are in {offloaded:.1f} GiB of host memory") and offloaded > 20
    assert not turns_line(math_config(tmp_path, "1.5B", *SGLANG, "allocation=serve.d1+d2"), place)
    assert turns_line(changed("allocation=serve.d1|d1"), Place(0, 0, OnHost(1, 1, 4))).endswith("in files")


def test_either_turn_that_does_not_fit_is_refused(tmp_path):
    """7B: the rank is too large for a GPU of 80 GB; with adapters it fits one, and no server fits one of 20 GB."""
    config = math_config(tmp_path, "7B", *SGLANG, "allocation=serve.d1|d1")
    error = refusal(config, gpus(config))
    assert "model_worker/0 while servers sleep needs about" in str(error) and "use more GPUs" in str(error)
    small = math_config(tmp_path, "7B", *SGLANG, "allocation=serve.d1|d1", *LORA, "train.recompute=true")
    check_memory(small, gpus(small))
    place = replace(gpus(small), gpu_bytes=19 * GIB)
    place = replace(place, here=replace(place.here, ranks_on_gpu=False))
    assert "generation_server/0 while ranks wait needs about 17." in str(refusal(small, place))


def test_remedies_keep_the_turns(tmp_path):
    whole = "train.distributed_optimizer=false"
    config = math_config(tmp_path, "7B", *SGLANG, "allocation=serve.d1+serve.d4|d4", whole)
    assert "set 'allocation=serve.d1+serve.d4|d2m2', then it needs" in str(refusal(config, gpus(config)))
    host = math_config(tmp_path, "1.5B", *SGLANG, "allocation=serve.d1|d1", "train.ppo.kl.coef=0.1")
    place = gpus(host)
    error = refusal(host, replace(place, host_bytes=place.fullest_host(host)[1].total - 8 * GIB))
    assert "offload" not in str(error).partition(": set")[2]


def test_change_is_shown_as_it_is_typed():
    remedy = Remedy(1.0, {"train.recompute": True, "train.head_chunk_tokens": 2048})
    assert str(remedy) == "train.recompute=true train.head_chunk_tokens=2048"
    applied = remedy.apply(changed())
    assert applied.train.recompute and applied.train.head_chunk_tokens == 2048
