"""Everything a user can get wrong: found by --dry-run and by a real start, in one line, with exit code 2."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config, TinyModelConfig
from realsys.data.arith import make_tiny_model, write_char_tokenizer
from realsys.errors import ConfigError
from realsys.launch.cli import main
from realsys.launch.prepare import check_disk, check_etcd, check_gpus_are_given
from tests.support.data.data_rows import FEW_ROWS, jsonl
from tests.support.serving.qwen_models import write_qwen
from tests.unit.config.test_device_memory import math_config

ROOT = Path(__file__).resolve().parents[3]
PROBLEMS: list[object] = [{"prompt": f"a{k}=", "answer": str(k)} for k in range(40)]


@pytest.fixture
def model(tmp_path):
    """A Qwen2 of 512 positions, as a user would have it on disk."""
    folder = tmp_path / "qwen"
    write_char_tokenizer(folder)
    make_tiny_model(TinyModelConfig(), folder, seed=1)
    return folder


@pytest.fixture
def data(tmp_path):
    return jsonl(tmp_path / "train.jsonl", PROBLEMS)


@pytest.fixture
def refused(tmp_path, model, data, capsys):
    """Run the README's command with overrides; return the one line with which dry run and real start refuse it."""

    def run(*overrides):
        argv = ["run", "experiment=math", f"model.path={model}", f"data.train={data}", f"fileroot={tmp_path / 'runs'}"]
        lines = []
        for mode in (["--dry-run"], []):
            assert main([*argv, "--trial", "t", *overrides, *mode]) == 2
            lines.append(capsys.readouterr().err)
        assert lines[0].count("\n") == 1 and "Traceback" not in lines[0]
        dry, real = (re.sub(r"\d+", "", line) for line in lines)  # free memory and disk change meanwhile
        assert dry == real
        assert not (tmp_path / "runs" / "math" / "t").exists()
        return lines[0]

    return run


@pytest.mark.processes
def test_readme_command_fits_a_model_of_512_positions(tmp_path, model, data, capsys):
    """No limits given: lengths, evaluation and layout adapt, and every choice is shown."""
    (model / "tokenizer_config.json").write_text('{"eos_token": "<bos>"}')
    argv = ["run", "experiment=math", f"model.path={model}", f"data.train={data}", f"fileroot={tmp_path / 'runs'}"]
    assert main([*argv, "model.tiny.num_hidden_layers=3", "data.arith.train_size=9", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "warning: model.tiny.num_hidden_layers is not read: model.path names the model" in out
    assert "warning: data.arith.train_size is not read: data.kind=jsonl makes no rows" in out
    assert "set data.max_prompt_tokens=128: the model has 512 positions" in out
    assert "set generation.sampling.max_new_tokens=384: the model has 512 positions" in out
    assert "set allocation=serve." in out and "set evaluation.problems=" in out
    assert "engine      embedded, servers: 1" in out and "307." in out
    assert "512 prompts x 16 episodes of at most 512 tokens" in out and "one epoch is " in out
    assert "training    loss ppo, clip -0.2 +0.2, lr 2e-05, 4 minibatches; advantages: mean of batch" in out
    assert f"warning: {model}: tokenizer_config.json ends a text with '<bos>'" in out
    assert not (tmp_path / "runs").exists()


def test_given_limits_are_refused_with_values_that_fit(refused):
    line = refused("generation.sampling.max_new_tokens=600", "data.max_prompt_tokens=100")
    assert "qwen has 512 positions, prompt + answer may have 700 tokens" in line
    assert "set data.max_prompt_tokens=128 generation.sampling.max_new_tokens=384" in line


@pytest.mark.processes
def test_given_prompt_limit_leaves_rest_to_completion(tmp_path, model, data, capsys):
    argv = ["run", "experiment=math", f"model.path={model}", f"data.train={data}", f"fileroot={tmp_path / 'runs'}"]
    assert main([*argv, "data.max_prompt_tokens=12", "--dry-run"]) == 0
    assert "set generation.sampling.max_new_tokens=500" in capsys.readouterr().out


SLURM = ["cluster=slurm", "cluster.nodes=4", "cluster.interface=ib0", "name_store=etcd"]


def test_large_model_needs_number_of_gpus(refused, tmp_path):
    """The folder has no weights: the number is missing first."""
    line = refused(*SLURM, f"model.path={write_qwen(tmp_path, '7B')}")
    assert "cluster.gpus_per_node=0: is the default, and a model of 7.6B parameters would train on CPUs" in line
    assert "say how many GPUs a node has: cluster.gpus_per_node=8, or =0 for CPUs" in line


def test_large_model_may_train_on_cpus(tmp_path):
    config = math_config(tmp_path, "7B", *SLURM[1:3])
    assert list(check_gpus_are_given(config, {"cluster.gpus_per_node"})) == []


@pytest.mark.parametrize(("more", "warnings"), [([], 1), (["cluster.gpus_per_node=0"], 0)])
def test_nodes_without_gpus_are_warned_of(more, warnings, tmp_path, capsys):
    argv = [
        "run",
        "experiment=arith",
        *FEW_ROWS,
        "cluster.nodes=1",
        *more,
        "--dry-run",
        f"fileroot={tmp_path / 'runs'}",
    ]
    assert main(argv) == 0
    assert capsys.readouterr().out.count("warning: all processes run on CPUs: say how many GPUs a node has") == warnings


@pytest.mark.processes
def test_home_is_expanded_in_path_settings(tmp_path, model, data, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    argv = ["run", "experiment=math", "model.path=~/qwen", "data.train=~/train.jsonl", "fileroot=~/my runs"]
    assert main([*argv, "--dry-run", "--trial", "t"]) == 0
    out = capsys.readouterr().out
    assert str(model) in out and f"folder {tmp_path / 'my runs' / 'math' / 't'}" in out


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("not json", "JSON is malformed"),
        ('{"prompt": "a"}', "missing required field `answer`"),
        ('{"prompt": "a", "answer": 15}', "Expected `str`, got `int`"),
        ('["a", "b"]', "Expected `object`, got `array`"),
        ('{"prompt": " ", "answer": "1"}', "prompt is empty"),
        ('{"prompt": "' + "a" * 200 + '", "answer": "1"}', "the prompt has 201 tokens"),
        ('{"prompt": [{"role": "user", "content": "a"}], "answer": "1"}', "the model has no chat template"),
    ],
)
def test_bad_data_line_is_named(line, problem, data, refused):
    with data.open("a") as file:
        file.write(line + "\n")
    text = refused()
    assert f"{data}:{len(PROBLEMS) + 1}: " in text and problem.replace("`", "") in text.replace("`", "")


def test_empty_data_file_is_refused(data, refused):
    data.write_text("")
    assert f"{data}: no prompts to train on" in refused()


def without_shard(model):
    (model / "model.safetensors").rename(model / "other.safetensors")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def rewritten(name, change):
    return lambda model: (model / name).write_bytes(change((model / name).read_bytes()))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (
            rewritten("model.safetensors", lambda old: old[:-100]),
            r"qwen/model.safetensors: has [\d,]+ bytes, its header ",
        ),
        (rewritten("model.safetensors", lambda old: old[:50]), "is not a safetensors file, or is truncated"),
        (
            rewritten("model.safetensors", lambda old: b"version https://git-lfs.github.com/spec/v1\n"),
            "git-lfs pointer",
        ),
        (
            rewritten("config.json", lambda old: json.dumps({**json.loads(old), "intermediate_size": 512}).encode()),
            r"gate_proj.weight has shape \(256, 128\), config.json says \(512, 128\)",
        ),
        (without_shard, "qwen/model-00001-of-00001.safetensors: cannot be read: No such file"),
        (rewritten("tokenizer.json", lambda old: b"{}"), "tokenizer.json: cannot be read as a tokenizer"),
    ],
    ids=["truncated", "no file", "pointer", "other size", "missing shard", "tokenizer"],
)
def test_damaged_model_is_refused(damage, problem, model, refused):
    damage(model)
    assert re.search(problem, refused())


