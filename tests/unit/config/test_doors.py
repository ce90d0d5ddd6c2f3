"""Every door refuses what cannot be used with one line and exit code 2, before anything starts."""

import importlib
import sys
from dataclasses import replace

import pytest

from realsys.config.allocation import ACTOR, ParallelLayout
from realsys.config.dataflow import RoleSettings, dataflow_of
from realsys.config.machine import Machine, visible_gpus
from realsys.config.rank_memory import States, StateSettings, shard_of, states_of
from realsys.config.rules import sampling_warnings
from realsys.config.schema import Config, SamplingConfig
from realsys.config.schema_train import LoraConfig, OptimizerConfig
from realsys.config.trial_sizes import batch_tokens, disk_bytes, model_of, record_bytes
from realsys.data.arith import make_tiny_model
from realsys.errors import ConfigError
from realsys.launch.cli import main
from realsys.model_files.config_json import read_model
from tests.support.data.data_rows import FEW_ROWS
from tests.support.processes.config_trees import changed
from tests.support.serving.qwen_models import QWEN, write_qwen

MODULES = {
    "door_raises": "raise RuntimeError('first line\\nsecond line')\n",
    "door_exits": "import sys\nsys.exit(7)\n",
    "door_broken": "def broken(:\n",
    "door_imports": "import no_such_library_of_a_door\n",
    "door_late": "def __getattr__(name):\n    raise OSError(f'no file for\\n{name}')\n",
    "door_user": """
import sys
from realsys.config.dataflow import Dataflow, FunctionCall
from realsys.generation.backend import Backend
from realsys.weights.disk.transport import DiskTransport

NUMBER = 7

def flow(**fields):
    return Dataflow([FunctionCall("a", "actor", **({"handler": "sft", "inputs": frozenset({"tokens"})} | fields))])

def bad_handler(config):
    return flow(handler="door_raises:thing")

def bad_hook(config):
    return flow(pre_hooks=("door_raises:thing",))

class Empty:
    pass

class ExitingTransport(DiskTransport):
    def __init__(self, config):
        sys.exit(3)

class ExitingBackend(Backend):
    def __init__(self, config):
        sys.exit(3)

    def build(self, *args):
        raise NotImplementedError

class ExitingAgent:
    def __init__(self, parts):
        pass

    @staticmethod
    def longest_row(config):
        sys.exit(3)

    async def run(self, task, session):
        raise NotImplementedError

def exiting_algorithm(config):
    sys.exit(3)

def exiting_loss(inputs):
    sys.exit(3)
""",
}
FIELDS = (
    "rollout.agent",
    "rollout.environment",
    "data.verifier",
    "train.ppo.loss",
    "train.ppo.algorithm",
    "weights.transport",
    "generation.backend",
)
WITHOUT_ARGUMENTS = ("data.verifier", "train.ppo.algorithm")
#: value -> part of the message
BAD = {
    "no_such_name": "use one of",
    "no_such_module:thing": "no module named 'no_such_module'",
    "door_raises:thing": "RuntimeError: first line second line",
    "door_exits:thing": "SystemExit: 7",
    "door_broken:thing": "SyntaxError",
    "door_imports:thing": "no_such_library_of_a_door",
    "door_late:thing": "no file for thing",
    "door_user:missing": "no attribute 'missing'",
    "door_user:NUMBER": "not int",
}
EXITING = {
    "rollout.agent": "ExitingAgent",
    "weights.transport": "ExitingTransport",
    "generation.backend": "ExitingBackend",
    "train.ppo.algorithm": "exiting_algorithm",
    "train.ppo.loss": "exiting_loss",
}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    folder = tmp_path / "modules"
    folder.mkdir()
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


def refusal(folder, capsys, *overrides):
    """The line on stderr of a run that is refused."""
    code = main(["run", "experiment=arith", *FEW_ROWS, f"fileroot={folder / 'runs'}", *overrides])
    output = capsys.readouterr()
    assert code == 2, output
    assert not (folder / "runs").exists()
    (line,) = output.err.splitlines()
    return line


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("field", FIELDS)
def test_bad_name_is_one_line(field, value, modules, capsys):
    line = refusal(modules, capsys, f"{field}={value}")
    assert field in line and value in line and BAD[value] in line


@pytest.mark.parametrize("field", [field for field in FIELDS if field not in WITHOUT_ARGUMENTS])
def test_unknown_argument_is_one_line(field, modules, capsys):
    line = refusal(modules, capsys, f"+{field}_args.no_such_argument=1")
    assert f"{field}_args" in line


@pytest.mark.parametrize("name", ["handler", "pre_hooks"])
def test_bad_handler_or_hook_is_one_line(name, modules, capsys):
    line = refusal(modules, capsys, f"train.ppo.algorithm=door_user:bad_{name.removeprefix('pre_').rstrip('s')}")
    assert f"dataflow.a.{name}" in line and "RuntimeError: first line second line" in line


@pytest.mark.parametrize("field", ["rollout.agent", "rollout.environment", "weights.transport", "generation.backend"])
def test_class_without_the_methods_is_one_line(field, modules, capsys):
    line = refusal(modules, capsys, f"{field}=door_user:Empty")
    assert "lacks" in line or "must derive from" in line


@pytest.mark.parametrize("field", EXITING)
def test_code_that_exits_is_one_line(field, modules, capsys):
    line = refusal(modules, capsys, f"{field}=door_user:{EXITING[field]}")
    assert field in line and "SystemExit: 3" in line


# ---- The model that a memory prediction counts is the one that is made or read


@pytest.mark.parametrize("chat", [False, True])
def test_tiny_model_is_counted_as_written(chat, tmp_path):
    config = Config.model_validate({"model": {"tiny": {"chat": chat}}})
    make_tiny_model(config.model.tiny, tmp_path, seed=0)
    written, counted = read_model(tmp_path), model_of(config)
    assert (counted.vocab, counted.parameters) == (written.vocab, written.parameters)


# ---- Estimates of the disk against numbers that are worked out by hand


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


# ---- Description of the machine: CPU cores, memory and visible GPUs


def test_machine_describes_this_one():
    here = Machine.here({"CUDA_VISIBLE_DEVICES": ""})
    assert here.cpus >= 1 and here.memory_bytes > 1 << 20
    assert here.gpus == () and here.node().gpus == 0


@pytest.mark.parametrize(
    ("chosen", "gpus"),
    [
        (None, "0 1 2"),
        ("2,0", "2 0"),
        ("-1", ""),
        ("NoDevFiles", ""),
        ("1,-1,2", "1"),
        ("0,7", "0"),
        ("GPU-ab", "GPU-ab"),
    ],
)
def test_visible_gpus_are_those_that_cuda_shows(chosen, gpus):
    assert visible_gpus(chosen, present=3) == tuple(gpus.split())


def test_gpu_that_is_visible_twice_is_refused():
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES='0,0': names a GPU twice"):
        visible_gpus("0,0", present=1)
