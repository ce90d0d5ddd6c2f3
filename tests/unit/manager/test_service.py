"""The shell around ManagerState: its clock, and a disk that fails."""

import asyncio
import time
from pathlib import Path

import pytest

import realsys
from realsys.errors import LedgerError
from realsys.manager.commit_loop import ManagerService, steady_clock
from realsys.manager.ledger.journal import Journal
from realsys.manager.messages import AllocateRequest, ClaimRequest, RollBackRequest, TrainedRequest
from realsys.manager.operations import ALLOCATE, CLAIM, DATA_POSITION, EVALUATION, OPERATIONS, ROLL_BACK, TRAINED
from tests.support.ledger.manager_states import SETTINGS, ready, tickets, update, version


@pytest.mark.parametrize("jump", [1e9, -1e9])
def test_leases_ignore_changes_of_wall_clock(tmp_path, monkeypatch, jump):
    async def scenario():
        state = ready()
        with Journal(tmp_path / "ledger") as journal:
            service = ManagerService(state, journal)
            begin = service.clock()
            assert abs(begin - time.time()) < 60
            [ticket] = tickets(state, now=begin)
            now = time.time
            monkeypatch.setattr("time.time", lambda: now() + jump)
            assert state.expire(service.clock()) == [] and service.clock() - begin < SETTINGS.lease_s
            assert state.ledger.running_attempt(ticket.ticket_id, 0)

    asyncio.run(scenario())


def test_the_clock_goes_on():
    clock = steady_clock()
    first = clock()
    while clock() == first:  # until the machine's clock advances
        pass
    assert clock() > first


async def _roll_back(service):
    await service.call(ROLL_BACK, RollBackRequest(-1, -1, f"{1:019d}"))


async def _position(service):
    await service.call(DATA_POSITION, None)


async def _trained_again(service):
    """The first call was written, and ended before it was on the disk."""
    [ticket] = tickets(service.state)
    await service.call(CLAIM, ClaimRequest(1, [ticket.ticket_id]))
    request = TrainedRequest(1, 1, [ticket.ticket_id])
    service.state.trained(request, 0.0)
    await service.call(TRAINED, request)


@pytest.mark.parametrize("call", [_roll_back, _position, _trained_again])
def test_failed_sync_ends_the_process(tmp_path, monkeypatch, call):
    async def scenario():
        with Journal(tmp_path / "ledger") as journal:
            service = ManagerService(ready(), journal)

            def sync():
                raise LedgerError("ledger: cannot sync: Input/output error")

            monkeypatch.setattr(journal, "sync", sync)
            with pytest.raises(LedgerError, match="cannot sync"):
                await call(service)  # type: ignore[misc]
            assert isinstance(service.fatal.exception(), LedgerError)

    asyncio.run(scenario())


def test_unrecorded_grant_is_not_repeated(tmp_path, monkeypatch):
    """A grant that could not be recorded is in memory. A worker that asks again must not get it: the next manager
    would grant the same tickets once more.
    """

    def full(self, events):
        if events:
            raise LedgerError("no space left on device")

    async def scenario():
        with Journal(tmp_path / "ledger") as journal:
            service = ManagerService(ready(), journal)
            monkeypatch.setattr(Journal, "append", full)
            for _ in range(2):
                with pytest.raises(LedgerError, match="no space left"):
                    await service.call(ALLOCATE, AllocateRequest("rollout_worker/0", 4, request_id="r1"))
            assert isinstance(service.fatal.exception(), LedgerError)

    asyncio.run(scenario())


def test_drop_is_synced_before_the_reply(tmp_path, monkeypatch):
    """Else a ledger that lost its last records would miss the group, and the trainer refuse each of its copies."""

    async def scenario():
        state = ready()
        with Journal(tmp_path / "ledger") as journal:
            service, synced = ManagerService(state, journal), list[int]()
            [ticket] = tickets(state)
            monkeypatch.setattr(journal, "sync", lambda: synced.append(journal.records))
            await service.call(TRAINED, TrainedRequest(0, 0, dropped=[(ticket.ticket_id, "filtered")]))
            assert synced == [2], "the grant and the drop"

    asyncio.run(scenario())


