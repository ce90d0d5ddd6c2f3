"""Reward services that die, are full, hang, or start late: real sockets and verifier processes."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from realsys.cluster.http_client import CallFailed, HttpClient
from realsys.errors import ConfigError, NoVerifierError
from realsys.reward import reward_server, verifier_protocol
from realsys.reward.pool import ItemLimits
from realsys.reward.verifiers.contract import Item, Verdict
from realsys.workers.reward_service import serve
from tests.support.ledger.memory_store import MemoryNameStore
from tests.support.processes.config_trees import changed
from tests.support.rewards.reward_services import TOKEN, client_of, registrations, services
from tests.support.serving.reward_pools import correct, outcomes, until

RIGHT = Verdict(correct=True)
SLOW = ItemLimits(50.0, 50.0)


def bounded(body):
    """Run a coroutine; 60 s bound it."""

    async def main():
        async with asyncio.timeout(60):
            await body()

    asyncio.run(main())


def test_items_of_dead_service_are_judged_elsewhere():
    async def body():
        async with services(2) as (first, second), client_of([first, second]) as client:
            await outcomes(client, [Item("", "a", "a")] * 64)  # both have loaded the verifier
            calls = asyncio.create_task(outcomes(client, [Item("", "wait", "0.03")] * 64))
            await until(lambda: first.server.info().held and second.server.info().held)
            await first.stop()
            assert [verdict.correct for verdict in await calls] == [False] * 64
            assert (client.undecided, client.take_failures()) == (0, {})
            assert second.server.info().verdicts > 64

    bounded(body)


def test_full_service_delays_and_refuses_nothing(monkeypatch):
    """It asks for a wait of a second, not of the ten that its rate would need."""
    monkeypatch.setattr(reward_server, "_LAST_S", reward_server._FIRST_S)

    async def body():
        async with services(1, items=16) as [service], client_of([service]) as client:
            await correct(client, "a")
            verdicts = await outcomes(client, [Item("", "wait", "0.01")] * 100)
            assert [verdict.correct for verdict in verdicts] == [False] * 100
            info = service.server.info()
            assert info.refused["load"] > 0 and (info.held, info.held_bytes) == (0, 0)

    bounded(body)


def test_full_service_says_when_to_come_back():
    async def body():
        async with services(1, SLOW, items=1) as [service], client_of([service]) as client:
            held = asyncio.create_task(correct(client, "hang"))
            await until(lambda: service.server.info().held)
            request = verifier_protocol.VerifyRequest("exact", [msgspec.Raw(b'["","","",{}]')])
            async with HttpClient(TOKEN) as http:
                with pytest.raises(CallFailed, match="the reward service is full: 1 completions") as refused:
                    await http.call(service.http.url + "/verify", request, 10.0)
            assert refused.value.status == 503 and refused.value.retry_after_s >= 1
            held.cancel()

    bounded(body)


def test_verdicts_arrive_before_the_slowest(monkeypatch):
    items = [("a",), ("wait", "1"), ("hang",)]
    monkeypatch.setattr(verifier_protocol, "PROGRESS_S", 0.05)

    async def body():
        async with services(1) as [service], client_of([service]) as client:
            await correct(client, "a")
            quick, _, slow = calls = [asyncio.create_task(correct(client, *does)) for does in items]
            assert await quick is True
            assert not slow.done() and service.server.info().held == 1
            slow.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    bounded(body)


def test_cancelled_callers_free_the_service():
    async def body():
        async with services(1, SLOW) as [service], client_of([service]) as client:
            calls = [asyncio.create_task(correct(client, "hang")) for _ in range(32)]
            await until(lambda: service.server.info().held == 32)
            for call in calls:
                call.cancel()
            await until(lambda: (info := service.server.info()).held == info.waiting == info.held_bytes == 0)

    bounded(body)


def test_wrong_token_is_not_retried():
    async def body():
        async with services(2) as running, client_of(running, token="other") as client:
            with pytest.raises(NoVerifierError, match=r"reward_service/\d refused the request: status 401: .*token"):
                await correct(client, "a")
            assert sum(each.server.refused["token"] for each in running) == 1

    bounded(body)


def test_malformed_request_is_refused():
    async def body():
        async with services(1) as [service], HttpClient(TOKEN) as http:
            with pytest.raises(CallFailed, match="/verify: .*name") as refused:
                await http.call(service.http.url + "/verify", {"items": []}, 10.0)
            assert refused.value.status == 400

    bounded(body)


def test_item_that_cannot_be_read_fails_alone():
    async def body():
        async with services(1) as [service], HttpClient(TOKEN) as http:
            items = [msgspec.Raw(b'["","#1","1",{}]'), msgspec.Raw(b"7")]
            reply = await http.call(service.http.url + "/verify", verifier_protocol.VerifyRequest("exact", items), 30.0)
            decided = msgspec.json.decode(reply, type=verifier_protocol.VerifyReply).decided
            first, second = (each.outcome for each in sorted(decided, key=lambda each: each.index))
            assert first == Verdict(correct=True, answer="1") and second.cause == "raised"

    bounded(body)


def test_service_without_users_is_refused():
    """Its RolloutWorkers judge themselves: a service that is started by hand would wait for ever."""

    async def body():
        with pytest.raises(ConfigError, match=r"rollout\.reward\.services=0: the RolloutWorkers .*: set it to 1"):
            await serve(SimpleNamespace(config=changed()))

    bounded(body)


def test_service_that_registers_later_is_used():
    async def body():
        store = MemoryNameStore()
        async with services(1) as [service], client_of([]) as client:
            await client.follow(store, "t")
            call = asyncio.create_task(correct(client, "a"))
            await until(lambda: client.waiting == 1)
            for key, value in registrations([service]).items():
                store.add(key, value)
            assert await call is True

    bounded(body)


def test_unreadable_registration_is_left_out(caplog):
    async def body():
        async with services(1) as [service], client_of([]) as client:
            client.registered({**registrations([service]), "t/x": "garbage"})
            assert await correct(client, "a") is True

    bounded(body)
    assert "t/x is not the address of a reward service" in caplog.text


def test_long_completions_fit():
    """32k tokens are about 200 kB; a group of them travels in several requests."""

    async def body():
        async with services(1) as [service], client_of([service]) as client:
            text = "x" * (2 << 20)
            verdicts = await outcomes(client, [Item("", text, text)] * 8)
            assert verdicts == [RIGHT] * 8

    bounded(body)


def test_metrics_show_load_and_failures():
    async def body():
        async with services(1) as [service], client_of([service]) as client, HttpClient() as http:
            await outcomes(client, [Item("", does, "a") for does in ("a", "raise")])
            text = (await http.call(service.http.url + "/metrics", None, 10.0)).decode()
            info = msgspec.json.decode(await http.call(service.http.url + "/info", None, 10.0))
        assert 'realsys_reward_failures_total{cause="raised"} 2.0' in text
        assert "realsys_reward_held 0.0" in text and "realsys_reward_verdicts_total 3.0" in text
        assert info["failures"] == {"raised": 2} and info["verdicts_per_s"] > 0

    bounded(body)
