"""An evaluation keeps one version on real embedded servers while weights are published in the middle."""

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace

import msgspec
import pytest

from realsys.errors import RealsysError
from realsys.generation.client import GenerationClient, SamplingSpec
from realsys.manager import decisions
from realsys.manager.client import ManagerClient
from realsys.manager.messages import AllocateRequest, Answer, EvaluateRequest, FinishRequest
from realsys.rollout.resumable_engine import EngineCall, ResumableEngine
from realsys.types import PublishedVersion
from tests.support.ledger.manager_trial import BOUND_S, TOKEN, WORKER, config, trial

PROMPT = [3, 1, 4, 1, 5]
LENGTH = 400
LONG = SamplingSpec(max_new_tokens=LENGTH, min_new_tokens=LENGTH)


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    from tests.support.serving.generation_servers import make_versions

    return make_versions(tmp_path_factory.mktemp("weights"))


class Evaluated:
    """A manager with two embedded servers, and a worker that plays an evaluation."""

    def __init__(self, running, versions):
        self.trial = running
        self.versions = versions
        self.client = ManagerClient(lambda: running.url, TOKEN, no_server_retry_timeout_s=BOUND_S)
        self.generation = GenerationClient(BOUND_S)
        self.engine = ResumableEngine(self.client, self.generation)

    def publish(self, version):
        published = PublishedVersion(version, "m1", str(self.versions.paths[version]), version)
        value = msgspec.json.encode(published).decode()
        self.trial.store.add(self.trial.names.model_version(), value, replace=True)

    async def begin(self, problems):
        """Request an evaluation, and sample all of it; returns when a server samples."""
        await self.client.evaluate(EvaluateRequest("e", "eval", problems))
        return await self.sample(problems)

    async def sample(self, problems):
        tickets = (await self.client.allocate(AllocateRequest(WORKER, problems, BOUND_S))).tickets
        assert [ticket.kind for ticket in tickets] == ["eval"] * problems
        calls = [EngineCall(ticket, "0.0", PROMPT, LONG, ticket.seed) for ticket in tickets]
        begun = [(call.ticket, asyncio.create_task(self.engine.generate(call))) for call in calls]
        urls = [server.address.url for server in self.trial.state.servers.all()]
        async with asyncio.timeout(BOUND_S):
            while not any([(await self.generation.server_info(url)).running for url in urls]):
                pass
        return begun

    async def finish(self, ticket, generated):
        low, high = int(generated.versions.min()), int(generated.versions.max())
        answer = Answer(1.0, True, len(generated.tokens), "length", low, high)
        await self.client.finish(FinishRequest(ticket.ticket_id, ticket.attempt, WORKER, "accepted", "", [answer]))

    async def reply(self):
        return await self.client.evaluation("e")


def drive(tmp_path, versions, scenario, servers=2):
    from tests.support.serving.generation_servers import embedded_server

    async def main(urls):
        async with asyncio.timeout(2 * BOUND_S), trial(tmp_path, config(eta=4)) as running:
            world = Evaluated(running, versions)
            world.publish(0)
            for index, url in enumerate(urls):
                await running.add_server(index, server=SimpleNamespace(name=f"generation_server/{index}", url=url))
            for index in range(servers):
                await running.until(f"server {index} serves 0", running.serves(index, 0))
            try:
                await scenario(world)
            finally:
                await world.generation.close()
                await world.client.close()

    with ExitStack() as stack:
        asyncio.run(main([stack.enter_context(embedded_server(versions)).url for _ in range(servers)]))


@pytest.mark.parametrize("servers", [1, 2])
def test_evaluation_keeps_its_version_through_an_update(tmp_path, versions, servers):
    async def scenario(world):
        begun = await world.begin(4 * servers)
        world.publish(1)
        await world.trial.until("a server keeps version 0", lambda: bool(world.trial.state.servers.holds))
        assert [hold.keeps for hold in world.trial.state.servers.holds.values()].count(True) == 1
        for ticket, task in begun:
            [generated] = await task
            assert set(generated.versions.tolist()) == {0} and len(generated.tokens) == LENGTH
            await world.finish(ticket, generated)
        found = await world.reply()
        assert (found.ended, found.incomplete, found.version_min, found.version_max) == (True, "", 0, 0)
        for index in range(servers):
            await world.trial.until(f"server {index} serves 1", world.trial.serves(index, 1))

    drive(tmp_path, versions, scenario, servers)


def test_evaluation_over_its_limit_has_no_number(tmp_path, versions, monkeypatch):
    """Without the hold the update meets its completions: that the versions would mix is why it ends."""
    monkeypatch.setattr(decisions, "HOLD_S", 0.0)

    async def scenario(world):
        begun = await world.begin(4)
        world.publish(1)
        await world.trial.until("server 0 serves 1", world.trial.serves(0, 1))
        found = await world.reply()
        assert found.ended and found.accuracy is None
        assert found.incomplete == "4 of 4 had not ended when version 0 was kept for 0 s"
        results = await asyncio.gather(*(task for _, task in begun), return_exceptions=True)
        for (ticket, _), result in zip(begun, results, strict=True):
            if isinstance(result, list):  # the engine had all tokens: their end is not known any more
                await world.finish(ticket, result[0])
            else:
                assert isinstance(result, RealsysError)
        assert (await world.reply()).done == 0

    drive(tmp_path, versions, scenario, 1)


def test_lost_version_begins_evaluation_anew(tmp_path, versions):
    async def scenario(world):
        begun = await world.begin(2)
        world.publish(1)
        state, names = world.trial.state, world.trial.names
        await world.trial.until("a server keeps version 0", lambda: bool(state.servers.holds))
        [keeper] = [name for name, hold in state.servers.holds.items() if hold.keeps]
        ticket, task = begun[0]
        [generated] = await task
        await world.finish(ticket, generated)
        other = 1 - int(keeper[-1])
        await asyncio.gather(*(task for _, task in begun))
        await world.client.finish(FinishRequest(begun[1][0].ticket_id, begun[1][0].attempt, WORKER, "failed"))
        await world.trial.until("the other server updates", world.trial.serves(other, 1))
        world.trial.store.delete(names.generation_server(int(keeper[-1])))
        await world.trial.until("it is gone", lambda: state.evaluations.find("e").saved.restarts == 1)
        for ticket, task in await world.sample(2):
            [generated] = await task
            await world.finish(ticket, generated)
        found = await world.reply()
        assert (found.incomplete, found.version_min, found.version_max, found.restarts) == ("", 1, 1, 1)

    drive(tmp_path, versions, scenario)
