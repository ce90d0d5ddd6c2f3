"""`realsys serve`: its plan, its settings over several starts, and what it refuses."""

import argparse
import socket
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from realsys.config.paths import TrialPaths
from realsys.launch.cli import main
from realsys.launch.commands import serve
from realsys.launch.commands.audit import check_clients
from realsys.launch.conclude import journal_bytes
from realsys.launch.run import Planned, RunOptions, plan_run
from realsys.launch.supervise.restart_policy import NO_CHECKPOINT
from realsys.observe.screen.display import Frame, lines
from realsys.observe.screen.plain import ServiceView
from realsys.observe.screen.progress import TrialProgress
from realsys.serve import wire
from realsys.serve.journal import Answered, TenantJournal, Unloaded
from realsys.serve.settings import ServeSettings

KEYS = "alice: {key: tml-0123456789abcdef}\nbob: {key: tml-0123456789abcdeg, models: 2}\n"
WRONG = [
    (["train.lora.rank=0"], "train.lora.rank=0: must be set"),
    (["allocation=d1"], "must have exactly one inference part"),
    (["allocation='serve.d1|d1'"], "clients sample while others train: join their part with +"),
    (["generation.backend=vllm", "train.lora.rank=4096"], "generation.backend='vllm': vLLM has adapters of rank"),
    (["weights.transport=memory"], "weights.transport='memory': must be disk"),
    (["generation.sampling.temperature=0.7"], "must be 1: clients choose it"),
    (["rollout.group_size=4"], "rollout={'group_size': 4}: is not read: clients have"),
    (["warmup.steps=3"], "warmup={'steps': 3}: is not read"),
    (["evaluation.problems=5"], "evaluation.problems=5: must be 0"),
    (["train.loop=train"], "both must be serve for clients: use realsys serve"),
    (["train.ppo.algorithm=ppo"], "both must be serve for clients: use realsys serve"),
    (["--port", "70000"], "--port=70000: Expected `int` <= 65535"),
    (["--model-name", "a b"], "--model-name='a b': Expected `str` matching"),
    (["--keys", "nowhere.yaml"], "--keys='nowhere.yaml': cannot be used"),
]


@pytest.fixture
def arith(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words of a service of the tiny model. The package tinker need not be installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(wire, "messages", lambda: None)
    lengths = ["data.max_prompt_tokens=128", "generation.sampling.max_new_tokens=384"]
    small = [f"data.arith.{name}_size=8" for name in ("train", "eval", "demo")]
    return ["data.kind=arith", "fileroot=runs", *small, *lengths, "--trial", "a"]


def planned(words: list[str], *options: str) -> tuple[Planned, ServeSettings]:
    """Plan a service, and leave its settings in the trial's folder as a start would."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args([*words, *options])
    plan = plan_run(["experiment=serve", *args.overrides], RunOptions(args.trial))
    settings = serve._settings(args, plan)
    plan.paths.root.mkdir(parents=True, exist_ok=True)
    plan.paths.serve.write_bytes(msgspec.json.encode(settings))
    return plan, settings


def test_service_has_neither_agents_nor_data(arith, capsys):
    assert main(["serve", *arith, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "clients     rows of at most 512 tokens, adapters of rank 32" in out and "dry run" in out
    assert not TrialPaths(Path("runs/serve/a")).root.exists()
    plan, _ = planned(arith)
    assert [spec.kind for spec in plan.specs] == [
        *("gserver_manager", "generation_server", "model_worker", "master_worker")
    ]


@pytest.mark.parametrize(("words", "problem"), WRONG)
def test_service_refuses_in_one_line(words, problem, arith, capsys):
    assert main(["serve", *arith, *words, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1


def test_run_without_the_command_is_refused(arith, capsys):
    assert main(["run", "experiment=serve", *arith, "--dry-run"]) == 2
    assert "is begun with realsys serve" in capsys.readouterr().err


def test_busy_port_is_one_line(arith, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["serve", *arith, "--dry-run", "--port", str(port)]) == 2
    assert f"port={port}: cannot be bound on 127.0.0.1: Address already in use" in capsys.readouterr().err


def test_missing_package_is_one_line(arith, capsys, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    wire.messages.cache_clear()
    assert main(["serve", *arith, "--dry-run"]) == 2
    assert "pip install 'realsys[tinker]'" in capsys.readouterr().err


def test_next_start_has_port_and_keys_of_the_last(arith, tmp_path):
    _, first = planned(arith)
    _, second = planned(arith)
    assert second == first and first.owners["me"].key.startswith("tml-") and first.model_name == "tiny"
    Path("keys.yaml").write_text(KEYS)
    _, third = planned(arith, "--keys", "keys.yaml", "--model-name", "org/m")
    assert (third.port, third.model_name, [*third.owners]) == (first.port, "org/m", ["alice", "bob"])
    _, fourth = planned(arith, "--port", "0")
    assert fourth.owners == third.owners and fourth.port != first.port


# ---- what is shown


MODEL = {"owner": "me", "model": "1:train:0", "steps": 3, "calls": 12, "tokens": 4567, "waiting": 1, "last_error": None}
STATUS = {"master": {"serve": {"url": "http://127.0.0.1:8123", "models": [MODEL]}}}
LINE = "me  1:train:0  3 steps  12 calls  4,567 tokens  1 waiting"


def test_screen_shows_address_and_models():
    progress = TrialProgress(phase="serve", status=STATUS)
    shown = [line.plain for line in lines(progress, Frame("serve/a", "runs/serve/a", 4), 100, 24)]
    assert "clients: base_url=http://127.0.0.1:8123, api_key as in serve.json of the trial" in shown
    assert LINE in shown and not any("staleness" in line for line in shown)


def test_lines_of_a_pipe_come_once():
    console = Console(record=True, width=100)
    view, progress = ServiceView(console), TrialProgress(status=STATUS)
    view.refresh(progress)
    view.refresh(progress)
    text = console.export_text().splitlines()
    assert text[0].startswith("clients: base_url=") and text[-1] == LINE and len(text) == 4


def test_audit_names_the_model_and_its_fault(tmp_path):
    paths = TrialPaths(tmp_path)
    path = paths.clients / "1-train-0" / "journal"
    path.parent.mkdir(parents=True)
    journal = TenantJournal(path)
    journal.append(Answered(0, b""))
    journal.append(Unloaded())
    journal.close()
    assert check_clients(paths).problems == ["1-train-0: once: call 0 has a result and was never accepted"]
    path.write_bytes(b"x" + path.read_bytes()[1:])
    [problem] = check_clients(paths).problems
    assert "journal" in problem


def test_calls_of_clients_are_progress_of_the_trainer(tmp_path):
    paths = TrialPaths(tmp_path)
    assert journal_bytes(paths) == NO_CHECKPOINT
    path = paths.clients / "1-train-0" / "journal"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"12345")
    assert journal_bytes(paths) == 5
