"""Over HTTP: the training side starts again, an older one is fenced, the ledger is compacted under load."""

import asyncio

import msgspec
import pytest

from realsys.config.paths import TrialPaths
from realsys.errors import Fenced, StreamError
from realsys.launch.commands.audit import audit_trial
from realsys.manager.client import ManagerClient
from realsys.manager.ledger.events import Opened, RolledBack, Snapshot
from realsys.manager.ledger.journal import read_journal, twin_path
from realsys.manager.messages import EvaluateRequest, RollBackRequest, TrainedRequest
from realsys.types import PublishedVersion
from tests.support.ledger.manager_trial import BOUND_S, TOKEN, WORKER, drive

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


def test_trainer_rolls_back_and_older_one_is_refused(tmp_path):
    async def scenario(t):
        await t.add_server(0)
        assert await start(t, -1, A) == {"reissued": 0, "evaluations": []}
        await serve(t, 0, A)
        first, second, third = (await t.allocate(3))["tickets"]
        assert first["trainer"] == A
        await t.finish(first)
        await t.finish(second)
        body = {"step": 1, "version": 1, "incarnation": A}
        claim = {"version": 1, "incarnation": A, "tickets": [first["ticket_id"]]}
        assert await t.post("/claim", **claim) == await t.post("/claim", **claim) == {"gone": []}
        assert (await t.post("/trained", **body, trained=[first["ticket_id"]], oldest=[0]))["trained"] == 1
        status, reply = await t.call("/trained", body | {"trained": [second["ticket_id"]]})
        assert status == 400 and "though it is finished, not claimed" in reply["error"]
        status, reply = await t.call("/claim", claim | {"tickets": ["0000000099"]})
        assert status == 400 and "ticket 0000000099 was never granted" in reply["error"]
        await serve(t, 1, A)
        assert await start(t, 0, B) == {"reissued": 3, "evaluations": []}
        assert await start(t, 0, B) == {"reissued": 3, "evaluations": []}, "the reply was lost and the call repeated"
        assert (await t.allocate())["reason"] == "no_server" and (await t.get("/get_model_version"))["version"] == -1
        status, reply = await t.call("/trained", body | {"trained": [second["ticket_id"]]})
        assert status == 409 and B in reply["error"] and "\n" not in reply["error"]
        assert (await t.call("/claim", claim))[0] == 409
        assert (await t.call("/roll_back", {"version": 0, "step": 0, "incarnation": A}))[0] == 409
        status, reply = await t.call("/roll_back", {"version": 9, "step": 9, "incarnation": f"{3:019d}"})
        assert status == 400 and "the ledger ends at 0" in reply["error"]
        assert (await t.schedule(third))[0] == 409
        await serve(t, 0, B)
        again = (await t.allocate(3))["tickets"]
        assert [(x["ticket_id"], x["attempt"], x["trainer"]) for x in again] == [
            (x["ticket_id"], 1, B) for x in (first, second, third)
        ]
        kinds = [type(event) for event in events(t)]
        assert kinds.count(RolledBack) == 2 and kinds[:2] == [Opened, RolledBack]

    drive(tmp_path, scenario)


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


def test_a_manager_that_restarts_still_knows_who_trains(tmp_path):
    """The name store holds what the old side published: it is not served, whoever finds it first."""

    async def scenario(t):
        await t.add_server(0)
        await start(t, -1, A)
        await serve(t, 0, A)
        await start(t, 0, B)
        await t.halt()
        await t.start()
        assert t.state.trainer_incarnation == B and (await t.get("/get_model_version"))["version"] == -1
        assert (await t.call("/trained", {"step": 1, "version": 1, "incarnation": A}))[0] == 409
        await serve(t, 0, B)
        assert (await t.allocate())["tickets"][0]["trainer"] == B
        assert sum(isinstance(event, Opened) for event in events(t)) == 1, "nothing that binds has changed"

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


def test_compaction_under_load_loses_nothing(tmp_path):
    """A limit of 4 kB: many compactions beside many calls; then a restart from what is left."""

    async def life(t):
        step, journal = 0, t.manager.service.journal
        while step < 40 or not journal.base:  # until it has been compacted, however slow the disk is
            step += 1
            reply = await t.post("/allocate_rollout", worker=WORKER, max_tickets=2, wait_s=BOUND_S)
            for ticket in reply["tickets"]:
                await t.finish(ticket)
            ids = [ticket["ticket_id"] for ticket in reply["tickets"]]
            body = {"step": step, "version": step, "incarnation": A, "trained": ids, "oldest": [step - 1] * len(ids)}
            await t.post("/claim", version=step, incarnation=A, tickets=ids)
            await t.post("/trained", **body)
            await serve(t, step, A)
        return step

    async def scenario(t):
        await t.add_server(0)
        await start(t, -1, A)
        await serve(t, 0, A)
        steps = await life(t)
        before = (await t.get("/status"))["ledger"]
        await t.halt()
        kept = events(t)
        assert isinstance(kept[0], Snapshot) and kept[0].records > 20 and not twin_path(t.ledger).exists()
        report = audit_trial(TrialPaths(t.ledger.parent))
        assert report.ok and report.states["trained"] == 2 * steps == before["trained"], report.checks
        await t.start()
        assert (await t.get("/status"))["ledger"] == before

    drive(tmp_path, scenario, ledger_compact_mb=4 / 1024)


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
