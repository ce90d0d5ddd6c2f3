"""The process plan, and what the command does before anything starts."""

import os
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from realsys.cluster.process import own_python_path
from realsys.config.device_memory import usable_bytes
from realsys.config.device_plan import nodes_of, seats_of
from realsys.config.machine import Machine
from realsys.config.memory_check import largest_rank
from realsys.config.paths import TrialPaths, read_config
from realsys.config.schema import Config, GenerationConfig
from realsys.config.schema_rollout import RewardConfig, RolloutConfig
from realsys.errors import ConfigError, RealsysError
from realsys.launch.cli import main
from realsys.launch.prepare import prepare, resolve
from realsys.launch.process_plan import on_this_machine, plan
from realsys.launch.run import node_needs
from tests.support.data.data_rows import FEW_ROWS

CPU = Machine(cpus=4, memory_bytes=32 << 30)
ROOT = Path(__file__).resolve().parents[3]


def planned(machine=CPU, **fields):
    config = Config.model_validate({"trial": "t", **fields})
    seats = seats_of(config, machine, nodes_of(config, machine))
    return on_this_machine(plan(config, TrialPaths(Path("/runs/x/t")), seats, "run-1"), machine)


def devices(specs):
    return {spec.name: spec.env.get("CUDA_VISIBLE_DEVICES") for spec in specs}


def gpus(count):
    return Machine(cpus=16, memory_bytes=64 << 30, gpus=tuple(map(str, range(count))), torch_has_cuda=True)


def test_plan_of_one_server_and_one_rank_golden():
    specs = planned()
    assert [spec.name for spec in specs] == [
        "gserver_manager/0",
        "generation_server/0",
        "model_worker/0",
        "rollout_worker/0",
        "rollout_worker/1",
        "master_worker/0",
    ]
    server = specs[1]
    assert server.argv == (
        sys.executable,
        "-P",
        "-m",
        "realsys.workers.generation_server",
        "--trial-dir",
        "/runs/x/t",
        "--index",
        "0",
    )
    assert server.log == Path("/runs/x/t/logs/generation_server-0.log")
    assert server.env == {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "REALSYS_RUN_ID": "run-1",
        "TOKENIZERS_PARALLELISM": "false",
    }


@pytest.mark.parametrize(("given", "others"), [("", ""), ("/a:/b", ":/a:/b"), (f"{ROOT}:/a:{ROOT}", ":/a")])
def test_python_path_has_this_realsys_once(given, others):
    assert own_python_path(given) == f"{ROOT}{others}"


def test_each_kind_has_number_and_restart_policy():
    specs = planned(allocation="sglang.d3+d2p2m2", rollout=RolloutConfig(workers=4))
    kinds = [spec.kind for spec in specs]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "gserver_manager": 1,
        "generation_server": 3,
        "model_worker": 8,
        "rollout_worker": 4,
        "master_worker": 1,
    }
    assert {spec.kind for spec in specs if spec.on_death == "restart_training"} == {"model_worker", "master_worker"}
    assert {spec.on_death for spec in specs if spec.kind not in ("model_worker", "master_worker")} == {"restart"}
    assert len({spec.log for spec in specs}) == len(specs)


def test_run_without_servers_has_no_process_of_rollout():
    """Whatever the settings of rollout say."""
    specs = planned(
        allocation="d2",
        train={"ppo": {"algorithm": "sft"}},
        rollout=RolloutConfig(workers=4, reward=RewardConfig(services=2)),
    )
    assert [spec.name for spec in specs] == ["gserver_manager/0", "model_worker/0", "model_worker/1", "master_worker/0"]


def test_reward_services_judge_for_rollout_workers():
    """They have the cores of the verifier processes, and are restarted alone."""
    specs = planned(rollout=RolloutConfig(workers=2, reward=RewardConfig(services=2, processes=3)))
    by_name = {spec.name: spec for spec in specs}
    assert (by_name["reward_service/1"].cpus, by_name["rollout_worker/1"].cpus) == (4, 1)
    assert by_name["reward_service/0"].argv[3] == "realsys.workers.reward_service"
    assert by_name["reward_service/0"].on_death == "restart"


def test_threads_are_those_of_the_kind():
    specs = planned(cluster={"threads": 3})
    assert {spec.name: spec.env["OMP_NUM_THREADS"] for spec in specs}["generation_server/0"] == "3"
    assert {spec.name: spec.env["OMP_NUM_THREADS"] for spec in specs}["model_worker/0"] == "3"
    assert {spec.name: spec.env["OMP_NUM_THREADS"] for spec in specs}["master_worker/0"] == "1"


