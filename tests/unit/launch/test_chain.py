"""`realsys chain` with small scripts in the place of the workers: what a stage starts from, and what is left."""

import json
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

import realsys.launch.run
from realsys.config.paths import TrialPaths, read_config
from realsys.launch.cli import main
from realsys.launch.process_plan import ProcessSpec

pytestmark = pytest.mark.processes

HERE = "tests.unit.launch.test_chain"
SMALL = {"train_size": 20, "eval_size": 5, "demo_size": 70}
ARITH = f"experiment: arith\ndata: {{arith: {SMALL}}}\n"
ALONE = "allocation: d2\nevaluation: {problems: 0}\ntrain: {total_steps: 1}\n"
SFT = f"algorithm: sft\n{ARITH}{ALONE}"
REWARD = f"algorithm: reward_model\n{ARITH}{ALONE}"
PPO = f"{ARITH}evaluation: {{problems: 5}}\ntrain: {{ppo: {{reward_model_weight: 0.5}}}}\n"


def master(root, start, algorithm, stops):
    """Write what a MasterWorker leaves; ``stops``: ask the launcher to stop instead, as Ctrl-C does."""
    paths = TrialPaths(Path(root))
    ids = ("before", "after") if algorithm == "ppo" else ("before.demos", "after.demos")
    records = [
        {"kind": "eval", "eval_id": ids[0], "step": 0, "accuracy": 0.25, "loss": 2.0},
        {"kind": "train", "step": 1, "total": 1},
        {"kind": "eval", "eval_id": ids[1], "step": 1, "accuracy": 0.75, "loss": 0.5},
        {"kind": "phase", "phase": "done"},
    ]
    if stops:
        os.kill(os.getppid(), signal.SIGINT)
        signal.pause()
    paths.steps.write_text("".join(json.dumps({**record, "time": time.time()}) + "\n" for record in records))
    shutil.copytree(start, paths.final_model)
    if algorithm == "reward_model":
        weights = load_file(paths.final_model / "model.safetensors")
        weights["score.weight"] = weights["model.norm.weight"][None]
        save_file(weights, paths.final_model / "model.safetensors")
        config = json.loads((paths.final_model / "config.json").read_text())
        config |= {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
        (paths.final_model / "config.json").write_text(json.dumps(config))


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """Runs `realsys chain` on files that are written here. ``stops``: number of the stage that Ctrl-C ends."""
    monkeypatch.chdir(tmp_path)

    def run(files, *words, stops=0):
        for name, text in files.items():
            (tmp_path / name).write_text(text)

        def scripts(config, paths, *_):
            call = (str(paths.root), str(paths.base_model(config)), config.train.ppo.algorithm)
            last = stops and config.trial.endswith(f"-{stops}")
            bodies = {
                "model_worker": "import signal; signal.pause()",
                "master_worker": f"from {HERE} import master; master(*{call!r}, {last!r})",
            }
            env = {"PYTHONPATH": str(Path(realsys.launch.run.__file__).parents[2])}
            return [
                ProcessSpec(kind, 0, (sys.executable, "-c", body), paths.logs / f"{kind}-0.log", "end", "", env)  # type: ignore[arg-type]
                for kind, body in bodies.items()
            ]

        monkeypatch.setattr(realsys.launch.run, "plan", scripts)
        return main(["chain", *files, "--trial", "c", "--plain", *words])

    return run


def trial(number):
    return TrialPaths(Path("runs", "arith", f"c-{number}").resolve())


def test_stages_start_from_the_models_of_earlier_ones(chain, capsys):
    assert chain({"sft.yaml": SFT, "rm.yaml": REWARD, "ppo.yaml": PPO}) == 0
    out = capsys.readouterr().out
    sft, reward, ppo = (read_config(trial(number).config) for number in (1, 2, 3))
    assert sft.model.path == "" and sft.warmup.steps == 0
    assert reward.model.path == ppo.model.path == str(trial(1).final_model)
    assert ppo.roles["reward"].path == str(trial(2).final_model) and ppo.warmup.steps == 0
    assert ppo.train.ppo.reward_model_weight == 0.5 and ppo.allocation.startswith("serve.")
    assert "stage 1, sft.yaml: held-out loss 2.000 -> 0.500, accuracy 25.0% -> 75.0%\n" in out
    assert out.rstrip().endswith("stage 3, ppo.yaml: held-out accuracy 25.0% -> 75.0%")


def test_same_command_goes_on_after_ctrl_c(chain, capsys):
    files = {"a.yaml": SFT, "b.yaml": SFT}
    assert chain(files, stops=2) == 130
    err = capsys.readouterr().err
    [again] = [line.partition("to continue: ")[2] for line in err.splitlines() if "to continue" in line]
    assert shlex.split(again)[-6:] == ["chain", "a.yaml", "b.yaml", "--trial", "c", "--plain"]
    model = trial(1).final_model.stat().st_ino
    assert chain(files) == 0
    out = capsys.readouterr().out
    assert "a.yaml: held-out loss 2.000 -> 0.500, accuracy 25.0% -> 75.0% (complete already)" in out
    assert trial(1).final_model.stat().st_ino == model and trial(2).final_model.is_dir()


GIVEN = f"{ARITH}warmup: {{steps: 3}}\n"
NONE = f"{ARITH}train: {{ppo: {{reward_model_weight: 1}}}}\n"
WRONG = [
    ({"a.yaml": SFT, "b.yaml": "train: {batch_grups: 1}\nexperiment: arith"}, (), "did you mean train.batch_groups"),
    ({"a.yaml": SFT, "b.yaml": "experiment: arit"}, (), "experiment/arit"),
    ({"a.yaml": SFT, "b.yaml": "- 1"}, (), "b.yaml': must have settings"),
    ({"a.yaml": SFT, "b.yaml": "a: b: c"}, (), "b.yaml': cannot be read"),
    ({"a.yaml": SFT}, ("no.yaml",), "no.yaml': cannot be read: [Errno 2]"),
    ({"a.yaml": SFT, "b.yaml": GIVEN}, (), "warmup.steps=3: the model of an earlier stage needs no warm-up"),
    ({"a.yaml": SFT, "b.yaml": NONE}, (), "roles.reward.path=''"),
    ({"a.yaml": SFT, "b.yaml": f"{SFT}model: {{path: /no}}"}, (), "model.path='/no': is not a directory"),
    ({"a.yaml": SFT}, ("experiment=arith",), "cannot be the same for all stages"),
    ({}, ("seed=1",), "name the files of the stages"),
]


@pytest.mark.parametrize(("files", "words", "problem"), WRONG, ids=[problem for *_, problem in WRONG])
def test_bad_stage_is_named_before_the_first_one_starts(files, words, problem, chain, capsys):
    assert chain(files, *words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert problem in line and ("stage 2" in line or len(files) < 2)
    assert not Path("runs").exists()
