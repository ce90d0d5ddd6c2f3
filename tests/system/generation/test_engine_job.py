"""A whole job whose generation is done by the real SGLang or vLLM, on a CPU. They receive their weights by group."""

import re

import numpy as np
import pytest

from realsys.observe.timeline.clocked_spans import read_timeline
from realsys.observe.timeline.why import groups_of_batch, ways_of
from tests.support.jobs.jobs import processes_of, run_arith
from tests.support.jobs.ledgers import check_ledger, check_staleness
from tests.support.serving.sglang_server import needs_sglang, needs_vllm

pytestmark = pytest.mark.system
STEPS = 3


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def job(request, tmp_path_factory):
    (needs_sglang if request.param == "sglang" else needs_vllm)()
    root = tmp_path_factory.mktemp("runs")
    settings = [f"generation={request.param}", f"train.total_steps={STEPS}", "cluster.connect_timeout_s=400"]
    settings.append("weights.transport=group")
    return run_arith(root, request.param, *settings, timeout_s=600).completed()


@pytest.mark.timeout(700)
def test_server_gets_every_version(job):
    steps = job.records("train")
    assert [step["version"] for step in steps] == list(range(1, STEPS + 1))
    evaluations = job.records("eval")
    assert [record["problems"] for record in evaluations] == [16, 16]
    # The last evaluation was answered with the last version: the engine has loaded it.
    assert evaluations[-1]["version_min"] == STEPS


def test_every_version_came_by_group(job):
    """No byte of weights was written. A server that is busy passes over a version that a newer one has overtaken."""
    logs = "".join(path.read_text() for path in job.paths.logs.glob("model_worker*"))
    sent = {int(version) for version in re.findall(r"of v0*(\d+)\.\S+ is sent to server-0", logs)}
    assert {0, STEPS} <= sent <= set(range(STEPS + 1))
    shards = list(job.paths.weights().glob("*/*.safetensors"))
    assert shards and all(path.is_symlink() for path in shards)


def test_job_keeps_the_ledger_and_the_bound(job):
    check_staleness(job, eta=4)
    check_ledger(job, batch_groups=8, eta=4, prompts=400)


def test_logprobs_agree_with_the_trainer(job):
    """Both in float32. Where versions differ the difference is that of the policies, so the first step is looked at."""
    first = job.records("train")[0]["stats"]
    found = {name: value for name, value in first.items() if "agreement" in name and "max" in name}
    assert found, sorted(first)
    assert all(np.abs(value) < 1e-3 for value in found.values()), found


def test_job_has_a_timeline(job):
    """The decode spans of a trained episode have as many tokens as its calls returned."""
    timeline = read_timeline(job.paths.spans)
    ways = ways_of(timeline.spans)
    attempts = [attempt for step in timeline.named("step") for attempt in groups_of_batch(step, ways)]
    assert len(attempts) == STEPS * 8
    for spans in (ways.episodes[episode] for attempt in attempts for episode in ways.episodes_of[attempt]):
        sampled, returned = (sum(s.facts["tokens"] for s in spans if s.name == name) for name in ("decode", "generate"))
        assert sampled == returned > 0
    assert {span.process for span in timeline.named("stage", "pause")} == {"generation_server/0"}


def test_job_leaves_no_process(job):
    assert processes_of(job.root) == []