async def _held(service, workers, each=64):
    """Let ``workers`` wait for up to ``each`` tickets."""
    requests = [AllocateRequest(f"w/{number}", each, wait_s=10.0) for number in range(workers)]
    held = [asyncio.create_task(service.call(ALLOCATE, request)) for request in requests]
    await _quiet()
    assert len(service.grants) == workers
    return held


async def _quiet():
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


def _service(tmp_path, batch):
    """A manager at version 0 whose next version allows ``batch`` tickets."""
    state = ready(batch_groups=batch, eta=0, split_sizes={"train": 4 * batch})
    tickets(state, batch)
    return ManagerService(state, Journal(tmp_path / "ledger"))


def test_grants_are_spread_over_waiting_workers(tmp_path):
    async def scenario():
        service = _service(tmp_path, 512)
        held = await _held(service, 512)
        service.state.servers.publish(version(1))
        update(service.state, 0)
        service.settle(None)
        replies = await asyncio.gather(*held)
        assert sum(len(reply.tickets) for reply in replies) == 512
        assert max(len(reply.tickets) for reply in replies) <= 4
        service.journal.close()

    asyncio.run(scenario())


def test_release_wakes_as_many_as_it_serves(tmp_path, monkeypatch):
    async def scenario():
        service = _service(tmp_path, 16)
        held = await _held(service, 512)
        decisions = list[str]()
        decide = service._decide

        def counted(operation, request):
            decisions.append(request.worker)
            return decide(operation, request)

        monkeypatch.setattr(service, "_decide", counted)
        service.settle(None)
        await asyncio.sleep(0)
        assert decisions == [], "there is nothing to grant"
        service.state.servers.publish(version(1))
        update(service.state, 0)
        service.settle(None)
        await _quiet()
        assert sum(task.done() for task in held) == 16
        assert decisions == [f"w/{number}" for number in range(16)], "the longest wait first"
        service.close()
        await asyncio.gather(*held)
        service.journal.close()

    asyncio.run(scenario())


def test_turn_of_a_caller_that_left_passes_on(tmp_path):
    async def scenario():
        service = _service(tmp_path, 1)

        async def gone():
            return True

        left = asyncio.create_task(service.call(ALLOCATE, AllocateRequest("gone", 1, wait_s=10.0), gone))
        await _quiet()
        waits = asyncio.create_task(service.call(ALLOCATE, AllocateRequest("waits", 1, wait_s=10.0)))
        await _quiet()
        service.state.servers.publish(version(1))
        update(service.state, 0)
        service.settle(None)
        assert (await left).tickets == [] and len((await waits).tickets) == 1
        service.journal.close()

    asyncio.run(scenario())


def test_allocation_that_its_worker_gave_up_gets_no_tickets(tmp_path):
    """Its first try arrives late, or is held while its connection seems alive. The tickets would reach nobody."""

    def request(name, worker="w"):
        return AllocateRequest(worker, 2, wait_s=10.0, request_id=name)

    async def scenario():
        service = _service(tmp_path, 4)
        first = asyncio.create_task(service.call(ALLOCATE, request("first")))
        await _quiet()
        second = asyncio.create_task(service.call(ALLOCATE, request("second")))
        other = asyncio.create_task(service.call(ALLOCATE, request("first", "x")))
        await _quiet()
        service.state.servers.publish(version(1))
        update(service.state, 0)
        service.settle(None)
        assert (await first).reason == "superseded" and not (await first).tickets
        assert (await second).tickets and (await other).tickets, "another worker's calls have an order of their own"
        late = await service.call(ALLOCATE, request("first"))
        assert late.reason == "superseded" and not late.tickets
        assert (await service.call(ALLOCATE, request("second"))).tickets == (await second).tickets
        service.journal.close()

    asyncio.run(scenario())


# ---- The table of the manager's operations


def test_every_operation_is_on_the_page_of_the_manager():
    page = (Path(realsys.__file__).parents[1] / "docs" / "manager.md").read_text(encoding="utf-8")
    table = page[page.index("| call | effect |") :].split("\n\n", 1)[0]
    assert [o.path for o in OPERATIONS if f"{o.path.partition('{')[0]}" not in table] == []


def test_request_of_a_read_is_in_its_path():
    assert EVALUATION.url_path("step-1") == "/evaluate/step-1"
