"""A pinned version on real embedded servers of one host, while newer versions are published: two policies play."""

import asyncio
from contextlib import ExitStack, closing
from types import SimpleNamespace

import msgspec
import pytest

from realsys.cluster.http_server import HttpServer
from realsys.config.schema import EmbeddedConfig, GenerationConfig
from realsys.data.prompts import Prompt
from realsys.errors import StreamError
from realsys.generation.client import GenerationClient, SamplingSpec
from realsys.generation.embedded.engine import build_engine
from realsys.generation.server import build_app
from realsys.manager.client import ManagerClient
from realsys.manager.messages import AllocateRequest, FinishRequest, PinRequest
from realsys.rollout.episodes import RowBuilder
from realsys.rollout.group_player import GroupPlayer
from realsys.rollout.resumable_engine import EngineCall, ResumableEngine
from realsys.types import Episode, PublishedVersion
from realsys.weights.host_copies import SharedCopies
from realsys.weights.host_reader import CopyService, HostReader
from tests.support.ledger.manager_trial import BOUND_S, TOKEN, WORKER, config, trial
from tests.support.serving.generation_servers import CONTEXT, PROMPT, make_versions

CALLS, LENGTH = 8, 40
SPEC = SamplingSpec(max_new_tokens=LENGTH, min_new_tokens=LENGTH)
LONG = SamplingSpec(max_new_tokens=450, min_new_tokens=450)


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    return make_versions(tmp_path_factory.mktemp("weights"))


class Host:
    """Embedded servers that share the copies of a host; each can end alone."""

    def __init__(self, folder, versions, settings):
        self._folder, self._versions, self._settings = folder, versions, settings
        self._stacks, self.urls = list[ExitStack](), list[str]()
        (folder / "memory").mkdir()

    def start(self):
        stack, model = ExitStack(), self._versions.paths[-1]
        copies = SharedCopies(self._folder, model, where=[self._folder / "memory"])
        reader = stack.enter_context(closing(HostReader(copies)))
        generation = GenerationConfig(embedded=EmbeddedConfig(max_running=8, max_queued=32, context_length=CONTEXT))
        engine = stack.enter_context(closing(build_engine(model, generation, reader.stage)))
        service = CopyService(reader, self._settings, None, lambda: None)
        http = stack.enter_context(closing(HttpServer(build_app(engine, offer=service.offer))))
        engine.start()
        http.start()
        self._stacks.append(stack)
        self.urls.append(http.url)

    def end(self, number):
        self._stacks[number].close()

    def close(self):
        for stack in self._stacks:
            stack.close()


class World:
    """A manager with three servers, and a trainer and a worker that a test writes."""

    def __init__(self, running, versions, host):
        self.trial, self.versions, self.host = running, versions, host
        self.client = ManagerClient(lambda: running.url, TOKEN, no_server_retry_timeout_s=BOUND_S)
        self.generation = GenerationClient(BOUND_S)
        self.engine = ResumableEngine(self.client, self.generation)

    def publish(self, version):
        published = PublishedVersion(version, "m1", str(self.versions.paths[version]), version)
        value = msgspec.json.encode(published).decode()
        self.trial.store.add(self.trial.names.model_version(), value, replace=True)

    async def published(self, version, servers):
        self.publish(version)
        for index in servers:
            await self.trial.until(f"server {index} serves {version}", self.trial.serves(index, version))

    async def keeper(self):
        """Return the number of the server of the pin."""
        [name] = (await self.client.status())["pins"]["opponent"]["servers"]
        return int(name[-1])

    async def ticket(self):
        [ticket] = (await self.client.allocate(AllocateRequest(WORKER, 1, BOUND_S))).tickets
        return ticket


def drive(tmp_path, versions, scenario):
    settings = config(eta=1, batch=8).model_copy(update={"allocation": "serve.d3+d1"})

    async def main(host):
        async with asyncio.timeout(3 * BOUND_S), trial(tmp_path, settings) as running:
            world = World(running, versions, host)
            for index, url in enumerate(host.urls):
                await running.add_server(index, server=SimpleNamespace(name=f"generation_server/{index}", url=url))
            try:
                await scenario(world)
            finally:
                await world.generation.close()
                await world.client.close()

    with closing(Host(tmp_path, versions, settings)) as host:
        for _ in range(3):
            host.start()
        asyncio.run(main(host))


