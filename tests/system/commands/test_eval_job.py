"""`realsys eval` of a model folder, of a trial, and of the servers of a trial in training, with every process real."""

import json
import os
import signal
import subprocess

import pytest

from realsys.config.paths import TrialPaths
from realsys.observe.evaluation_records import read_samples
from realsys.observe.step_log import read_steps
from tests.support.data.data_rows import jsonl
from tests.support.jobs.jobs import SMALL, arith, processes_of, realsys, run_arith, running
from tests.support.processes.forked import COMMAND
from tests.system.conftest import ENDLESS

pytestmark = pytest.mark.system

GREEDY = ["evaluation.sampling.temperature=0"]
#: of SMALL, what an evaluation reads
SETTINGS = [text for text in SMALL if text.startswith(("experiment=", "data.", "generation.", "evaluation."))]


def command(*arguments):
    return [*COMMAND, "eval", *map(str, arguments)]


def evaluate(*arguments):
    return realsys("eval", *arguments)


def results(folder):
    """Results of an evaluation by data set."""
    return {record["set"]: record for record in json.loads((folder / "results.json").read_text())["results"]}


def everything(root):
    """Size and time of change of all files of a trial, without those of its evaluations."""
    files = (path for path in root.rglob("*") if path.is_file() and "eval" not in path.relative_to(root).parts)
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@pytest.fixture(scope="module")
def greedy(tmp_path_factory):
    """A finished trial whose evaluations are greedy. No test may change it."""
    settings = [*GREEDY, "train.total_steps=2", "warmup.steps=60", "checkpoint.hf_every_steps=1"]
    return run_arith(tmp_path_factory.mktemp("runs"), "greedy", *settings).completed()


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """A trial that trains until the end of the module."""
    root, argv = arith(tmp_path_factory.mktemp("runs"), "training", *ENDLESS, "checkpoint.every_steps=2")
    with running(root, argv) as live:
        live.until_step(2)
        yield live


def test_trial_repeats_its_last_evaluation(greedy, tmp_path):
    before = everything(greedy.root)
    done = evaluate(greedy.root, "--name", "last")
    assert done.returncode == 0, done.stdout + done.stderr
    last = greedy.records("eval")[-1]
    [again] = results(greedy.root / "eval" / "last").values()
    assert (again["accuracy"], again["length_mean"]) == (last["accuracy"], last["length_mean"])
    assert again["version_min"] == again["version_max"] == 2
    assert completions(greedy.root / "eval" / "last") == completions(greedy.root, "after-*")
    assert everything(greedy.root) == before, "the trial itself is only read"
    assert processes_of(greedy.root / "eval" / "last") == []


def test_play_shows_a_task_of_a_trial_and_changes_nothing(greedy):
    before = everything(greedy.root)
    done = realsys("play", greedy.root, "--tasks", 1)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert "\n  sampled    " in done.stdout and "\n  reward     " in done.stdout
    assert everything(greedy.root) == before


def test_step_of_a_trial_has_its_own_weights(greedy):
    done = evaluate(greedy.root, "--step", "1", "--name", "first")
    assert done.returncode == 0, done.stdout + done.stderr
    [first] = results(greedy.root / "eval" / "first").values()
    assert first["version_min"] == first["version_max"] == 1


def test_greedy_evaluation_of_a_model_is_reproducible(greedy, tmp_path):
    """Four equal completions of each problem, twice: the same tokens every time, so pass@1 is pass@4."""
    found = []
    for name in ("a", "b"):
        settings = [*SETTINGS, *GREEDY, f"fileroot={tmp_path}", "evaluation.samples=4", "evaluation.k=[1,4]"]
        done = evaluate(greedy.paths.final_model, "--name", name, *settings)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "pass@4" in done.stdout
        folder = tmp_path / "eval" / name
        [record] = results(folder).values()
        assert record["pass_at"]["1"] == record["pass_at"]["4"] and record["samples"] == 4
        found.append(completions(folder))
    assert len(found[0]) == 64 and found[0] == found[1]


