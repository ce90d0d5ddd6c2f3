"""A job of several turns on two real SGLangs, on a CPU, whose keys are kept across weight updates."""

import pytest

from tests.support.jobs.jobs import arith, running
from tests.support.jobs.ledgers import check_ledger
from tests.support.serving.sglang_server import needs_sglang

pytestmark = pytest.mark.system
BOUND_S = 600.0
SETTINGS = [
    "generation=sglang",
    "allocation=serve.d2+d1",
    "rollout.agent=multi_turn",
    "rollout.agent_args={max_turns: 3}",
    "rollout.group_size=1",
    "train.batch_groups=32",
    "evaluation.problems=0",
    "train.total_steps=6",
    "train.optimizer.lr=0.002",
    "asynchronous.kv_on_update=keep",
    "asynchronous.kv_reuse_versions=2",
    "cluster.connect_timeout_s=400",
]


@pytest.mark.timeout(700)
def test_turns_reuse_keys_and_the_trainer_knows(tmp_path):
    """Next turns go to the server that has the conversation; tokens on kept keys are not compared.

    A prompt has one episode, so no other conversation has its beginning. If only the few completions that go on after
    an update found their keys, the hit rate would be about 0.2; on the other server for half of the turns, below 0.5.
    """
    needs_sglang()
    root, argv = arith(tmp_path, "turns", *SETTINGS)
    with running(root, argv) as live:
        live.until(lambda: both_reuse(live.server_loads()), "reuse by both servers", BOUND_S)
        job = live.wait(BOUND_S).completed()
    steps = job.records("train")
    assert [step["version"] for step in steps] == list(range(1, 7))
    assert any(step["kept_keys_fraction"] > 0 for step in steps)
    compared = [step["agreement"] for step in steps if step["agreement"]["tokens"]]
    assert compared and all(one["difference_max"] < 1e-3 for one in compared), compared
    check_ledger(job, batch_groups=32, eta=4, prompts=400)


def both_reuse(loads):
    """Both servers found most of at least 1,500 input tokens in SGLang's cache (its ``cached_tokens``)."""
    inputs = [load["prefilled_tokens"] + load["reused_tokens"] for load in loads]
    return len(loads) == 2 and all(
        tokens >= 1500 and load["reused_tokens"] > 0.5 * tokens for tokens, load in zip(inputs, loads, strict=True)
    )