class Alternating:
    """Plays one completion of each policy in turn, in one row; publishes a version before every other one."""

    def __init__(self, world):
        self.world, self.versions = world, {"": [], "opponent": []}

    async def run(self, task, session):
        row = RowBuilder(PROMPT)
        for number in range(CALLS):
            policy = ("", "opponent")[number % 2]
            if policy:
                self.world.publish(3 + number // 2)
            completion = await session.generate(row.tokens, SPEC, policy=policy)
            assert completion.policy == policy
            self.versions[policy].append(completion.versions.tolist())
            row.completion(completion)
        return Episode([row.row()], 1.0)


def test_episode_plays_trained_against_pinned(tmp_path, versions):
    async def scenario(world):
        await world.published(0, range(3))
        ticket = msgspec.structs.replace(await world.ticket(), n=1)
        call = EngineCall(ticket, "8.8", PROMPT, SPEC, 0, policy="opponent")
        early = asyncio.create_task(world.engine.generate(call))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(early), 0.5)
        assert (await world.client.pin(PinRequest("opponent"))).version == 0
        assert [completion.policy for completion in await early] == ["opponent"]
        keeper = await world.keeper()
        others = {0, 1, 2} - {keeper}
        await world.published(2, others)
        agent = Alternating(world)
        player = GroupPlayer(agent, world.engine, SPEC, 10**6)
        [episode] = (await player.play(ticket, Prompt("", "", PROMPT))).ended
        assert all(set(sampled) == {0} for sampled in agent.versions["opponent"])
        trained = [version for sampled in agent.versions[""] for version in sampled]
        [row] = episode.rows
        assert row.versions.tolist() == trained and min(trained) >= 1 and max(trained) > 2
        assert row.loss_mask.sum() == CALLS // 2 * LENGTH and len(row.tokens) == len(PROMPT) + CALLS * LENGTH
        assert await world.keeper() == keeper
        with pytest.raises(StreamError, match="policy 'rival' is not pinned: opponent is"):
            await world.engine.generate(EngineCall(ticket, "9.9", PROMPT, SPEC, 0, policy="rival"))
        await world.client.finish(FinishRequest(ticket.ticket_id, ticket.attempt, WORKER, "accepted"))
        assert (await world.client.unpin(PinRequest("opponent"))).version == 0
        await world.trial.until("all serve the newest", world.trial.serves(keeper, 6))

    drive(tmp_path, versions, scenario)


def test_another_server_takes_over_the_pin_of_a_dead_one(tmp_path, versions):
    """It has a newer version, and goes back; what it samples for training goes on elsewhere."""

    async def scenario(world):
        await world.published(0, range(3))
        await world.client.pin(PinRequest("opponent"))
        keeper = await world.keeper()
        others = sorted({0, 1, 2} - {keeper})
        await world.published(2, others)
        ticket = await world.ticket()
        policies = ["opponent", "opponent", "", "", "", ""]
        calls = [
            EngineCall(ticket, f"0.{number}", PROMPT, LONG, number, policy=policy)
            for number, policy in enumerate(policies)
        ]
        begun = [asyncio.create_task(world.engine.generate(call)) for call in calls]
        async with asyncio.timeout(BOUND_S):
            while not all([(await world.generation.server_info(url)).running for url in world.host.urls]):
                pass
        world.trial.store.delete(world.trial.names.generation_server(keeper))
        await asyncio.to_thread(world.host.end, keeper)
        for policy, [completion] in zip(policies, await asyncio.gather(*begun), strict=True):
            assert len(completion.tokens) == LONG.max_new_tokens
            assert set(completion.versions.tolist()) == ({0} if policy else {2})
        assert await world.keeper() in others

    drive(tmp_path, versions, scenario)
