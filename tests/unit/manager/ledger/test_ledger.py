"""The rollout ledger and the order of prompts."""

from __future__ import annotations

import pytest

from realsys.errors import LedgerError
from realsys.manager.ledger.events import Claimed, Dropped, Finished, Granted, Reissued, Resumed, RolledBack, Trained
from realsys.manager.ledger.ledger import Ledger
from realsys.manager.ledger.prompt_order import PromptOrder, permutation, sampling_seed


def make(*, size: int = 10, epochs: int = 0, max_attempts: int = 3) -> Ledger:
    return Ledger(PromptOrder(seed=1, size=size, epochs=epochs), max_attempts)


def grant(ledger: Ledger, worker: str = "w", now: float = 0.0) -> Granted:
    event = ledger.grant(worker, "1", 0, now)
    assert event is not None
    return event


def train(ledger: Ledger, version: int, tickets: list[str], now: float = 1.0) -> Trained | None:
    """Claim and train, as the trainer does."""
    assert ledger.claim(version, tickets, now)[1] == []
    return ledger.trained(version, version, tickets, now)


def test_epochs_are_seeded_permutations() -> None:
    order = PromptOrder(seed=3, size=50, epochs=2)
    seen = [order.at(position) for position in range(100)]
    assert sorted(seen[:50]) == sorted(seen[50:]) == list(range(50))
    assert seen[:50] != seen[50:] and seen[:50] == permutation(3, 0, 50).tolist()
    assert order.at(100) is None
    assert order.at(7) == seen[7], "going back gives the same"
    assert permutation(4, 0, 50).tolist() != seen[:50]


def test_empty_dataset_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 prompts"):
        PromptOrder(seed=1, size=0)


def test_sampling_seeds_differ_by_ticket_and_attempt() -> None:
    assert len({sampling_seed(1, ticket, attempt) for ticket in range(20) for attempt in range(3)}) == 60


def test_ticket_ids_sort_in_grant_order() -> None:
    ledger = make(size=200)
    ids = [grant(ledger).ticket_id for _ in range(120)]
    assert ids == sorted(ids)


def test_exhausted_only_when_nothing_waits() -> None:
    ledger = make(size=2, epochs=1)
    ticket, _ = grant(ledger), grant(ledger)
    assert ledger.exhausted and ledger.grant("w", "1", 0, 0.0) is None
    ledger.finish(ticket.ticket_id, 0, "failed", "", 1.0)
    assert not ledger.exhausted
    assert grant(ledger).attempt == 1


def test_roll_back_of_older_incarnation_is_refused() -> None:
    ledger = make()
    ledger.roll_back(-1, -1, "2", "", 0.0)
    for incarnation in ("2", "1"):
        with pytest.raises(LedgerError, match="cannot follow"):
            ledger.apply(RolledBack(-1, -1, incarnation, "", 1.0))


def test_resumed_trial_cannot_roll_back_beyond_its_start() -> None:
    ledger = make()
    resume(ledger)
    with pytest.raises(ValueError, match="version 2: this trial began at 3"):
        ledger.roll_back(2, 2, "1", "", 0.0)
    ledger.roll_back(3, 3, "1", "/c", 0.0)
    assert ledger.counted == 12


def test_drop_reasons_do_not_grow_without_bound() -> None:
    ledger = make(size=1000)
    for number in range(200):
        ledger.finish(grant(ledger).ticket_id, 0, "rejected", f"reason {number}", 1.0)
    assert len(ledger.counts.dropped_by_reason) <= 65 and ledger.counts.dropped == 200
    assert sum(ledger.counts.dropped_by_reason.values()) == 200


@pytest.mark.parametrize(
    "event",
    [
        Granted("0000000005", 0, 1, 0, "w", "1", 0, 0.0),
        Granted("0000000000", 1, 1, 0, "w", "1", 0, 0.0),
        Finished("0000000003", 0, "accepted", "", False, 0.0),
        Dropped("0000000003", "filtered", 0.0),
        Trained(1, 1, ["0000000003"], 0.0),
        Trained(1, 1, ["0000000000"], 0.0),  # not claimed
        Claimed(1, ["0000000003"], 0.0),
        Reissued("0000000003", 0, "lease lapsed", 0.0),
        Reissued("0000000000", 4, "lease lapsed", 0.0),
        Finished("0000000000", 1, "accepted", "", False, 0.0),
        Granted("0000000001", 0, 1, 5, "w", "1", 0, 0.0),  # not the next position
        Granted("0000000001", 0, 1, -1, "w", "1", 0, 0.0),  # no prompt was given back
    ],
)
def test_event_that_cannot_follow_is_refused(event: Granted) -> None:
    ledger = make()
    grant(ledger)
    with pytest.raises(
        LedgerError, match=event.tickets[0] if isinstance(event, Trained | Claimed) else event.ticket_id
    ):
        ledger.apply(event)


def test_data_position_lists_granted_untrained_prompts() -> None:
    """Order of seed 1; one trained, one bad, one finished, one failed (waiting), one too old (waiting), one running."""
    ledger = make(size=10)
    prompts = permutation(1, 0, 10).tolist()
    ids = [grant(ledger).ticket_id for _ in range(6)]
    train(ledger, 1, [ids[0]])
    ledger.finish(ids[1], 0, "rejected", "too easy", 1.0)
    ledger.finish(ids[2], 0, "accepted", "", 1.0)
    ledger.finish(ids[3], 0, "failed", "x", 1.0)
    ledger.finish(ids[4], 0, "accepted", "", 1.0)
    ledger.reissue_stale([(ids[4], 0)], 1.0)
    position = ledger.position()
    # Open tickets in grant order; neither the trained nor the rejected one.
    assert position.pending == [prompts[2], prompts[3], prompts[4], prompts[5]]
    assert (position.cursor, position.prompts, position.seed) == (6, 10, 1)


def resume(ledger: Ledger, **changes: object) -> None:
    event = {"checkpoint": "/c", "step": 3, "groups": 12, "cursor": 14, "pending": [8, 2], "time": 0.0} | changes
    ledger.apply(Resumed(**event))  # type: ignore[arg-type]


def test_pending_prompts_are_granted_after_last_epoch() -> None:
    ledger = make(size=10, epochs=1)
    resume(ledger, cursor=10, pending=[4])
    assert not ledger.exhausted and grant(ledger).prompt_index == 4
    assert ledger.exhausted


def test_resuming_comes_before_everything_else() -> None:
    ledger = make()
    grant(ledger)
    with pytest.raises(LedgerError, match="only be resumed by a new trial, before its first ticket"):
        resume(ledger)
    ledger = make()
    resume(ledger)
    with pytest.raises(LedgerError, match="before its first ticket"):
        resume(ledger)


def test_a_resumed_trial_is_itself_resumed() -> None:
    """Pending prompts that were not issued again by the next checkpoint are still pending."""
    ledger = make(size=10)
    resume(ledger)
    first = grant(ledger)
    grant(ledger)
    train(ledger, 4, [first.ticket_id])
    assert ledger.position().pending == [2] and ledger.position().cursor == 14
