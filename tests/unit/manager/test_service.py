"""The shell around ManagerState: its clock, and a disk that fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from realsys.errors import LedgerError
from realsys.manager.ledger.journal import Journal
from realsys.manager.messages import ClaimRequest, RollBackRequest, TrainedRequest
from realsys.manager.operations import CLAIM, DATA_POSITION, ROLL_BACK, TRAINED
from realsys.manager.service import ManagerService, steady_clock
from tests.support.ledger.manager_states import SETTINGS, ready, tickets


@pytest.mark.parametrize("jump", [1e9, -1e9])
def test_leases_ignore_changes_of_wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    async def scenario() -> None:
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


def test_the_clock_goes_on() -> None:
    clock = steady_clock()
    first = clock()
    while clock() == first:  # until the machine's clock advances
        pass
    assert clock() > first


async def _roll_back(service: ManagerService) -> None:
    await service.call(ROLL_BACK, RollBackRequest(-1, -1, f"{1:019d}"))


async def _position(service: ManagerService) -> None:
    await service.call(DATA_POSITION, None)


async def _trained_again(service: ManagerService) -> None:
    """The first call was written, and ended before it was on the disk."""
    [ticket] = tickets(service.state)
    await service.call(CLAIM, ClaimRequest(1, [ticket.ticket_id]))
    request = TrainedRequest(1, 1, [ticket.ticket_id])
    service.state.trained(request, 0.0)
    await service.call(TRAINED, request)


@pytest.mark.parametrize("call", [_roll_back, _position, _trained_again])
def test_failed_sync_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[ManagerService], object]
) -> None:
    async def scenario() -> None:
        with Journal(tmp_path / "ledger") as journal:
            service = ManagerService(ready(), journal)

            def sync() -> None:
                raise LedgerError("ledger: cannot sync: Input/output error")

            monkeypatch.setattr(journal, "sync", sync)
            with pytest.raises(LedgerError, match="cannot sync"):
                await call(service)  # type: ignore[misc]
            assert isinstance(service.fatal.exception(), LedgerError)

    asyncio.run(scenario())


def test_drop_is_synced_before_the_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a ledger that lost its last records would miss the group, and the trainer refuse each of its copies."""

    async def scenario() -> None:
        state = ready()
        with Journal(tmp_path / "ledger") as journal:
            service, synced = ManagerService(state, journal), list[int]()
            [ticket] = tickets(state)
            monkeypatch.setattr(journal, "sync", lambda: synced.append(journal.records))
            await service.call(TRAINED, TrainedRequest(0, 0, dropped=[(ticket.ticket_id, "stale")]))
            assert synced == [2], "the grant and the drop"

    asyncio.run(scenario())
