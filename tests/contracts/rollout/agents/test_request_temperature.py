"""Trainer and engine agree on the tokens of an agent that chooses its temperatures."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from realsys.cluster.stream.codec import decode_group, encode_group
from realsys.config.dataflow import dataflow_of
from realsys.data.prompts import Prompt
from realsys.data.tokenizer import TextTokenizer
from realsys.rollout import agents
from realsys.rollout.environments import Task
from realsys.types import Group, SequenceRef
from tests.support.processes.config_trees import changed
from tests.support.serving.gateways import TICKET, chat_server, make_sharp_chat_model, over_server
from tests.support.training.ppo_batch import Worker, whole
from tests.support.training.train_ranks import run_ranks

pytestmark = pytest.mark.processes

SETTINGS = (
    "rollout.agent=tests.support.harness.clients:asks_temperatures",
    "rollout.gateway.sampling=request",
    "model.dtype=float32",
    "train.microbatch_tokens=512",
)
CONFIG = changed(*SETTINGS)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_sharp_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def episode(model):
    """Four turns at temperatures 0.5, 1, 1.5 and 0; that of the trial is 1."""
    tokenizer = TextTokenizer(model)

    async def run(url):
        async with over_server(url, tokenizer, *SETTINGS) as opened:
            agent = agents.build(opened.config, tokenizer, None)
            try:
                return await agent.run(Task(Prompt("1+1=", "2", [], {}), TICKET), opened.session)
            finally:
                await agent.close()

    with pytest.MonkeyPatch.context() as patch, chat_server(model) as url:
        patch.chdir(Path(__file__).parents[4])
        return asyncio.run(run(url))


def statistics(model, episode, temperature):
    """Return the statistics of actor_inf and actor_train. ``temperature``: of the trial; 0: no call reads any."""
    frames = encode_group(Group(TICKET, [episode, replace(episode, reward=0.0)], "rollout_worker/0"))

    def body(rank, device):
        worker = Worker(rank, device, CONFIG, whole("d1", "actor"), {"actor": model})
        worker.data.temperature = temperature
        refs = [
            SequenceRef(meta.sample_id, meta.length, meta.loss_tokens, meta.reward, False, 0, k, meta.loss_tokens)
            for k, meta in enumerate(worker.data.add_group(decode_group(frames)).samples)
        ]
        compared = worker.call("actor_inf", "actor", [refs]).stats
        return compared, worker.call("actor_train", "actor", [refs], lr=0.0).stats

    return run_ranks(1, body, CONFIG)


def test_row_has_temperature_of_each_turn(episode):
    """The greedy completion is context."""
    (row,) = episode.rows
    assert [temperature for temperature, _ in row.temperatures] == [0.5, 0.0, 1.5]
    assert sum(count for _, count in row.temperatures) == row.loss_tokens
    assert not row.loss_mask[-1] and "temperatures" in dataflow_of(CONFIG).source_keys


def test_importance_ratio_on_policy_is_one(model, episode):
    [(compared, trained)] = statistics(model, episode, temperature=1.0)
    assert compared["agreement/tokens"] == 2 * episode.rows[0].loss_tokens
    assert compared["agreement/difference_max"] < 1e-4 < CONFIG.train.engine_check
    assert compared["agreement/ratio"] == pytest.approx(1.0, abs=1e-5)
    for weight in ("w_mean", "w_max", "u_mean", "u_max"):
        assert trained[weight] == pytest.approx(1.0, abs=1e-4)


def test_ratio_without_temperatures_is_wrong(model, episode):
    """Scored at the trial's temperature, the monitor warns."""
    [(compared, _)] = statistics(model, episode, temperature=0.0)
    assert compared["agreement/difference_mean"] > CONFIG.train.engine_check
