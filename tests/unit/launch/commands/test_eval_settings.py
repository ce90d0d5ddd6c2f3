"""The configuration of an evaluation."""

import json
import shlex
from datetime import datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from realsys.config.allocation import parse_allocation
from realsys.config.backend_rules import backend_rules
from realsys.config.device_plan import nodes_of, seats_of
from realsys.config.evaluation_sets import evaluation_sets
from realsys.config.machine import Machine
from realsys.config.memory_check import place_of
from realsys.config.paths import TrialPaths, write_config
from realsys.config.schema import Config
from realsys.data.convert import convert, convert_sets
from realsys.data.prompts import open_splits
from realsys.data.sources import source_rows
from realsys.errors import ConfigError
from realsys.launch.commands.evaluate import report, table
from realsys.launch.evaluation_target import Choices, Target, evaluation_config, exported, find_target
from realsys.launch.process_plan import plan
from realsys.launch.words import own_command
from realsys.observe.evaluation_records import EvalSample, write_result
from realsys.weights.disk.plain_folders import adopt, materialise, verify
from tests.support.data.data_rows import jsonl
from tests.support.data.data_rows import trial as trial_of

NOW = datetime(2026, 1, 2, 3, 4, 5)


@pytest.fixture
def trial(tmp_path):
    paths = TrialPaths(tmp_path / "t")
    paths.root.mkdir()
    stored = {
        "seed": 5,
        "allocation": "serve.d4+d4p2",
        "cluster": {"nodes": 2, "gpus_per_node": 8},
        "data": {"train": "/gone/train.parquet", "eval": "/data/eval.parquet"},
        "train": {"batch_groups": 8},
        "warmup": {"steps": 3},
    }
    write_config(Config.model_validate(stored), paths.config)
    return paths


def made(target, *overrides, name=None):
    return evaluation_config(target, Choices(overrides, name=name), NOW)[0]


def test_model_takes_the_settings_of_an_experiment(tmp_path):
    config = made(Target(tmp_path), "experiment=arith", "generation.sampling.max_new_tokens=99")
    assert (config.data.kind, config.generation.sampling.max_new_tokens) == ("arith", 99)
    assert (config.model.path, config.allocation, config.evaluate_only) == (str(tmp_path), "auto", True)
    assert TrialPaths.of(config).root == Path("runs/eval/20260102-030405").resolve()


def test_trial_keeps_its_settings_without_machines(trial):
    config = made(Target(Path("/m"), 4, trial), "evaluation.problems=7")
    assert (config.seed, config.evaluation.problems) == (5, 7)
    assert (config.cluster.nodes, config.allocation, config.warmup.steps) == (0, "auto", 0)
    assert TrialPaths.of(config).root == trial.root / "eval" / "20260102-030405"


def test_only_held_out_rows_are_read(trial):
    data = made(Target(Path("/m"), 4, trial)).data
    assert (data.train, data.eval) == ("", "/data/eval.parquet")


def held_out_prompts(folder, *overrides):
    """Return the prompts that an evaluation of a model with ``overrides`` reads as held-out problems."""
    config, paths = made(Target(folder), *overrides), trial_of(folder)
    convert(config, paths)
    convert_sets(config, paths)
    splits = open_splits(config, paths)
    assert not len(splits.train)
    lines = splits.sets.get("a", splits.eval)
    return [str(lines[index].prompt) for index in range(len(lines))]


@pytest.mark.parametrize("field", ["data.eval", "evaluation.sets.a.path"])
def test_folder_gives_its_held_out_split(tmp_path, field):
    """The rows of the other split may be those that the model was trained on."""
    folder = tmp_path / "both"
    folder.mkdir()
    for split in ("train", "test"):
        jsonl(folder / f"{split}.jsonl", [{"prompt": f"{split} q{n}", "answer": "1"} for n in range(3)])
    assert held_out_prompts(tmp_path, f"{field}={folder}") == ["test q0", "test q1", "test q2"]


@pytest.mark.needs(package="reasoning_gym")
def test_generated_source_gives_its_held_out_tasks(tmp_path):
    source = "reasoning_gym:basic_arithmetic"
    read = held_out_prompts(tmp_path, f"data.eval={source}", "data.source_args={size: 3}")
    assert read == [row.values["prompt"] for row in source_rows(source, "eval", {"size": 3})]


def test_sets_alone_are_enough(tmp_path):
    config = made(Target(tmp_path), "evaluation.sets.a.path=/a.jsonl", "evaluation.sets.a.layout=gsm8k")
    assert (config.data.train, config.data.eval, config.data.layout) == ("", "/a.jsonl", "gsm8k")
    assert list(evaluation_sets(config)) == ["a"]