def test_one_gpu_is_shared_only_on_request():
    with pytest.raises(ConfigError, match="2 GPUs are needed .* and there are 1: .*cluster.share_gpus=true"):
        planned(gpus(1))
    placed = devices(planned(gpus(1), cluster={"share_gpus": True}))
    assert placed["model_worker/0"] == placed["generation_server/0"] == "0"


def test_seat_is_an_index_not_a_device_id():
    machine = Machine(cpus=16, memory_bytes=64 << 30, gpus=("4", "6"), torch_has_cuda=True)
    server, rank = planned(machine)[1:3]
    assert (rank.node, rank.gpus, rank.env["CUDA_VISIBLE_DEVICES"]) == ("this machine", (0,), "4")
    assert (server.gpus, server.env["CUDA_VISIBLE_DEVICES"]) == ((1,), "6")


def test_spec_has_what_its_process_needs():
    reward = {"processes": 3}
    by_name = {spec.name: spec for spec in planned(cluster={"threads": 4}, rollout={"workers": 1, "reward": reward})}
    assert (by_name["model_worker/0"].cpus, by_name["rollout_worker/0"].cpus) == (4, 4)
    assert by_name["model_worker/0"].memory > by_name["master_worker/0"].memory > 0


@pytest.mark.parametrize(("ports", "meeting"), [("", 25000), ("20000-20099", 20099)])
def test_server_over_two_nodes_is_two_processes(ports, meeting):
    """Each has its own log, its node rank and the address at which both meet."""
    config = Config.model_validate(
        {
            "allocation": "serve.d1m8+d8",
            "generation": {"backend": "sglang", "sglang": {"args": {"pp-size": 2}}},
            "cluster": {"nodes": 3, "gpus_per_node": 8, "ports": ports},
        }
    )
    seats = seats_of(config, CPU, nodes_of(config, CPU), {"generation_server"})
    first, second = plan(config, TrialPaths(Path("/runs/x/t")), seats, "run-1")
    assert (first.name, first.node, first.node_rank) == ("generation_server/0", "node0", 0)
    assert (second.name, second.node, second.node_rank) == ("generation_server/0.1", "node1", 1)
    assert first.init_address == second.init_address == f"node0:{meeting}"
    assert first.nodes == second.nodes == 2 and first.gpus == second.gpus == tuple(range(8))
    assert first.log != second.log and "CUDA_VISIBLE_DEVICES" not in first.env


def test_torch_without_cuda_leaves_the_gpus_to_sglang():
    machine = Machine(cpus=16, memory_bytes=64 << 30, gpus=("0", "1"), torch_has_cuda=False)
    placed = devices(planned(machine, generation=GenerationConfig(backend="sglang")))
    assert placed["model_worker/0"] == "" and placed["generation_server/0"] == "0"


# ---- names and folders


def test_unnamed_trial_is_named_by_start_time(tmp_path):
    now = datetime(2026, 1, 2, 3, 4, 5)
    first = resolve(Config(fileroot=str(tmp_path)), now=now)
    assert first.trial == "20260102-030405"
    TrialPaths.of(first).root.mkdir(parents=True)
    assert resolve(Config(fileroot=str(tmp_path)), now=now).trial == "20260102-030405-2"


def test_paths_are_absolute_in_the_resolved_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = resolve(Config.model_validate({"data": {"train": "t.jsonl"}, "model": {"path": "m"}}), now=datetime.now())
    assert config.data.train == str(tmp_path / "t.jsonl") and config.data.eval == ""
    assert config.model.path == str(tmp_path / "m") and config.fileroot == str(tmp_path / "runs")


def test_trial_that_exists_is_refused_and_untouched(tmp_path):
    config = Config(fileroot=str(tmp_path), trial="mine")
    TrialPaths.of(config).root.mkdir(parents=True)
    for recover, problem in (("off", "exists already"), ("auto", "is not a trial"), ("resume", "is not a trial")):
        with pytest.raises(ConfigError, match=problem) as caught:
            prepare(config.model_copy(update={"recover": recover}), print)
        assert caught.value.field == "trial"
    assert not list(TrialPaths.of(config).root.iterdir())


def arith(tmp_path, **sections):
    small = {"kind": "arith", "chat_template": False, "max_prompt_tokens": 48, "verifier": "exact"}
    data = {**small, "arith": {"train_size": 50, "eval_size": 20, "demo_size": 70}, **sections.pop("data", {})}
    values = {"warmup": {"steps": 1}, "evaluation": {"problems": 20}, **sections}
    lengths = {"sampling": {"max_new_tokens": 200}}
    tree = {"fileroot": str(tmp_path), "trial": "mine", "data": data, "generation": lengths, **values}
    return resolve(Config.model_validate(tree), now=datetime.now())