def test_occupied_manager_port_is_refused(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"manager.port={port}: cannot be bound on 127.0.0.1: Address already in use" in refused(
            f"manager.port={port}"
        )
    assert "a port is at most 65535" in refused("manager.port=70000")


def test_host_of_another_machine_is_refused(refused):
    line = refused("cluster.host=203.0.113.1")  # an address for documentation, which no machine has
    assert "cluster.host='203.0.113.1': is no address of a network interface of this machine, which has lo 127" in line


def test_interface_that_is_not_there_is_refused(refused):
    assert "cluster.interface='no0': this machine has no address there: it has lo 127" in refused(
        "cluster.interface=no0"
    )


def test_etcd_that_does_not_answer_is_refused(refused):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    address = f"127.0.0.1:{port},127.0.0.2:{port}"  # of one family: the reason names the one that was tried last
    line = refused("name_store=etcd", f"cluster.name_store.address={address}", "cluster.connect_timeout_s=2")
    assert f"cluster.name_store.address='{address}'" in line and "did not answer within 2 s" in line


def test_own_etcd_without_its_program_is_refused(refused, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    line = refused("name_store=etcd", "cluster.name_store.start=true")
    missing = f"there is no program named etcd on the PATH of {socket.gethostname()}"
    assert f"cluster.name_store.start=True: {missing}: install etcd-server there" in line


def test_short_lease_with_etcd_elsewhere_is_refused(refused):
    """192.0.2.1 is an address for documentation, which no machine has."""
    line = refused("name_store=etcd", "cluster.name_store.address=127.0.0.1:2379,192.0.2.1:2379")
    assert "cluster.lease_s=20.0: must be at least 60 with etcd on another host (192.0.2.1)" in line


def test_etcd_of_several_nodes_counts_as_elsewhere(tmp_path, monkeypatch):
    """It is elsewhere for all nodes but one, also if that is the launcher's."""
    monkeypatch.setattr("realsys.launch.prepare.bind_problem", lambda host, port: "")

    def problem(address, **cluster):
        store = {"backend": "etcd", "address": address}
        config = Config.model_validate({"cluster": {"nodes": 1, "spare_nodes": 1, "name_store": store, **cluster}})
        with pytest.raises(ConfigError) as error:
            check_etcd(config, TrialPaths(tmp_path))
        return str(error.value)

    assert "must be at least 60 with etcd on another host (10.0.0.1)" in problem("10.0.0.1:2379")
    loopback = problem("10.0.0.1:2379,127.0.0.1:2379", lease_s=60.0)
    assert "each of the 2 nodes would look for etcd on itself (127.0.0.1)" in loopback


def test_wrong_files_of_etcd_are_refused(refused, tmp_path):
    (tmp_path / "text").write_text("text\n")
    file, store = str(tmp_path / "text"), "cluster.name_store"
    for overrides, problem in [
        ((f"ca={tmp_path}/none",), f"{store}.ca='{tmp_path}/none': cannot be read: {tmp_path}/none is not a file"),
        ((f"ca={file}",), "not PEM"),
        ((f"cert={file}", f"key={file}"), f"{store}.ca='': must be set for TLS"),
        ((f"ca={file}", f"cert={file}"), f"{store}.cert='{file}': must be set together with key"),
        ((f"password_file={file}",), f"{store}.user='': must be set"),
        (("user=me",), "has no password for 'me': name a file that holds it, or set REALSYS_ETCD_PASSWORD"),
        (("user=me", f"password_file={tmp_path}/none"), "password_file='" + f"{tmp_path}/none': cannot be read"),
    ]:
        assert problem in refused("name_store=etcd", *(f"{store}.{override}" for override in overrides))


def test_folder_that_cannot_be_made_is_refused(refused):
    assert "fileroot='/proc/x': cannot write into /proc" in refused("fileroot=/proc/x")


def test_too_small_disk_is_refused(refused):
    assert "weights and checkpoints need about" in refused("checkpoint.keep=1000000000")


def test_disk_estimate_names_the_fields(tmp_path):
    with pytest.raises(ConfigError, match=r"need about .*iB are free: name another disk, or lower checkpoint.keep"):
        check_disk(Config(fileroot=str(tmp_path)), 1 << 60)
    check_disk(Config(fileroot=str(tmp_path)), 1 << 10)


def test_model_that_exceeds_the_memory_is_refused(model, refused):
    """Sizes of a model of 200 billion parameters; its weights are not looked at any more."""
    config = json.loads((model / "config.json").read_text())
    big = {"hidden_size": 1 << 14, "intermediate_size": 1 << 16, "num_hidden_layers": 64, "head_dim": 128}
    (model / "config.json").write_text(json.dumps(config | big | {"num_attention_heads": 128}))
    assert "GiB of host memory" in refused("allocation=serve.d1+d1")


# ---- resume


def test_folder_without_checkpoint_cannot_be_resumed(tmp_path, refused, model):
    trial = tmp_path / "other"
    trial.mkdir()
    assert "is neither a trial folder nor a checkpoint" in refused(f"resume={trial}")
    (trial / "ledger.jsonl").touch()
    assert "is a trial without a complete checkpoint: run it with checkpoint.every_steps" in refused(f"resume={trial}")
    (trial / "checkpoints").mkdir()
    assert "is a trial without a complete checkpoint" in refused(f"resume={trial / 'checkpoints'}")
    model.rename(trial / "model")
    os.symlink(trial / "model", model)
    assert f"or start from its trained model with model.path={trial / 'model'}" in refused(f"resume={trial}")
    line = refused(f"resume={trial / 'model'}")
    assert f"is a plain model without training state: start a new trial from it with model.path={trial}/model" in line


def test_damaged_checkpoint_to_resume_is_refused(tmp_path, refused):
    checkpoint = tmp_path / "other" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    line = refused(f"resume={checkpoint.parent}")
    assert f"resume='{checkpoint}': {checkpoint / 'state.json'} is corrupt" in line


# ---- the user's own packages


@pytest.mark.processes
def test_users_own_packages_do_not_break_the_command(tmp_path):
    for name in ("configs", "launch", "workers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('the user\\'s {name}')")
    argv = [sys.executable, "-m", "realsys.launch.cli", "run", "experiment=arith", *FEW_ROWS, "--dry-run"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "dry run: everything is checked" in done.stdout


@pytest.mark.processes
def test_other_layout_is_checked_by_the_dry_run(tmp_path, model, capsys):
    """Evaluation adapts to the rows that are held out, before they are converted."""
    rows = [{"question": f"{k} + 1 =", "answer": f"one more\n#### {k + 1}"} for k in range(200)]
    path = jsonl(tmp_path / "gsm8k.jsonl", rows)
    argv = ["run", "experiment=math", f"model.path={model}", f"fileroot={tmp_path / 'runs'}", f"data.train={path}"]
    assert main([*argv, "--dry-run"]) == 0
    out = capsys.readouterr().out
    held_out = int(re.search(r"set evaluation.problems=(\d+)", out)[1])
    assert f"data: {200 - held_out} train, {held_out} eval" in out
    assert not (tmp_path / "runs").exists()
