"""A user's own model and problems: `experiment=math model.path=DIR data.train=FILE`."""

import json
import os

import pytest

from tests.support.jobs.checkpoints import load_checkpoint, weights_differ
from tests.support.jobs.job_models import make_llama, make_qwen3
from tests.support.jobs.jobs import command, processes_of, run
from tests.support.jobs.ledgers import check_ledger, check_staleness

pytestmark = pytest.mark.system

PROBLEMS = 40
SMALL = [
    "asynchronous.stale_policy=drop",
    "experiment=math",
    "allocation=sglang.d1p1m1+d1p1m1",
    "asynchronous.max_staleness=4",
    "model.dtype=float32",
    "data.max_prompt_tokens=48",
    "data.eval_fraction=0.2",
    "evaluation.problems=4",
    "generation.sampling.max_new_tokens=16",
    "rollout.workers=1",
    "rollout.group_size=2",
    "train.batch_groups=4",
    "train.total_steps=2",
    "train.ppo.minibatches=2",
    # All answers of a random model are wrong, and the default takes the batch's mean off: nothing would be learnt.
    "train.ppo.advantage.mean=none",
    "train.ppo.advantage.std=none",
]


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    lines = [{"prompt": f"What is {k} + {k + 3}?", "answer": str(2 * k + 3)} for k in range(PROBLEMS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run_math(fileroot, trial, model, data, *overrides):
    argv = command(
        *SMALL, f"fileroot={fileroot}", f"trial={trial}", f"model.path={model}", f"data.train={data}", *overrides
    )
    return run(fileroot / "math" / trial, argv)


@pytest.mark.parametrize("make_model", [make_qwen3, make_llama])
def test_trained_model_of_a_user_loads_in_transformers(tmp_path, problems, make_model):
    model = make_model(tmp_path / "model")
    job = run_math(tmp_path / "runs", "own", model, problems).completed()
    held_out = int(job.stdout.split(" eval")[0].rsplit(" ", 1)[1])
    assert 0 < held_out < PROBLEMS / 2
    assert [s["version"] for s in job.records("train")] == [1, 2]
    assert all(s["stats"]["grad_norm"] > 0 for s in job.records("train"))
    assert all(s["truncated_fraction"] < 1 for s in job.records("train"))  # some answers went to the verifier
    # The server and the trainer run the same network: single precision apart, over 16 tokens through 2 layers.
    assert job.records("train")[0]["stats"]["inf/logprob_difference_max"] < 1e-5
    check_ledger(job, batch_groups=4, eta=4, prompts=PROBLEMS - held_out)
    check_staleness(job, eta=4)
    text = "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    trained, given = load_checkpoint(job.paths.final_model, text), load_checkpoint(model, text)
    assert type(trained) is type(given)
    assert weights_differ(trained, given)
    assert {k: v for k, v in trained.config.to_dict().items() if k != "_name_or_path"} == {
        k: v for k, v in given.config.to_dict().items() if k != "_name_or_path"
    }
    assert not job.paths.start_model.exists()  # no tiny model was made
    assert processes_of(job.root) == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "What is 1 + 1?"}', "answer"),
        ('{"prompt": "What is 1 + 1?", "answer": 2}', "answer"),
        ('{"prompt": "What is 1 + 1?", "answer": "2"', "problems.jsonl:17: "),
        (json.dumps({"prompt": "7 " * 400, "answer": "2"}), "data.max_prompt_tokens is 48"),
    ],
    ids=["no answer", "answer is no text", "broken JSON", "prompt too long"],
)
def test_bad_line_ends_the_command_with_its_number(tmp_path, problems, line, problem):
    lines = problems.read_text().splitlines()
    lines[16] = line
    problems.write_text("\n".join(lines) + "\n")
    job = run_math(tmp_path / "runs", "bad", make_llama(tmp_path / "model"), problems)
    assert job.returncode == 2, job.report()
    (message,) = job.stderr.splitlines()
    assert message.startswith("realsys: ") and f"{problems}:17: " in message and problem in message
    assert not job.root.exists()
    assert processes_of(job.root) == []


BROKEN_VERIFIER = """
import pathlib
if list(pathlib.Path(__file__).parent.glob("runs/*/*/logs/rollout_worker-*")):  # not when the launcher tries it
    raise ImportError("no module named sympathy")
def judge(item):
    return True
"""


def test_run_without_a_verified_completion_ends_by_name(tmp_path, problems, monkeypatch):
    lines = problems.read_text().splitlines(keepends=True)
    problems.write_text("".join(lines[:5]))
    overrides = ["data.eval_fraction=0.0", "evaluation.problems=0", "train.total_epochs=1"]
    # A verifier that cannot be loaded in its process gives no reward of 0, so there is never anything to train on.
    (tmp_path / "broken_verifier.py").write_text(BROKEN_VERIFIER)
    overrides += ["data.verifier=broken_verifier:judge", "rollout.max_attempts=1"]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    job = run_math(tmp_path / "runs", "failing", make_llama(tmp_path / "model"), problems, *overrides)
    assert job.returncode == 1, job.report()
    message = job.stderr.splitlines()[0]
    assert "master_worker/0" in message and "StuckError" in message
    assert "5 x failed NoVerifierError" in message and "fewer than the 4 of a batch" in message
    assert job.records("train") == []
    assert processes_of(job.root) == []
