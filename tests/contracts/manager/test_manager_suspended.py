"""A RolloutWorker that is suspended keeps its connections and loses its heartbeat: nothing may be granted to it."""

import asyncio

from realsys.manager.messages import AllocateRequest
from realsys.manager.operations import ALLOCATE
from tests.support.ledger.manager_trial import BOUND_S, WORKER, drive


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
