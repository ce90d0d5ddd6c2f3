"""Over HTTP: the training side starts again, an older one is fenced; what a held allocation waits for."""

import asyncio

import msgspec
import pytest

from realsys.config.fields import replaced
from realsys.errors import Fenced, StreamError
from realsys.manager.client import ManagerClient
from realsys.manager.ledger.events import Opened, Submitted
from realsys.manager.ledger.journal import read_journal
from realsys.manager.messages import (
    AllocateRequest,
    EvaluateRequest,
    RollBackRequest,
    SubmitReply,
    SubmitRequest,
    TrainedRequest,
)
from realsys.manager.operations import ALLOCATE
from realsys.types import PublishedVersion
from tests.support.ledger.manager_trial import BOUND_S, TOKEN, WORKER, config, drive, trial

A, B = (f"{number:019d}" for number in (1, 2))


async def start(t, version, incarnation):
    return await t.post("/roll_back", version=version, step=version, incarnation=incarnation, checkpoint="/c")


async def serve(t, version, incarnation):
    """Publish, and wait until the server has verified it."""
    published = PublishedVersion(version, incarnation, f"/weights/v{version}.{incarnation}", version)
    t.store.add(t.names.model_version(), msgspec.json.encode(published).decode(), replace=True)

    def verified():
        server = t.state.servers.get("generation_server/0")
        return server is not None and server.verified == published

    await t.until(f"the server has version {version} of {incarnation}", verified)


def events(t):
    return [event for event, _ in read_journal(t.ledger)]


@pytest.mark.parametrize(
    ("body", "token", "expected"),
    [
        ({"version": 0, "step": 0, "incarnation": A}, "wrong", 401),
        ({"version": -2, "step": 0, "incarnation": A}, TOKEN, 400),
        ({"version": 0, "step": 0, "incarnation": ""}, TOKEN, 400),
        ({"version": 0, "step": 0, "incarnation": "9"}, TOKEN, 400),  # would be younger than all that are to come
        ({"version": 0, "step": 0, "incarnation": "the newest of all!!"}, TOKEN, 400),
        ({"version": 0, "step": 0}, TOKEN, 400),
    ],
)
def test_a_bad_roll_back_changes_nothing(tmp_path, body, token, expected):
    async def scenario(t):
        status, reply = await t.call("/roll_back", body, token=token)
        assert status == expected and "\n" not in reply["error"]
        assert [type(event) for event in events(t)] == [Opened]

    drive(tmp_path, scenario)


def test_the_client_fences_an_older_training_side(tmp_path):
    async def scenario(t):
        client = ManagerClient(lambda: t.url, TOKEN, retry_timeout_s=BOUND_S)
        try:
            assert (await client.roll_back(RollBackRequest(-1, -1, B))).reissued == 0
            with pytest.raises(Fenced, match=f"{A} must end"):
                await client.roll_back(RollBackRequest(-1, -1, A))
            with pytest.raises(Fenced, match=f"{A} must end"):
                await client.trained(TrainedRequest(1, 1, incarnation=A))
            with pytest.raises(Fenced, match=f"{A} must end"):
                await client.evaluate(EvaluateRequest("step-1", "eval", 1, incarnation=A))
            with pytest.raises(StreamError, match="status 400.*the ledger ends at 0"):
                await client.roll_back(RollBackRequest(5, 5, f"{3:019d}"))
        finally:
            await client.close()

    drive(tmp_path, scenario)


def test_group_that_never_arrived_wakes_held_allocation(tmp_path):
    async def scenario(t):
        await t.add_server(0)
        await start(t, -1, A)
        await serve(t, 0, A)
        tickets = (await t.allocate(4))["tickets"]
        for ticket in tickets:
            await t.finish(ticket)
        clock = t.manager.service.clock
        t.manager.service.clock = lambda: clock() + 3600.0
        held = asyncio.create_task(t.allocate(1, wait_s=BOUND_S))
        kept = [[ticket["ticket_id"], 0] for ticket in tickets[1:]]
        reply = await t.post("/trained", step=0, version=0, incarnation=A, held=kept)
        assert reply["lost"] == [tickets[0]["ticket_id"]] and reply["trained"] == reply["dropped"] == 0
        assert (await held)["tickets"][0]["attempt"] == 1

    drive(tmp_path, scenario)


