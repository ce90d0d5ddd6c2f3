"""A whole job whose completions are judged by a model behind an OpenAI endpoint, and judged again afterwards."""

import json

import pytest

from realsys.train.record_files import read_record, recorded_steps
from tests.support.jobs.jobs import arith, processes_of, realsys, run_arith, running
from tests.support.jobs.ledgers import check_ledger
from tests.support.rewards.judge_endpoint import KEY, judge_endpoint

pytestmark = pytest.mark.system

STEPS = 3


def regrade(root, *arguments):
    done = realsys("regrade", root, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def settings(url):
    return [
        "data.verifier=judge",
        f"data.verifier_args.base_url={url}",
        "data.verifier_args.model=judge-7b",
        "data.verifier_args.api_key_env=JUDGE_KEY",
        "data.verifier_args.concurrency=8",
        "rollout.reward.correct=1.0",
        f"train.total_steps={STEPS}",
        "warmup.steps=60",  # completions that end: one that is cut off is not judged
    ]


def test_judge_decides_the_rewards_of_a_job(tmp_path, monkeypatch):
    """Malformed verdicts and a busy endpoint in between cost no wrong reward. The live run can be judged again."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    faults = ["", "429", "malformed", "500", "truncated", "nan", "range"]
    with judge_endpoint(faults=faults, score=lambda text, reference: float(text.endswith("#" + reference))) as endpoint:
        with running(*arith(tmp_path / "runs", "judged", *settings(endpoint.url))) as live:
            live.until(lambda: recorded_steps(live.job.paths.records), "the record of a step")
            assert "disagree    0:" in regrade(live.root)
            live.wait()
        job = live.job.completed()
        steps = job.records("train")
        assert [step["version"] for step in steps] == [1, 2, 3]
        assert 0 < endpoint.most <= 8 and set(endpoint.keys) == {f"Bearer {KEY}"}
        assert sum(step["metrics"]["judge_retries"] for step in steps) > 0
        assert all({"judge/correctness", "judge_seconds", "judge_tokens"} <= step["metrics"].keys() for step in steps)
        for folder in recorded_steps(job.paths.records).values():
            for meta in (meta for group in read_record(folder).groups for meta in group):
                assert meta.reward == (1.0 if meta.correct else -1.0)
        check_ledger(job, batch_groups=8, eta=4, prompts=400)
        again = regrade(job.root, "--json", str(tmp_path / "again.json"))
        assert "verifier judge (its own)" in again and "disagree    0:" in again
        assert json.loads((tmp_path / "again.json").read_text())["judged"] > 0
    exact = regrade(job.root, "--verifier", "exact", "--show", "1")
    assert "verifier exact; trained with judge" in exact and "disagree" in exact
    written = [path for path in job.root.rglob("*") if path.is_file()]
    assert not [path for path in written if KEY.encode() in path.read_bytes()], "the key was written"
    assert processes_of(job.root) == []


def test_wrong_key_ends_the_run_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with judge_endpoint(always="401") as endpoint:
        job = run_arith(tmp_path / "runs", "refused", *settings(endpoint.url))
    assert job.returncode == 1, job.report()
    message = job.stderr.splitlines()[0]
    assert "rollout_worker/" in message and "StuckError" in message and "status 401" in message
    assert KEY not in job.stderr and "***" in message
    assert processes_of(job.root) == []