def test_prepared_folder_has_all_that_workers_read(tmp_path):
    said: list[str] = []
    config = arith(tmp_path)
    with prepare(config, said.append) as ready:
        paths = ready.paths
    assert paths.root == tmp_path / "math" / "mine"
    assert read_config(paths.config) == config
    assert paths.token.stat().st_mode & 0o777 == 0o600 and len(paths.token.read_text()) >= 32
    assert (paths.start_model / "model.safetensors").is_file() and (paths.data / "eval.jsonl").is_file()
    assert said[0].startswith("setting up: ") and said[1] == "data: 50 train, 20 eval, 70 demos"


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"evaluation": {"problems": 21}}, "evaluation.problems=21: only 20 problems are held out"),
        ({"warmup": {"steps": 1, "batch": 71}}, "warmup.batch=71: there are only 70 demonstrations"),
        ({"train": {"total_epochs": 1, "batch_groups": 51}}, "train.batch_groups=51: 1 epochs of 50 prompts"),
        ({"data": {"max_prompt_tokens": 5}}, "data.max_prompt_tokens"),
        ({"data": {"kind": "jsonl", "train": __file__, "max_prompt_tokens": 48}}, f"{__file__}:1"),
    ],
)
def test_trial_that_cannot_start_leaves_no_folder(sections, problem, tmp_path):
    with pytest.raises(RealsysError) as caught:
        prepare(arith(tmp_path, **sections), print)
    assert problem in str(caught.value) and caught.value.exit_code == 2
    assert not (tmp_path / "math" / "mine").exists()


# ---- the command


@pytest.mark.processes
def test_help_and_version_import_nothing_heavy():
    """What makes them answer at once; a time limit would only measure the machine."""
    script = """
import sys
from realsys.launch.cli import main
for argv in (["--version"], ["run", "--help"], ["--help"], []):
    try:
        main(argv)
    except SystemExit as stop:
        assert stop.code == 0, (argv, stop.code)
names = "torch hydra omegaconf pydantic rich numpy aiohttp matplotlib asyncio msgspec argcomplete"
heavy = set(names.split()) & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "realsys 0." in done.stdout and "experiment=arith" in done.stdout


def test_dry_run_prints_every_process_and_writes_nothing(tmp_path, capsys):
    argv = [
        "run",
        "experiment=arith",
        *FEW_ROWS,
        "--dry-run",
        "allocation=sglang.d2+p2",
        "train.recompute=1",
        f"fileroot={tmp_path / 'runs'}",
    ]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "recompute   2 of 2 layers in the backward pass" in out  # one of each stage
    for name in ("generation_server/1", "model_worker/1", "master_worker/0", "gserver_manager/0", "rollout_worker/1"):
        assert name in out
    assert "host        memory about" in out and "optimizer  activations" in out and "device, MiB" in out
    assert "python -P -m realsys.workers.model_worker" in out and "7 processes" not in out and "8 processes" in out
    assert not (tmp_path / "runs").exists()


NODES = [
    "cluster.nodes=4",
    "cluster.gpus_per_node=8",
    "cluster.name_store.backend=etcd",
    "cluster.name_store.start=true",
]
LARGE = ["allocation=serve.d24+d8", "model.dtype=bfloat16", "rollout.workers=4", *NODES]


def test_dry_run_for_other_machines_prints_the_placement(tmp_path, capsys, monkeypatch):
    """This machine needs no etcd: the first node starts it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["run", "experiment=arith", *FEW_ROWS, *LARGE, "--dry-run", f"fileroot={tmp_path / 'runs'}"]) == 0
    out = capsys.readouterr().out
    assert "nodes: 4, GPUs: 32, idle: 0\nnode0: model_worker 0-7 on gpu 0-7; name_store 0;" in out
    assert "node3: generation_server 16-23 on gpu 0-7" in out
    assert "CUDA_VISIBLE_DEVICES" not in out and sys.executable not in out
    assert "warning: other nodes cannot reach cluster.host=127.0.0.1: set cluster.interface" in out
    assert "warning: the memory of the GPUs is checked only when they join: set cluster.gpu_memory_gb" in out
    assert not (tmp_path / "runs").exists()


def test_gpus_of_unknown_size_must_hold_a_rank():
    """Only on nodes with training ranks. A given size has been checked with the plan."""
    cluster = {"nodes": 2, "gpus_per_node": 8}
    for size, ranks_known in ((0, True), (79, False)):
        config = Config.model_validate({"allocation": "serve.d8+d8", "cluster": {**cluster, "gpu_memory_gb": size}})
        seats = seats_of(config, CPU, nodes_of(config, CPU))
        needs = node_needs(config, plan(config, TrialPaths(Path("/runs/x/t")), seats, "run-1"))
        assert [each.rank_gpu > 0 for each in needs.values()] == [ranks_known, False]
        assert {each.gpu_memory for each in needs.values()} == {size << 30}
        assert not ranks_known or largest_rank(config) <= usable_bytes(config, needs["node0"].rank_gpu, server=False)


