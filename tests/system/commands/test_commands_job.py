"""`realsys status`, `audit`, `samples`, `replay` and Ctrl-C, on a trial that runs, has ended, or is damaged."""

import json
import random
import shutil

import pytest

from realsys.launch.cli import main
from tests.support.jobs.jobs import processes_of

pytestmark = pytest.mark.system

COMMANDS = ("status", "audit", "samples", "replay")


@pytest.mark.parametrize(
    ("command", "text"),
    [("status", "arith/interrupted: running, phase train"), ("audit", "no ticket"), ("samples", "[v")],
)
def test_command_reads_a_trial_that_runs(interrupted, command, text):
    done = interrupted.while_it_ran[command]
    assert (done.returncode, done.stderr) == (0, "") and text in done.stdout


def test_ctrl_c_stops_everything_within_ten_seconds(interrupted):
    job = interrupted.job
    assert job.returncode == 130, job.report()
    assert interrupted.stopped_s < 10
    assert processes_of(job.root) == []
    assert "stopped by SIGINT" in job.stderr
    assert "Traceback" not in job.stdout + job.stderr
    summary = json.loads(job.paths.summary.read_text())
    assert summary["status"] == "interrupted" and summary["steps"] >= 2
    assert summary["killed_at_stop"] == [], job.report()  # all of them ended without a signal
    assert not list(job.paths.errors.glob("*")), job.report()


# damaged file -> command -> exit code and message; a command that is not named is not run
CONFIG = {"status": (2, "config.json"), "audit": (0, ""), "samples": (2, "config.json"), "replay": (2, "config.json")}
FINE = {"status": (0, ""), "audit": (0, ""), "samples": (0, "")}
DAMAGES: dict[tuple[str, str], dict[str, tuple[int, str]]] = {
    ("config.json", "truncated"): CONFIG,
    ("config.json", "garbage"): CONFIG,
    ("config.json", "missing"): CONFIG,
    ("ledger.jsonl", "truncated"): {**FINE, "audit": (1, "")},
    ("ledger.jsonl", "garbage"): {**FINE, "audit": (2, "is a record: restore it")},
    ("ledger.jsonl", "missing"): {**FINE, "audit": (2, "ledger.jsonl: No such file")},
    ("steps.jsonl", "truncated"): {**FINE, "audit": (1, "")},
    ("steps.jsonl", "garbage"): {**FINE, "audit": (1, "")},
    ("steps.jsonl", "missing"): FINE,
    ("summary.json", "truncated"): {**FINE, "status": (2, "summary.json")},
    ("summary.json", "garbage"): {**FINE, "status": (2, "summary.json")},
    ("summary.json", "missing"): FINE,
    ("record/*/batch.json", "truncated"): {**FINE, "samples": (2, "is corrupt"), "replay": (2, "is corrupt")},
    ("record/*/batch.json", "garbage"): {**FINE, "samples": (2, "is corrupt"), "replay": (2, "is corrupt")},
    ("record/*/batch.json", "missing"): {**FINE, "samples": (2, "not recorded"), "replay": (2, "not recorded")},
    ("record/*/worker-00000.safetensors", "truncated"): {"samples": (2, "is corrupt"), "replay": (2, "is corrupt")},
    ("record/*/worker-00000.safetensors", "garbage"): {"samples": (2, "is corrupt"), "replay": (2, "is corrupt")},
    ("record/*/worker-00000.safetensors", "missing"): {"samples": (2, "cannot be"), "replay": (2, "cannot be")},
    ("checkpoints/*/state.json", "truncated"): {**FINE, "replay": (2, "state.json is corrupt")},
    ("checkpoints/*/state.json", "garbage"): {**FINE, "replay": (2, "state.json is corrupt")},
    ("checkpoints/*/state.json", "missing"): {**FINE, "replay": (2, "; no step can be")},
    ("checkpoints/*/*-of-00001.json", "garbage"): {**FINE, "replay": (2, "corrupt")},
    ("checkpoints/*/*-of-00001.json", "missing"): {**FINE, "replay": (2, "cannot be read")},
}


@pytest.mark.parametrize(("pattern", "damage"), DAMAGES)
def test_damaged_file_is_one_line_to_affected_commands(pattern, damage, interrupted, tmp_path, capsys):
    root = tmp_path / "trial"
    shutil.copytree(interrupted.root, root)
    damaged = list(root.glob(pattern))
    assert damaged
    for path in damaged:
        content = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(content[: len(content) // 2] if damage == "truncated" else noise(len(content)))
    for command, (code, text) in DAMAGES[pattern, damage].items():
        which = ["--step", str(interrupted.step)] if command in ("samples", "replay") else []
        capsys.readouterr()
        assert main([command, str(root), *which]) == code, capsys.readouterr().err
        out, err = capsys.readouterr()
        if code == 2:
            assert out == "" and err.startswith("realsys: ") and err.count("\n") == 1 and text in err
        else:
            assert err == "" and ("FAILED" in out) == (code == 1)


def noise(size):
    return random.Random(7).randbytes(size)


NO_TRIAL = [(command, folder) for command in COMMANDS for folder in ("nowhere", "empty", "file", "file/below")]


@pytest.mark.parametrize(("command", "folder"), [*NO_TRIAL, ("status", "")])
def test_folder_without_a_trial_is_one_line(command, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert main([command, *([folder] if folder else [])]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("realsys: config: ") and err.count("\n") == 1
    assert "trial" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


@pytest.mark.parametrize("content", ["{}", "[]", "3", '{"experiment": "a", "trial": "b"}'])
def test_wrong_summary_is_one_line(content, interrupted, tmp_path, capsys):
    shutil.copy(interrupted.root / "config.json", tmp_path)
    (tmp_path / "summary.json").write_text(content)
    assert main(["status", str(tmp_path)]) == 2
    assert "summary.json" in capsys.readouterr().err


@pytest.mark.parametrize("record", ['{"kind":"train"}', '{"kind":"train","step":"x","tickets":3}', '{"kind":"eval"}'])
def test_incomplete_step_records_stop_no_command(record, interrupted, tmp_path, capsys):
    for name in ("config.json", "ledger.jsonl", "steps.jsonl"):
        shutil.copy(interrupted.root / name, tmp_path)
    with (tmp_path / "steps.jsonl").open("a") as log:
        log.write(record + "\n")
    assert main(["status", str(tmp_path)]) == main(["audit", str(tmp_path)]) == 0
    assert "/interrupted: killed, " in capsys.readouterr().out