def test_data_position_is_synced_before_the_reply(tmp_path):
    async def scenario(t):
        synced: list[int] = []
        journal = t.manager.service.journal
        sync = journal.sync

        def counted():
            sync()
            synced.append(journal.size)

        journal.sync = counted  # type: ignore[method-assign]
        await t.ready()
        await t.allocate(2)
        async with t.session.get(t.url + "/data_position", headers={"Authorization": f"Bearer {TOKEN}"}) as response:
            position = await response.json()
        assert len(position["pending"]) == 2 and synced == [journal.size]

    drive(tmp_path, scenario)


def test_submitted_prompts_wake_an_allocation_and_survive_a_restart(tmp_path):
    """The reply comes after an fsync, also that of a repetition. An older trainer may not submit."""

    async def scenario(t):
        synced: list[list[Submitted]] = []  # by each fsync
        journal = t.manager.service.journal
        sync = journal.sync
        journal.sync = lambda: (sync(), synced.append([e for e in events(t) if isinstance(e, Submitted)]))
        await start(t, -1, B)
        await t.add_server(0)
        await serve(t, 0, B)
        client = ManagerClient(lambda: t.url, TOKEN)
        holding, hold = asyncio.Event(), t.manager.service.grants.hold
        t.manager.service.grants.hold = lambda *call: (hold(*call), holding.set())
        held = asyncio.create_task(client.allocate(AllocateRequest(WORKER, 1, 10.0)))
        await holding.wait()
        assert (await t.get("/status"))["admission"]["reason"] == "nothing_submitted"
        synced.clear()
        assert (await client.submit(SubmitRequest(B, 0, [63, 64]))).total == 2
        assert [ticket.prompt_index for ticket in (await held).tickets] == [63]
        assert (await client.submit(SubmitRequest(B, 0, [63, 64]))).total == 2
        assert [[event.prompts for event in record] for record in synced] == [[[63, 64]]] * 2
        with pytest.raises(Fenced):
            await client.submit(SubmitRequest(A, 2, [1]))
        with pytest.raises(StreamError, match="those from 2 on are missing"):
            await client.submit(SubmitRequest(B, 3, [1]))
        await client.close()
        await t.halt()
        await t.start()
        client = ManagerClient(lambda: t.url, TOKEN)
        assert await client.submit(SubmitRequest(B)) == SubmitReply(2, 1)
        await client.close()

    async def main():
        async with asyncio.timeout(3 * BOUND_S), trial(tmp_path, replaced(config(), ["data", "order"], "script")) as t:
            await scenario(t)

    asyncio.run(main())


def test_reported_server_that_is_dead_is_quarantined(tmp_path):
    async def scenario(t):
        await t.ready()
        ticket = (await t.allocate())["tickets"][0]
        await t.schedule(ticket)
        [dead] = t.servers
        await dead.stop()
        reported = asyncio.create_task(t.schedule(ticket, failed_server=dead.name, failure="connection refused"))
        await t.until("no answer", t.quarantined(dead.name))
        assert (await reported)[0] == 503 and (await t.allocate())["reason"] == "no_server"

    drive(tmp_path, scenario)


# ---- A RolloutWorker that is suspended keeps its connections and loses its heartbeat: nothing may be granted to it


async def _never():
    """It has not hung up."""
    return False


def test_suspended_worker_gets_no_ticket(tmp_path):
    async def scenario(t):
        t.heartbeat(WORKER, "1")
        await t.ready()
        assert len((await t.allocate(4))["tickets"]) == 4  # the quota is used up
        held = asyncio.create_task(t.manager.service.call(ALLOCATE, AllocateRequest(WORKER, 4, BOUND_S), _never))
        await asyncio.sleep(0)  # it has begun, and waits
        t.store.delete(t.names.heartbeat(WORKER))
        assert (await held).tickets == []
        assert t.state.ledger.counts.open["waiting"] == 4
        t.heartbeat(WORKER, "2")  # its successor gets them
        assert [ticket["attempt"] for ticket in (await t.allocate(4))["tickets"]] == [1] * 4

    drive(tmp_path, scenario)


def test_grant_without_heartbeat_is_lost_with_its_incarnation(tmp_path):
    async def scenario(t):
        await t.ready()
        body = {"worker": WORKER, "max_tickets": 1, "incarnation": "1"}
        ticket = (await t.post("/allocate_rollout", **body))["tickets"][0]
        t.heartbeat(WORKER, "2")
        await t.until("ticket waits", lambda: t.state.ledger.counts.open["waiting"] == 1)
        again = (await t.post("/allocate_rollout", **body | {"incarnation": "2"}))["tickets"][0]
        assert (again["ticket_id"], again["attempt"]) == (ticket["ticket_id"], 1)

    drive(tmp_path, scenario)