@pytest.mark.parametrize(
    ("of_trial", "overrides", "name", "problem"),
    [
        (True, ["evaluation.problems=0"], None, "nothing is evaluated: set it"),
        (True, ["experiment=math"], None, "the trial's own settings are used"),
        (True, [], "a/b", "trial='a/b'"),
        (True, [], "models", "is the folder of exported weights"),
        (False, [], None, "data.eval=.*name the problems to evaluate on"),
        *[
            (False, ["data.eval=/e.jsonl", override], None, "TARGET, --step and --name say what is evaluated")
            for override in ("model.path=/x", "trial=a", "resume=b", "train.loop=train")
        ],
    ],
)
def test_wrong_setting_of_an_evaluation_is_named(trial, tmp_path, of_trial, overrides, name, problem):
    target = Target(Path("/m"), 4, trial) if of_trial else Target(tmp_path)
    with pytest.raises(ConfigError, match=problem) as caught:
        made(target, *overrides, name=name)
    assert caught.value.exit_code == 2


def test_trial_may_be_evaluated_in_another_folder(trial):
    config = made(Target(Path("/m"), 4, trial), "fileroot=/tmp/elsewhere", name="n")
    assert TrialPaths.of(config).root == Path("/tmp/elsewhere/eval/n")


def test_training_ranks_need_no_memory():
    config = Config.model_validate({"train": {"loop": "evaluate"}, "allocation": "serve.d1+d64"})
    machine = Machine(cpus=2, memory_bytes=32 << 30)
    place = place_of(config, parse_allocation(config.allocation), backend_rules(config), machine)
    assert (place.here.ranks, place.here.servers, place.ranks_on_gpu) == (0, 1, False)


def test_second_evaluation_of_a_second_gets_a_number(trial):
    (trial.root / "eval" / "20260102-030405").mkdir(parents=True)
    assert made(Target(Path("/m"), 4, trial)).trial == "20260102-030405-2"


def test_allocation_of_servers_alone_is_enough(trial):
    for given in ("serve.d2", "serve.d2+d8p2", "serve.d2|d2", "serve.d1+serve.d1|d4"):
        assert made(Target(Path("/m"), 4, trial), f"allocation={given}").allocation == "serve.d2+d1"


def test_plan_has_an_evaluator_and_no_trainer():
    config = Config.model_validate(
        {"train": {"loop": "evaluate"}, "allocation": "serve.d2+d8", "rollout": {"workers": 1}}
    )
    machine = Machine(cpus=2, memory_bytes=32 << 30)
    specs = plan(config, TrialPaths(Path("/x")), seats_of(config, machine, nodes_of(config, machine)), "id")
    names = [spec.name for spec in specs]
    assert names == [
        "gserver_manager/0",
        "generation_server/0",
        "generation_server/1",
        "rollout_worker/0",
        "evaluator/0",
    ]
    assert specs[-1].on_death == "end" and "realsys.workers.evaluator" in specs[-1].argv


# ---- The table and the file of an evaluation


def result(name="eval", **more):
    shares = {"1": {"value": 0.5, "low": 0.4, "high": 0.6}}
    numbers = {"problems": 16, "samples": 4, "failed": 0, "length_mean": 21.4, "version": 60, "cut_off": 0.25}
    return {"set": name, "complete": True, "incomplete": "", "pass_at": shares, "majority": None, **numbers, **more}


def sample(problem, reason):
    return EvalSample("eval-60", "eval", problem, 0, 0, 60, 60, "p", "c", "r", 1.0, True, reason, 3)


def test_table_has_a_line_per_data_set():
    lines = table([result(), result("aime", problems=30, cut_off=None)])
    assert [line.split("  ")[0] for line in lines] == ["data set", "eval", "aime"]
    assert "50.0% (40.0 - 60.0)" in lines[1] and "25.0%" in lines[1] and lines[1].endswith("60")
    assert all("\n" not in line for line in lines)


def test_pass_at_k_and_votes_have_columns():
    both = {"1": {"value": 0.5, "low": 0.4, "high": 0.6}, "8": {"value": 0.9, "low": 0.8, "high": 1.0}}
    lines = table([result(pass_at=both, majority={"value": 0.7, "low": 0.6, "high": 0.8}), result("aime")])
    assert "pass@8" in lines[0] and "majority" in lines[0]
    assert "90.0% (80.0 - 100.0)" in lines[1] and "70.0% (60.0 - 80.0)" in lines[1]


def test_incomplete_evaluation_shows_no_number():
    lines = table([result(complete=False, incomplete="3 of 64 failed", pass_at={}, failed=3)])
    assert "%" not in lines[1].replace("25.0%", "")
    assert lines[-1] == "eval: incomplete: 3 of 64 failed"