def test_folder_is_read_without_its_train_split(greedy, tmp_path):
    """The rows of ``data.eval`` are the held-out ones of the folder; no row to train on is needed."""
    (tmp_path / "both").mkdir()
    for split in ("train", "test"):
        jsonl(tmp_path / "both" / f"{split}.jsonl", [{"prompt": f"{n}+{len(split)}=", "answer": "1"} for n in range(4)])
    settings = ["data.kind=jsonl", f"data.eval={tmp_path / 'both'}", "data.verifier=exact", f"fileroot={tmp_path}"]
    done = evaluate(greedy.paths.final_model, "--name", "folder", *SETTINGS, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    [stored] = (tmp_path / "eval" / "folder" / "evaluations").iterdir()
    read = {sample.prompt for sample in read_samples(stored)}
    assert read == {f"{n}+4=" for n in range(4)}


def test_killed_server_costs_no_completion(greedy, tmp_path):
    settings = [*SETTINGS, f"fileroot={tmp_path}", "evaluation.problems=32", "evaluation.samples=64"]
    root = tmp_path / "eval" / "killed"
    with running(root, command(greedy.paths.final_model, "--name", "killed", *settings)) as live:
        live.until(lambda: "/2048" in live.job.stdout and "eval 0/" not in live.job.stdout, "completions")
        live.kill("generation_server/0")
        job = live.wait().completed()
    [record] = results(root).values()
    assert (record["completions"], record["failed"]) == (2048, 0), job.report()
    assert processes_of(root) == []


def test_interrupt_leaves_nothing_running(greedy, tmp_path):
    root = tmp_path / "eval" / "interrupted"
    settings = [*SETTINGS, f"fileroot={tmp_path}", "evaluation.problems=32", "evaluation.samples=512"]
    with running(root, command(greedy.paths.final_model, "--name", "interrupted", *settings)) as live:
        live.until(lambda: "/16384" in live.job.stdout, "an evaluation")
        live.process.send_signal(signal.SIGINT)
        job = live.wait(60)
    assert job.returncode == 130 and "has no result" in job.stderr, job.report()
    assert processes_of(root) == [] and not (root / "results.json").exists()


def test_bad_input_is_one_line_before_any_start(greedy, tmp_path):
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "1+" * 60, "answer": "1"}) + "\n")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    model, own = greedy.paths.final_model, [f"fileroot={tmp_path}", "data.verifier=exact"]
    for arguments, problem in (
        ([tmp_path / "none"], "is not a directory"),
        ([model, *own], "name the problems to evaluate on"),
        ([model, *own, f"data.eval={empty}"], "empty.jsonl: no problems to evaluate on"),
        ([model, *own, f"data.eval={long}", "data.max_prompt_tokens=48"], "long.jsonl:1: the prompt has 121 tokens"),
        ([model, f"fileroot={tmp_path}", f"data.eval={long}", "data.verifier=nope"], "data.verifier"),
        ([greedy.root, "--step", "9"], "has the weights of these steps only"),
        ([greedy.root, "--live"], "does not run"),
    ):
        done = evaluate(*arguments)
        assert done.returncode == 2 and problem in done.stderr, (arguments, done.stdout, done.stderr)
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "eval").exists() or not list((tmp_path / "eval").iterdir())


def test_live_servers_are_evaluated_beside_training(training):
    before = training.steps_done()
    done = evaluate(training.root, "--live", "evaluation.problems=32", "evaluation.samples=8")
    assert done.returncode == 0, done.stdout + done.stderr
    [record] = results(max((training.root / "eval").glob("user-*"), key=os.path.getmtime)).values()
    assert record["completions"] == 256 and record["version_min"] == record["version_max"] >= before - 1
    training.until_step(training.steps_done() + 3)
    assert all(record["kind"] != "eval" for record in read_steps(training.job.paths.steps)), "the trainer sees none"


def test_interrupt_cancels_a_live_evaluation(training):
    arguments = command(training.root, "--live", "evaluation.problems=32", "evaluation.samples=4096")
    log = TrialPaths(training.root).logs / "gserver_manager-0.log"
    asking = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "/131072" not in asking.stdout.readline():
        assert asking.poll() is None
    asking.send_signal(signal.SIGINT)
    _, stderr = asking.communicate(timeout=60)
    assert asking.returncode == 130, stderr
    assert "cancelled by its user: True" in log.read_text()
    training.until_step(training.steps_done() + 3)


def test_live_evaluation_survives_a_trainer_restart(training):
    """The trainer dies in the middle and goes back to its checkpoint: the evaluation begins again, and is complete."""
    arguments = command(training.root, "--live", "evaluation.problems=32", "evaluation.samples=64")
    asking = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "/2048" not in asking.stdout.readline():
        assert asking.poll() is None
    training.kill("model_worker/0")
    stdout, stderr = asking.communicate(timeout=180)
    assert asking.returncode == 0, stdout + stderr
    assert "begun again 1 times" in stdout
    [record] = results(max((training.root / "eval").glob("user-*"), key=os.path.getmtime)).values()
    assert (record["completions"], record["restarts"]) == (2048, 1)
    assert record["version_min"] == record["version_max"]


def test_audit_accepts_evaluations_of_users(training):
    """The journal has finished, cancelled and restarted ones."""
    done = realsys("audit", training.root)
    assert done.returncode == 0, done.stdout + done.stderr


def completions(folder, name="*"):
    """Return the completions of an evaluation, by problem and sample."""
    [samples] = (folder / "evaluations").glob(f"{name}/samples.jsonl")
    return [json.loads(line)["completion"] for line in samples.read_text().splitlines()]
