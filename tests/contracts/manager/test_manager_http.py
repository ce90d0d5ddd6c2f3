"""The manager's real app on a real port: allocation, finishes, evaluations, restarts, status."""

import asyncio
import json

import pytest

from realsys.errors import LedgerError
from tests.support.ledger.manager_trial import BOUND_S, TOKEN, WORKER, drive
from tests.support.polling import poll


def test_caller_that_closed_its_connection_gets_no_ticket(tmp_path):
    async def scenario(t):
        await t.ready()
        assert len((await t.allocate(100))["tickets"]) == 4
        held = asyncio.create_task(t.allocate(100, wait_s=BOUND_S))
        await asyncio.to_thread(poll, lambda: len(t.manager.service.grants) == 1, "it is held", BOUND_S)
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        t.publish(1)
        other = await t.post("/allocate_rollout", worker="rollout_worker/1", max_tickets=100, wait_s=BOUND_S)
        assert len(other["tickets"]) == 2

    drive(tmp_path, scenario)


def test_allocation_is_held_and_woken_by_a_publication(tmp_path):
    async def scenario(t):
        await t.ready()
        assert len((await t.allocate(100))["tickets"]) == 4  # B (v + eta + 1)
        refused = await t.allocate(1)
        assert refused["tickets"] == [] and refused["reason"] == "staleness" and refused["retry_after_s"] > 0
        held = asyncio.create_task(t.allocate(100, wait_s=BOUND_S))
        t.publish(1)
        assert len((await held)["tickets"]) == 2

    drive(tmp_path, scenario)


@pytest.mark.parametrize(
    ("body", "token", "expected"),
    [
        (b'{"worker": "w", "max_tickets": 1}', "wrong", 401),
        (b'{"worker": "w", "max_tickets": ', TOKEN, 400),
        (b'{"worker": "w", "max_tickets": "many"}', TOKEN, 400),
        (b'{"worker": "w", "max_tickets": 0}', TOKEN, 400),
        (b"\xff\xfe", TOKEN, 400),
        (b'"' + b"x" * (5 << 20) + b'"', TOKEN, 413),
    ],
)
def test_bad_call_is_refused_in_one_line(tmp_path, body, token, expected):
    async def scenario(t):
        status, reply = await t.call("/allocate_rollout", body, token=token)
        assert status == expected
        assert "\n" not in reply["error"] and "/allocate_rollout" in reply["error"]
        assert (await t.get("/health"))["status"] == "ok"

    drive(tmp_path, scenario)


def test_finish_of_superseded_attempt_is_no_error(tmp_path):
    async def scenario(t):
        await t.ready()
        assert await t.finish({"ticket_id": "never", "attempt": 0, "n": 1}) == {"known": False, "retry": False}
        assert await t.finish({"ticket_id": "0000000099", "attempt": 0, "n": 1}) == {"known": False, "retry": False}
        ticket = (await t.allocate())["tickets"][0]
        assert await t.finish(ticket, "failed", reason="verifier died: 9") == {"known": True, "retry": True}
        again = (await t.allocate())["tickets"][0]
        assert (again["ticket_id"], again["attempt"]) == (ticket["ticket_id"], 1)
        assert again["prompt_index"] == ticket["prompt_index"] and again["seed"] != ticket["seed"]
        assert (await t.finish(ticket))["known"] is False
        status, reply = await t.schedule(ticket)
        assert status == 409 and ticket["ticket_id"] in reply["error"]
        assert await t.finish(again, "failed", reason="verifier died: 9") == {"known": True, "retry": False}
        ledger = (await t.get("/status"))["ledger"]
        assert ledger["dropped_by_reason"] == {"failed verifier died": 1}

    drive(tmp_path, scenario)


def test_lease_that_lapses_wakes_a_held_allocation(tmp_path):
    async def scenario(t):
        await t.ready()
        first = (await t.allocate(4))["tickets"]
        again = (await t.allocate(1, wait_s=BOUND_S))["tickets"][0]
        assert again["attempt"] == 1 and again["ticket_id"] == first[0]["ticket_id"]

    drive(tmp_path, scenario, lease_s=0.2)


