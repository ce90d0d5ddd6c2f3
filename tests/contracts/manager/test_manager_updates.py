"""Over HTTP: weight updates of servers that hang, refuse, die, lie or restart."""

import asyncio

from tests.support.ledger.manager_trial import BOUND_S, drive


def test_update_reaches_healthy_server_beside_broken_ones(tmp_path):
    async def scenario(t):
        healthy, hanging, refusing = [await t.add_server(i) for i in range(3)]
        hanging.released.clear()
        refusing.refuse = True
        t.publish(0)
        await t.until("server 0 serves 0", t.serves(0, 0))
        await t.until("server 2 refused", t.failed("generation_server/2"))
        await asyncio.wait_for(hanging.asked.wait(), BOUND_S)
        tickets = (await t.allocate(4))["tickets"]
        assert len(tickets) == 4
        for ticket in tickets:
            status, place = await t.schedule(ticket)
            assert (status, place["server"], place["url"]) == (200, healthy.name, healthy.url)
        t.publish(1)
        await t.until("server 0 serves 1", t.serves(0, 1))
        rows = {row["name"]: row for row in (await t.get("/status"))["servers"]}
        assert rows[hanging.name]["version"] is None and rows[hanging.name]["state"] == "updating"
        assert "checksum" in rows[refusing.name]["error"]
        refusing.refuse = False
        hanging.released.set()
        await t.until("the hanging one catches up", t.serves(1, 1))
        t.publish(2)  # a new version is tried immediately, whatever the back-off
        await t.until("the refusing one recovers", t.serves(2, 2))
        assert refusing.loaded[-1] == 2 and hanging.loaded[:2] == [0, 1]

    drive(tmp_path, scenario)


def test_server_that_dies_in_update_is_quarantined(tmp_path):
    async def scenario(t):
        await t.ready()
        dying = await t.add_server(1)
        await t.until("server 1 serves 0", t.serves(1, 0))
        dying.released.clear()
        dying.asked.clear()
        t.publish(1)
        await t.until("server 0 serves 1", t.serves(0, 1))
        await asyncio.wait_for(dying.asked.wait(), BOUND_S)
        dying.dead = True
        await dying.stop()
        await t.until("dead server in quarantine", t.quarantined(dying.name))
        t.store.delete(t.names.generation_server(1))
        await t.until("server 1 is gone", lambda: t.state.servers.get(dying.name) is None)
        status, place = await t.schedule((await t.allocate())["tickets"][0])
        assert status == 200 and place["server"] == "generation_server/0"

    drive(tmp_path, scenario)


def test_update_that_hangs_beyond_its_timeout_fails(tmp_path):
    async def scenario(t):
        hanging = await t.add_server(0)
        hanging.released.clear()
        t.publish(0)
        await t.until("the timeout", t.failed(hanging.name))
        assert (await t.allocate())["reason"] == "no_server"

    drive(tmp_path, scenario, update_timeout_s=0.1)


def test_server_with_another_version_is_not_routed_to(tmp_path):
    async def scenario(t):
        await t.ready()
        liar = t.servers[0]
        liar.lies = True
        t.publish(1)
        await t.until("the lie", t.failed(liar.name))
        [row] = (await t.get("/status"))["servers"]
        assert (row["version"], row["state"]) == (0, "ready") and "does not report it" in row["error"]
        ticket = (await t.allocate())["tickets"][0]
        t.publish(2)
        await t.until("version 2", lambda: t.state.version == 2)
        assert (await t.allocate())["reason"] == "no_server", "it serves 0, which is beyond the bound now"
        liar.lies = False
        t.publish(3)
        await t.until("server serves 3", t.serves(0, 3))
        assert (await t.schedule(ticket))[1]["version"] == 3

    drive(tmp_path, scenario)


def test_restarted_manager_asks_the_servers_for_their_load(tmp_path):
    async def scenario(t):
        await t.ready(servers=2)
        ticket = (await t.allocate())["tickets"][0]
        busy, idle = t.servers
        busy.running = 50
        await t.halt()
        await t.start()
        t.follow_loads()
        live = t.state.reservations.live
        await t.until("the load is known", lambda: live(busy.name, 0).requests == 50)
        await t.until("both servers are probed", lambda: t.serves(0, 0)() and t.serves(1, 0)())
        assert (await t.schedule(ticket))[1]["server"] == idle.name

    drive(tmp_path, scenario)


def test_restarted_manager_finds_version_kept_for_evaluation(tmp_path):
    async def scenario(t):
        await t.ready(servers=2)
        await t.post("/evaluate", eval_id="e", split="eval", n=1)
        [ticket] = (await t.allocate())["tickets"]
        assert ticket["kind"] == "eval"
        t.publish(1)
        await t.until("the second server updates", t.serves(1, 1))
        assert list(t.state.servers.holds) == ["generation_server/0"]
        await t.halt()
        await t.start()
        await t.until("both servers are asked", lambda: t.serves(0, 0)() and t.serves(1, 1)())
        assert t.servers[0].loaded == [0] and t.state.evaluations.find("e").saved.restarts == 0

    drive(tmp_path, scenario)
