"""Turns of conversations at embedded servers over HTTP: keys are found again, also by the manager's routing."""

import asyncio
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from realsys.config.schema import EmbeddedConfig, GenerationConfig
from realsys.generation.client import GenerationClient, SamplingSpec
from realsys.generation.embedded.engine import build_engine
from realsys.generation.embedded.prefix_cache import KvPolicy
from realsys.manager.decisions import ManagerState
from realsys.rollout.episode_session import Calls, EpisodeSession
from realsys.rollout.resumable_engine import ResumableEngine
from realsys.weights.disk.stage import DiskReader
from tests.support.ledger import manager_states
from tests.support.serving.generation_models import VOCAB
from tests.support.serving.generation_servers import (
    BOUND_S,
    CONTEXT,
    ServerUnderTest,
    check,
    drive,
    raw,
    serving,
)

TAIL, SAMPLED = 8, SamplingSpec(max_new_tokens=6, min_new_tokens=6)


@contextmanager
def embedded(versions, kv=None, rows=16):
    config = GenerationConfig(embedded=EmbeddedConfig(max_running=4, cache_rows=rows, context_length=CONTEXT))
    engine = build_engine(versions.paths[-1], config, DiskReader(everything=True).stage, kv=kv)
    with serving(engine) as url:
        yield ServerUnderTest(url, versions.models, versions.paths, 16)


def words(seed, count):
    return np.random.default_rng(seed).integers(0, VOCAB - 1, count).tolist()


def test_server_reports_retained_keys_and_flushes_them(versions):
    async def test(client):
        [first] = await client.generate(server.url, words(0, 60), SAMPLED, rid="a", seed=1)
        info = await client.server_info(server.url)
        assert (info.retained_tokens, info.prefilled_tokens, info.reused_tokens) == (65, 59, 0)
        later = [*words(0, 60), *first.tokens.tolist(), *words(1, TAIL)]
        [second] = await client.generate(server.url, later, SAMPLED, rid="b", seed=2)
        check(server, second, later)
        info = await client.server_info(server.url)
        assert (info.retained_tokens, info.prefilled_tokens, info.reused_tokens) == (79, 59 + TAIL, 65)
        assert info.kv_tokens == 0, "they give way, so they are no load"
        assert (await raw(server, "/flush_cache", {}))[0] == 200
        assert (await client.server_info(server.url)).retained_tokens == 0

    with embedded(versions) as server:
        drive(test)


def test_reply_names_the_version_of_older_keys(versions):
    async def test(client):
        await client.update_weights(server.url, str(versions.paths[0]), 0, BOUND_S)
        [first] = await client.generate(server.url, words(0, 60), SAMPLED, rid="a", seed=1)
        await client.update_weights(server.url, str(versions.paths[1]), 1, BOUND_S)
        later = [*words(0, 60), *first.tokens.tolist(), *words(1, TAIL)]
        body = {"input_ids": later, "sampling_params": {"max_new_tokens": 3, "min_new_tokens": 3}}
        _, reply = await raw(server, "/generate", body)
        assert reply["meta_info"]["weight_versions"] == [["1", 3]]
        assert reply["meta_info"]["kv_versions"] == [["0", 3]]
        _, plain = await raw(server, "/generate", body | {"input_ids": words(2, 60)})
        assert "kv_versions" not in plain["meta_info"]

    with embedded(versions, KvPolicy(keep=True, reuse_versions=1)) as server:
        drive(test)


# ---- routing


@dataclass
class Manager:
    """The manager's decisions, without its process; ``urls`` by the name of the server."""

    state: ManagerState
    urls: dict[str, str]

    async def schedule(self, request):
        reply = self.state.schedule(request, 0.0)
        return msgspec.structs.replace(reply, url=self.urls[reply.server])


@dataclass
class Turns:
    """Conversations of 4 tickets with 4 episodes each, at two servers of version 0."""

    manager: Manager
    client: GenerationClient
    new_tokens: int = 0

    async def play(self, turns, update_after, versions):
        """Play all episodes turn by turn; both servers load version 1 after turn ``update_after``."""
        runner = ResumableEngine(self.manager, self.client)
        tickets = manager_states.tickets(self.manager.state, 4)
        calls = [Calls(runner, ticket, SAMPLED) for ticket in tickets]
        sessions = [EpisodeSession(each, episode) for each in calls for episode in range(4)]
        histories = [words(number // 4, 40) for number in range(len(sessions))]
        self.new_tokens = 40 * len(tickets)
        for turn in range(turns):
            if turn == update_after:
                await self.update(1, versions)
            await asyncio.gather(*map(self._turn, sessions, histories, range(1000 * turn, 1000 * turn + 99)))
        for each in calls:
            await each.close()

    async def update(self, number, versions):
        for url in self.manager.urls.values():
            assert (await self.client.update_weights(url, str(versions.paths[number]), number, BOUND_S)).success
        if number:
            self.manager.state.servers.publish(manager_states.version(number))
            for index in range(2):
                manager_states.update(self.manager.state, index)

    async def _turn(self, session, history, seed):
        completion = await session.generate(history)
        tail = words(seed, TAIL)
        history += [*completion.tokens.tolist(), *tail]
        self.new_tokens += TAIL


@pytest.mark.parametrize(("updates", "reuse"), [(False, 0), (True, 1), (True, 0)])
def test_next_turn_goes_where_its_keys_are(versions, updates, reuse):
    """Every turn prefills its new tokens only, also after an update within the bound, and both servers work."""

    async def test(client):
        state = manager_states.ready(servers=2, kv_reuse_versions=reuse, eta=4)
        urls = {f"generation_server/{index}": url for index, url in enumerate(served)}
        turns = Turns(Manager(state, urls), client)
        await turns.update(0, versions)
        await turns.play(6, 4 if updates else 99, versions)
        loads = [await client.server_info(url) for url in served]
        prefilled = sum(load.prefilled_tokens for load in loads)
        # The tail after the last turn is never sent.
        sent = turns.new_tokens - 16 * TAIL
        assert prefilled <= 1.05 * sent or (updates and not reuse)
        assert prefilled > 1.5 * sent or not updates or reuse, "the bound of 0 lets no older key be used"
        assert max(load.generated_tokens for load in loads) <= 2 * min(load.generated_tokens for load in loads)

    with ExitStack() as stack:
        kv = KvPolicy(keep=bool(reuse), reuse_versions=reuse)
        served = [stack.enter_context(embedded(versions, kv)).url for _ in range(2)]
        drive(test)