def test_dry_run_for_other_machines_warns_of_the_disk(tmp_path, capsys):
    """The disk of this machine may not be theirs."""
    argv = [
        "run",
        "experiment=arith",
        *FEW_ROWS,
        f"fileroot={tmp_path / 'runs'}",
        "checkpoint.keep=1000000000",
        "--dry-run",
    ]
    assert main(argv) == 2
    assert "weights and checkpoints need about" in capsys.readouterr().err
    assert main([*argv, *LARGE]) == 0
    warning = "warning: if the nodes have the same disk as this machine: config: fileroot="
    assert capsys.readouterr().out.count(warning) == 1


def test_launcher_on_loopback_cannot_have_agents(tmp_path, capsys):
    assert main(["run", "experiment=arith", *FEW_ROWS, *LARGE, f"fileroot={tmp_path / 'runs'}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "cluster.interface='': other hosts cannot reach 127.0.0.1, which this process of 4 nodes" in line
    assert not (tmp_path / "runs").exists()


def test_start_warns_of_sampling_that_biases_training(tmp_path, capsys):
    argv = [
        "run",
        "experiment=arith",
        *FEW_ROWS,
        "--dry-run",
        "generation.sampling.top_p=0.9",
        f"fileroot={tmp_path / 'runs'}",
    ]
    assert main(argv) == 0
    assert capsys.readouterr().out.count("warning: generation.sampling.top_p=0.9: ") == 1


def test_dry_run_prints_commands_that_can_be_copied(tmp_path, capsys):
    root = tmp_path / "my runs"
    assert main(["run", "experiment=arith", *FEW_ROWS, "--dry-run", "--trial", "t", f"fileroot={root}"]) == 0
    lines = capsys.readouterr().out.split("commands:\n")[1].splitlines()
    exports, words = shlex.split(lines[0]), [shlex.split(line) for line in lines[1:-1]]
    assert exports[0] == "export" and any(word.startswith("REALSYS_RUN_ID=arith-t-") for word in exports)
    assert words[-1] == [
        *(sys.executable, "-P", "-m", "realsys.workers.master_worker"),
        *("--trial-dir", str(root / "arith" / "t"), "--index", "0"),
    ]


BAD = [
    (["run"], "experiment"),
    (["run", "experiment=arith", "train.bach_groups=1"], "train.bach_groups"),
    (["run", "experiment=arith", "--trial", "a/b"], "trial"),
    (["run", "experiment=arith", "--trial", "it's"], "trial"),
    (["run", "experiment=arith", "allocation=sglang.d1"], "allocation"),
    (["run", "experiment=math", "allocation=sglang.d1+d1"], "data.train"),
    (["run", "experiment=arith", "model.path=/no/such"], "model.path"),
    (["run", "experiment=arith", "fileroot=/dev/null/x"], "fileroot"),
    (["run", "experiment=arith", "train.ppo.loss=no_such_module:f"], "train.ppo.loss"),
    (["run", "experiment=arith", "train.ppo.loss=tests.unit.algorithm.test_losses:mean"], "train.ppo.loss"),
    (["run", "experiment=arith", "train.ppo.loss_args.eps=1"], "train.ppo.loss_args"),
    (["run", "experiment=arith", "train.ppo.algorithm=json:no_such"], "train.ppo.algorithm"),
    (["run", "experiment=arith", "train.ppo.algorithm=tests.unit.config.test_checks:misspelt_hook"], "dataflow"),
    (["run", "experiment=arith", "plugins.train=[mine]"], "plugins"),
    (["status", "/no/such/trial"], "TRIAL_DIR"),
]


@pytest.mark.parametrize(("argv", "field"), BAD, ids=[" ".join(argv)[:50] for argv, _ in BAD])
def test_bad_input_prints_one_line_and_exits_two(argv, field, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert len(printed.err.splitlines()) == 1 and field in printed.err
    assert not os.listdir(tmp_path)


def test_overrides_may_precede_or_follow_options(tmp_path, capsys):
    argv = [
        "run",
        "experiment=arith",
        *FEW_ROWS,
        "--trial",
        "x",
        "rollout.workers=3",
        "--dry-run",
        f"fileroot={tmp_path}",
    ]
    assert main(argv) == 0
    assert "rollout_worker/2" in capsys.readouterr().out