def test_omitted_vote_has_its_reason():
    lines = table([result(majority_omitted="comparing the final answers took more than 300 s")])
    assert lines[2:] == ["eval: no majority: comparing the final answers took more than 300 s"]


def test_lost_numbers_are_named_below_the_table():
    lines = table([result(unjudged=1, left_out_k=[8])])
    assert lines[2:] == [
        "eval: 1 of 16 problems left out: all their completions failed",
        "eval: no pass@8: a problem has fewer verdicts",
    ]


def test_report_reads_the_stored_completions(tmp_path, capsys):
    paths = TrialPaths(tmp_path)
    write_result(paths.evaluations / "eval-60", [sample(0, "length"), sample(1, "stop")], {})
    assert report(paths, tmp_path / "out", {"model": "/m"}, {"eval-60": result(cut_off=None)}) == 0
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert stored["model"] == "/m" and stored["results"][0]["cut_off"] == 0.5
    assert stored["results"][0]["completions"] == 2 and "50.0%" in capsys.readouterr().out


def test_incomplete_result_is_an_exit_code(tmp_path, capsys):
    found = result(complete=False, incomplete="cancelled by its user", pass_at={})
    assert report(TrialPaths(tmp_path), tmp_path, {}, {"eval-0": found}) == 1
    assert "incomplete: cancelled by its user" in capsys.readouterr().out


def test_command_for_the_completions_can_be_copied(tmp_path, capsys):
    paths = TrialPaths(tmp_path / "my runs [1]")
    report(paths, tmp_path / "out", {}, {"eval-60": result()})
    words = shlex.split(capsys.readouterr().out.partition("completions  ")[2].splitlines()[0])
    assert words == [*own_command(), "samples", str(paths.root), "--eval", "eval-60"]


# ---- The model that `realsys eval` names


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def named_trial(tmp_path, model):
    """A trial with versions 3 and 4 of its weights, and an export of step 2."""
    paths = TrialPaths(tmp_path / "runs" / "math" / "t")
    paths.root.mkdir(parents=True)
    write_config(Config(), paths.config)
    paths.lock.touch()
    for version in (3, 4):
        adopt(model, paths.weights(), version, "0001")
    materialise(adopt(model, tmp_path / "other", 2, "0001"), paths.root / "hf" / "step-2")
    return paths


def test_model_folder_is_taken_as_it_is(model):
    target = find_target(str(model), None)
    assert (target.model, target.step, target.trial) == (model, 0, None)
    assert exported(target) == model


def test_trial_without_model_gives_its_newest_weights(named_trial):
    target = find_target(str(named_trial.root), None)
    assert (target.step, target.form) == (4, "version")
    folder = exported(target)
    assert folder == named_trial.root / "eval" / "models" / "00000004"
    verify(folder, 4)


def test_trained_model_comes_before_newer_weights(named_trial):
    materialise(named_trial.weights() / "v00000003.0001", named_trial.final_model)
    target = find_target(str(named_trial.root), None)
    assert (target.model, target.step, target.form) == (named_trial.final_model, 3, "model")


def test_step_chooses_an_export(named_trial):
    target = find_target(str(named_trial.root), 2)
    assert target.model == named_trial.root / "hf" / "step-2" and target.form == "model"


def test_undone_version_is_never_taken(named_trial, model):
    """The trainer went back to step 2 and published version 3 again: version 4 is of weights that were undone."""
    adopt(model, named_trial.weights(), 3, "0002")
    assert find_target(str(named_trial.root), None).model.name == "v00000003.0002"


def test_export_of_an_undone_version_is_replaced(named_trial, model):
    old = exported(find_target(str(named_trial.root), 3))
    adopt(model, named_trial.weights(), 3, "0002")
    assert exported(find_target(str(named_trial.root), 3)) == old
    assert '"0002"' in (old / "MANIFEST.json").read_text()


def test_unusable_targets_are_one_line(named_trial, model, tmp_path):
    (tmp_path / "empty").mkdir()
    for text, step, problem in (
        (str(tmp_path / "none"), None, "is not a directory"),
        (str(tmp_path / "empty"), None, r"has neither \*.safetensors nor the files of a trial"),
        (str(model), 3, "is a model folder, which has one state only"),
        (str(named_trial.root), 7, "has the weights of these steps only: 2, 3, 4; set checkpoint.hf_every_steps"),
    ):
        with pytest.raises(ConfigError, match=problem) as raised:
            find_target(text, step)
        assert "\n" not in str(raised.value)