def test_allocation_repeated_after_restart_gets_same_tickets(tmp_path):
    async def scenario(t):
        await t.ready()
        lost = await t.post("/allocate_rollout", worker=WORKER, max_tickets=3, request_id="one")
        await t.halt()
        await t.start()
        again = await t.post("/allocate_rollout", worker=WORKER, max_tickets=3, request_id="one")
        assert again["tickets"] == lost["tickets"] and len(lost["tickets"]) == 3
        assert t.state.ledger.counted == 3
        await t.finish(lost["tickets"][0])
        rest = await t.post("/allocate_rollout", worker=WORKER, max_tickets=3, request_id="one")
        assert rest["tickets"] == lost["tickets"][1:], "what has ended is not handed out again"

    drive(tmp_path, scenario)


def test_journal_that_cannot_be_written_ends_the_process(tmp_path):
    async def scenario(t):
        await t.ready()
        t.manager.service.journal.close()
        status, reply = await t.call("/allocate_rollout", {"worker": WORKER, "max_tickets": 1})
        assert status == 500 and "ledger" in reply["error"]
        with pytest.raises(LedgerError, match="cannot write"):
            await asyncio.wait_for(t.task, BOUND_S)

    drive(tmp_path, scenario)


def test_status_metrics_and_page_show_the_trial(tmp_path):
    async def scenario(t):
        t.heartbeat(WORKER, "1")
        await t.ready()
        t.store.add(t.names.status, json.dumps({"phase": "train", "time": 0}), replace=True)
        await t.until("phase", lambda: t.state.master.get("phase") == "train")
        status = await t.get("/status")
        assert status["agreement"] is None and "gpu" not in status, "no train step yet"
        gpu = {"mfu": {"actor_train": 0.4}, "peak_bytes": 5.0, "used_bytes": 6.0, "utilisation": 0.9}
        waste = {"untrained": {"stale": 0.25}, "too_old": 0.125, "length_ks": 0.5}
        drift = {"version": 3, "tokens": 9, "difference_mean": 0.5, "difference_max": 1.0, "ratio": 1.6, "warning": "!"}
        t.store.add(
            t.names.status, json.dumps({"phase": "train", "agreement": drift, "gpu": gpu, **waste}), replace=True
        )
        await t.until("agreement", lambda: "agreement" in t.state.master)
        ticket = (await t.allocate())["tickets"][0]
        await t.schedule(ticket)
        await t.finish(ticket)
        status = await t.get("/status")
        assert (status["phase"], status["version"], status["max_staleness"]) == ("train", 0, 1)
        assert status["admission"]["headroom"] == 3 and status["admission"]["admits"] is True
        assert status["servers"][0]["tokens_per_s"] > 0
        assert status["rollout"]["updates"][0]["pause_s"] == 0.002 and status["agreement"] == drift
        assert status["untrained"] == waste and status["gpu"] == gpu
        assert status["throughput"]["generated_tokens"] == 40
        assert [worker["name"] for worker in status["workers"]] == [WORKER]
        train = {"kind": "train", "step": 3, "untrained": {"stale": 0.25}, "stats": {"entropy_mean": 1.5}}
        t.steps.write_text(json.dumps(train) + "\n")
        async with t.session.get(t.url + "/metrics") as response:
            text = await response.text()
        assert 'realsys_tickets{state="finished"} 1.0' in text and ticket["ticket_id"] not in text
        assert 'realsys_weight_update_seconds_bucket{le="0.003",stage="pause"} 1.0' in text
        assert 'realsys_weight_update_seconds_count{stage="total"} 1.0' in text
        assert "realsys_agreement_warning 1.0" in text
        assert 'realsys_prompts_share{success="unseen"}' in text
        assert 'realsys_train_untrained{reason="stale"} 0.25' in text
        assert "realsys_train_step 3.0" in text and "realsys_train_stats_entropy_mean 1.5" in text

    drive(tmp_path, scenario)


def test_stop_answers_held_allocations(tmp_path):
    async def scenario(t):
        held = asyncio.create_task(t.allocate(1, wait_s=BOUND_S))
        assert (await t.get("/get_model_version")) == {"version": -1}
        await t.halt()
        assert (await held)["reason"] == "no_server"

    drive(tmp_path, scenario)
