"""Host memory: processes, snapshots, offload buffers, published and staged weights."""

import pytest

from realsys.config.allocation import parse_allocation
from realsys.config.dataflow import dataflow_of
from realsys.config.device_memory import OnHost, host_use
from realsys.model_files.config_json import read_model
from tests.support.processes.config_trees import changed
from tests.unit.config.test_device_memory import math_config

EIGHT_GPUS = OnHost(4, 4, 4, ranks_on_gpu=True, servers_on_gpu=True)


def use(config, here=EIGHT_GPUS):
    return host_use(config, parse_allocation(config.allocation), dataflow_of(config), here)


def test_servers_share_the_staged_copy(tmp_path):
    """7B on four servers: 15.2 GB; each embedded engine has one copy more, and one tensor in fp32."""
    found = use(math_config(tmp_path, "7B", "allocation=serve.d4+d2m2", "generation.backend=sglang"))
    model = read_model(tmp_path / "7B")
    assert found.staged == 2 * model.parameters
    embedded = use(math_config(tmp_path, "7B", "allocation=serve.d4+d2m2", "generation.backend=embedded"))
    assert embedded.staged == found.staged + 4 * (2 * model.parameters + 4 * model.vocab * model.hidden)
    assert [found.published, found.snapshot] == pytest.approx([1.44 * 2 * model.parameters] * 2, rel=0.001)
    assert found.ranks == found.servers == 0


def test_deltas_add_a_copy_on_the_ranks(tmp_path):
    plain = use(math_config(tmp_path, "7B", "allocation=serve.d4+d2m2"))
    delta = use(math_config(tmp_path, "7B", "allocation=serve.d4+d2m2", "weights.delta=auto"))
    size = 2 * read_model(tmp_path / "7B").parameters
    assert (delta.staged - plain.staged, delta.published - plain.published) == (0, size)


@pytest.mark.parametrize(("transport", "engines", "more"), [("memory", 1, 1), ("group", 4, 2)])
def test_host_of_servers_keeps_weights_under_adapters(transport, engines, more, tmp_path):
    """By group each engine has a copy of its own; with adapters the host has a merged one, too."""
    settings = ["allocation=serve.d4+d2m2", "generation.backend=sglang", f"weights.transport={transport}"]
    plain, adapted = (use(math_config(tmp_path, "7B", *settings, f"train.lora.rank={rank}")) for rank in (0, 16))
    size = 2 * read_model(tmp_path / "7B").parameters
    assert (plain.staged, adapted.staged) == (engines * size, (engines + more) * size)


def test_half_of_the_ranks_move_half_to_host(tmp_path):
    config = math_config(tmp_path, "1.5B", "allocation=serve.d4+d4", "train.offload=optimizer")
    whole, half = use(config), use(config, OnHost(2, 2, 2, ranks_on_gpu=True, servers_on_gpu=True))
    count = read_model(tmp_path / "1.5B").parameters
    assert whole.offload == pytest.approx(12 * count * 1.44, rel=0.001)
    assert half.offload == pytest.approx(whole.offload / 2, rel=0.001)


@pytest.mark.parametrize("layout", ["d2m2", "d4", "d1p2m2"])
def test_checkpoint_is_copied_once(layout, tmp_path):
    """Master weights and two moments in fp32, pinned, whatever the layout; half of it if half of the ranks are here."""
    config = math_config(tmp_path, "7B", f"allocation=serve.d4+{layout}")
    count = read_model(tmp_path / "7B").parameters
    assert use(config).checkpoint == int(12 * count * 1.44)
    assert use(config, OnHost(2, 2, 4, ranks_on_gpu=True, servers_on_gpu=True)).checkpoint == int(6 * count * 1.44)


@pytest.mark.parametrize(
    ("given", "bytes_each"), [("model.dtype=float32", 12), ("train.optimizer.name=sgd", 8), ("train.lora.rank=1", 2)]
)
def test_checkpoint_has_what_is_trained(given, bytes_each, tmp_path):
    config = math_config(tmp_path, "7B", "allocation=serve.d4+d4", given)
    count = read_model(tmp_path / "7B").parameters
    assert use(config).checkpoint == pytest.approx(bytes_each * count * 1.44, rel=0.01)


def test_no_copy_without_checkpoints(tmp_path):
    off = ["every_steps=0", "at_end=false", "on_stop=false"]
    config = math_config(tmp_path, "7B", "allocation=serve.d4+d4", *(f"checkpoint.{field}" for field in off))
    assert use(config).checkpoint == 0


def test_without_gpus_the_models_are_in_host_memory():
    """The arith job: 16 bytes per parameter and rank; the cache of 513 rows of 248 positions, 2 KiB each."""
    config = changed("train.microbatch_tokens=248", "train.engine_check=0")
    found = use(config, OnHost(2, 1, 4))
    assert found.ranks > 2 * 16 * 307_328
    assert found.servers > 513 * 248 * 2 * 2 * 2 * 32 * 4
    assert (found.snapshot, found.offload) == (0, 0)


def test_ranks_in_turn_move_to_the_host(tmp_path):
    """Weights, master weights and moments, pinned; gradients are dropped. Ranks apart from servers stay."""
    whole = use(math_config(tmp_path, "1.5B", "allocation=serve.d4|d4"))
    count = read_model(tmp_path / "1.5B").parameters
    assert whole.offload == pytest.approx(4 * (2 + 12 / 4) * count * 1.44, rel=0.001)
    assert use(math_config(tmp_path, "1.5B", "allocation=serve.d4+d4")).offload == 0


@pytest.mark.parametrize(("running", "greater"), [(64, "ranks"), (100_000, "servers")])
def test_turns_take_memory_of_a_host_in_turn(running, greater):
    """Without GPUs: the ranks go to files while servers serve. Servers of their own stay."""
    given = ["train.microbatch_tokens=8192", "train.engine_check=0", f"generation.embedded.max_running={running}"]
    here = OnHost(2, 2, 4)
    apart, in_turn, one = (
        use(changed(*given, f"allocation={text}"), here)
        for text in ("serve.d2+d2", "serve.d2|d2", "serve.d1+serve.d1|d2")
    )
    sides = {"ranks": apart.ranks, "servers": apart.servers}
    assert max(sides, key=lambda side: sides[side]) == greater
    assert {"ranks": in_turn.ranks, "servers": in_turn.servers} == {**dict.fromkeys(sides, 0), greater: sides[greater]}
    assert one.servers == (apart.servers // 2 if greater == "ranks" else apart.servers)
    assert in_turn.offload == 0


def test_all_parts_of_a_server_are_on_its_host(tmp_path):
    given = ["generation.backend=sglang", "allocation=serve.d1+d1"]
    one = use(math_config(tmp_path, "7B", *given), OnHost(1, 1, 4))
    two = use(math_config(tmp_path, "7B", *given, "generation.sglang.args={dp-size: 2}"), OnHost(1, 1, 4))
    assert two.servers == 2 * one.servers > 0


def test_engine_of_its_own_adds_to_the_processes():
    assert OnHost(1, 2, 3, engine=7).processes - OnHost(1, 2, 3).processes == 14
