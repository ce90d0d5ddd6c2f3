"""Everything a user can get wrong: found by --dry-run and by a real start, in one line, with exit code 2."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config, TinyModelConfig
from realsys.data.arith import make_tiny_model, write_char_tokenizer
from realsys.errors import ConfigError
from realsys.launch.cli import main
from realsys.launch.prepare import check_disk, check_etcd, check_gpus_are_given
from tests.support.data.few_rows import FEW_ROWS
from tests.support.serving.qwen_models import write_qwen
from tests.support.training.data_models import jsonl
from tests.unit.config.test_device_memory import math_config

ROOT = Path(__file__).resolve().parents[3]
PROBLEMS: list[object] = [{"prompt": f"a{k}=", "answer": str(k)} for k in range(40)]
Refused = Callable[..., str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Qwen2 of 512 positions, as a user would have it on disk."""
    folder = tmp_path / "qwen"
    write_char_tokenizer(folder)
    make_tiny_model(TinyModelConfig(), folder, seed=1)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "train.jsonl", PROBLEMS)


@pytest.fixture
def refused(tmp_path: Path, model: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run the README's command with overrides; return the one line with which dry run and real start refuse it."""

    def run(*overrides: str) -> str:
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
def test_readme_command_fits_a_model_of_512_positions(
    tmp_path: Path, model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No limits given: lengths, evaluation and layout adapt, and every choice is shown."""
    (model / "tokenizer_config.json").write_text('{"eos_token": "<bos>"}')
    argv = ["run", "experiment=math", f"model.path={model}", f"data.train={data}", f"fileroot={tmp_path / 'runs'}"]
    assert main([*argv, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "set data.max_prompt_tokens=128: the model has 512 positions" in out
    assert "set generation.sampling.max_new_tokens=384: the model has 512 positions" in out
    assert "set allocation=serve." in out and "set evaluation.problems=" in out
    assert "engine      embedded, servers: 1" in out and "307." in out
    assert "512 prompts x 16 episodes of at most 512 tokens" in out and "one epoch is " in out
    assert "training    loss ppo, clip -0.2 +0.2, lr 2e-05, 4 minibatches; advantages: mean of batch" in out
    assert f"warning: {model}: tokenizer_config.json ends a text with '<bos>'" in out
    assert not (tmp_path / "runs").exists()


def test_given_limits_are_refused_with_values_that_fit(refused: Refused) -> None:
    line = refused("generation.sampling.max_new_tokens=600", "data.max_prompt_tokens=100")
    assert "qwen has 512 positions, prompt + answer may have 700 tokens" in line
    assert "set data.max_prompt_tokens=128 generation.sampling.max_new_tokens=384" in line


@pytest.mark.processes
def test_given_prompt_limit_leaves_rest_to_completion(
    tmp_path: Path, model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["run", "experiment=math", f"model.path={model}", f"data.train={data}", f"fileroot={tmp_path / 'runs'}"]
    assert main([*argv, "data.max_prompt_tokens=12", "--dry-run"]) == 0
    assert "set generation.sampling.max_new_tokens=500" in capsys.readouterr().out


SLURM = ["cluster=slurm", "cluster.nodes=4", "cluster.interface=ib0", "name_store=etcd"]


def test_large_model_needs_number_of_gpus(refused: Refused, tmp_path: Path) -> None:
    """The folder has no weights: the number is missing first."""
    line = refused(*SLURM, f"model.path={write_qwen(tmp_path, '7B')}")
    assert "cluster.gpus_per_node=0: is the default, and a model of 7.6B parameters would train on CPUs" in line
    assert "say how many GPUs a node has: cluster.gpus_per_node=8, or =0 for CPUs" in line


def test_large_model_may_train_on_cpus(tmp_path: Path) -> None:
    config = math_config(tmp_path, "7B", *SLURM[1:3])
    assert list(check_gpus_are_given(config, {"cluster.gpus_per_node"})) == []


@pytest.mark.parametrize(("more", "warnings"), [([], 1), (["cluster.gpus_per_node=0"], 0)])
def test_nodes_without_gpus_are_warned_of(
    more: list[str], warnings: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
def test_home_is_expanded_in_path_settings(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
def test_bad_data_line_is_named(line: str, problem: str, data: Path, refused: Refused) -> None:
    with data.open("a") as file:
        file.write(line + "\n")
    text = refused()
    assert f"{data}:{len(PROBLEMS) + 1}: " in text and problem.replace("`", "") in text.replace("`", "")


def test_empty_data_file_is_refused(data: Path, refused: Refused) -> None:
    data.write_text("")
    assert f"{data}: no prompts to train on" in refused()


def test_truncated_weights_are_refused(model: Path, refused: Refused) -> None:
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    assert f"{weights}: has {len(content) - 100:,} bytes, its header says {len(content):,}" in refused()
    weights.write_bytes(content[:50])
    assert f"{weights}: is not a safetensors file, or is truncated" in refused()


def test_git_lfs_pointer_is_refused(model: Path, refused: Refused) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "model.safetensors: is a git-lfs pointer" in refused()


def test_weights_of_another_size_are_refused(model: Path, refused: Refused) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 512}))
    assert "gate_proj.weight has shape (256, 128), config.json says (512, 128)" in refused()


def test_missing_shard_is_refused(model: Path, refused: Refused) -> None:
    shard = "model-00001-of-00001.safetensors"
    (model / "model.safetensors").rename(model / "other.safetensors")
    index = {"weight_map": {"model.norm.weight": shard}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"{model / shard}: cannot be read: No such file" in refused()


def test_broken_tokenizer_is_refused(model: Path, refused: Refused) -> None:
    (model / "tokenizer.json").write_text("{}")
    assert "tokenizer.json: cannot be read as a tokenizer" in refused()


def test_occupied_manager_port_is_refused(refused: Refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"manager.port={port}: cannot be bound on 127.0.0.1: Address already in use" in refused(
            f"manager.port={port}"
        )
    assert "a port is at most 65535" in refused("manager.port=70000")


def test_host_of_another_machine_is_refused(refused: Refused) -> None:
    line = refused("cluster.host=203.0.113.1")  # an address for documentation, which no machine has
    assert "cluster.host='203.0.113.1': is no address of a network interface of this machine, which has lo 127" in line


def test_interface_that_is_not_there_is_refused(refused: Refused) -> None:
    assert "cluster.interface='no0': this machine has no address there: it has lo 127" in refused(
        "cluster.interface=no0"
    )


def test_etcd_that_does_not_answer_is_refused(refused: Refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    address = f"127.0.0.1:{port},127.0.0.2:{port}"  # of one family: the reason names the one that was tried last
    line = refused("name_store=etcd", f"cluster.name_store.address={address}", "cluster.connect_timeout_s=2")
    assert f"cluster.name_store.address='{address}'" in line and "did not answer within 2 s" in line


def test_own_etcd_without_its_program_is_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    line = refused("name_store=etcd", "cluster.name_store.start=true")
    missing = f"there is no program named etcd on the PATH of {socket.gethostname()}"
    assert f"cluster.name_store.start=True: {missing}: install etcd-server there" in line


def test_short_lease_with_etcd_elsewhere_is_refused(refused: Refused) -> None:
    """192.0.2.1 is an address for documentation, which no machine has."""
    line = refused("name_store=etcd", "cluster.name_store.address=127.0.0.1:2379,192.0.2.1:2379")
    assert "cluster.lease_s=20.0: must be at least 60 with etcd on another host (192.0.2.1)" in line


def test_etcd_of_several_nodes_counts_as_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is elsewhere for all nodes but one, also if that is the launcher's."""
    monkeypatch.setattr("realsys.launch.prepare.bind_problem", lambda host, port: "")

    def problem(address: str, **cluster: object) -> str:
        store = {"backend": "etcd", "address": address}
        config = Config.model_validate({"cluster": {"nodes": 1, "spare_nodes": 1, "name_store": store, **cluster}})
        with pytest.raises(ConfigError) as error:
            check_etcd(config, TrialPaths(tmp_path))
        return str(error.value)

    assert "must be at least 60 with etcd on another host (10.0.0.1)" in problem("10.0.0.1:2379")
    loopback = problem("10.0.0.1:2379,127.0.0.1:2379", lease_s=60.0)
    assert "each of the 2 nodes would look for etcd on itself (127.0.0.1)" in loopback


def test_wrong_files_of_etcd_are_refused(refused: Refused, tmp_path: Path) -> None:
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


def test_folder_that_cannot_be_made_is_refused(refused: Refused) -> None:
    assert "fileroot='/proc/x': cannot write into /proc" in refused("fileroot=/proc/x")


def test_too_small_disk_is_refused(refused: Refused) -> None:
    assert "weights and checkpoints need about" in refused("checkpoint.keep=1000000000")


def test_disk_estimate_names_the_fields(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"need about .*iB are free: name another disk, or lower checkpoint.keep"):
        check_disk(Config(fileroot=str(tmp_path)), 1 << 60)
    check_disk(Config(fileroot=str(tmp_path)), 1 << 10)


def test_model_that_exceeds_the_memory_is_refused(model: Path, refused: Refused) -> None:
    """Sizes of a model of 200 billion parameters; its weights are not looked at any more."""
    config = json.loads((model / "config.json").read_text())
    big = {"hidden_size": 1 << 14, "intermediate_size": 1 << 16, "num_hidden_layers": 64, "head_dim": 128}
    (model / "config.json").write_text(json.dumps(config | big | {"num_attention_heads": 128}))
    assert "GiB of host memory" in refused("allocation=serve.d1+d1")


# ---- resume


def test_folder_without_checkpoint_cannot_be_resumed(tmp_path: Path, refused: Refused, model: Path) -> None:
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


def test_damaged_checkpoint_to_resume_is_refused(tmp_path: Path, refused: Refused) -> None:
    checkpoint = tmp_path / "other" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    line = refused(f"resume={checkpoint.parent}")
    assert f"resume='{checkpoint}': {checkpoint / 'state.json'} is corrupt" in line


# ---- the user's own packages


@pytest.mark.processes
def test_users_own_packages_do_not_break_the_command(tmp_path: Path) -> None:
    for name in ("configs", "launch", "workers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('the user\\'s {name}')")
    argv = [sys.executable, "-m", "realsys.launch.cli", "run", "experiment=arith", *FEW_ROWS, "--dry-run"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "dry run: everything is checked" in done.stdout


@pytest.mark.processes
def test_other_layout_is_checked_by_the_dry_run(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluation adapts to the rows that are held out, before they are converted."""
    rows = [{"question": f"{k} + 1 =", "answer": f"one more\n#### {k + 1}"} for k in range(200)]
    path = jsonl(tmp_path / "gsm8k.jsonl", rows)
    argv = ["run", "experiment=math", f"model.path={model}", f"fileroot={tmp_path / 'runs'}", f"data.train={path}"]
    assert main([*argv, "--dry-run"]) == 0
    out = capsys.readouterr().out
    held_out = int(re.search(r"set evaluation.problems=(\d+)", out)[1])
    assert f"data: {200 - held_out} train, {held_out} eval" in out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "a", "answer": "18"}, "rows.jsonl:2: field 'answer': must end with a line ####"),
        ({"question": 5, "answer": "#### 18"}, "rows.jsonl:2: field 'question': must be a text, not int"),
    ],
)
def test_bad_row_of_other_layout_is_refused(tmp_path: Path, refused: Refused, row: object, problem: str) -> None:
    good = {"question": "a", "answer": "#### 18"}
    assert problem in refused(f"data.train={jsonl(tmp_path / 'rows.jsonl', [good, row])}")
