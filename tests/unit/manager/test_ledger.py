"""The rollout ledger and the order of prompts."""

from __future__ import annotations

import pytest

from realsys.errors import LedgerError
from realsys.manager.ledger.events import Claimed, Dropped, Finished, Granted, Reissued, Resumed, RolledBack, Trained
from realsys.manager.ledger.ledger import Ledger
from realsys.manager.ledger.order import PromptOrder, permutation, sampling_seed


def make(*, size: int = 10, epochs: int = 0, max_attempts: int = 3) -> Ledger:
    return Ledger(PromptOrder(seed=1, size=size, epochs=epochs), max_attempts)


def grant(ledger: Ledger, worker: str = "w", now: float = 0.0) -> Granted:
    event = ledger.grant(worker, "1", 0, now)
    assert event is not None
    return event


def train(ledger: Ledger, version: int, tickets: list[str], now: float = 1.0) -> Trained | None:
    """As the trainer does: claimed, then trained."""
    assert ledger.claim(version, tickets, now)[1] == []
    return ledger.trained(version, version, tickets, now)


def test_epochs_are_permutations_and_repeat_for_the_same_seed() -> None:
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


def test_finished_but_untrained_groups_count() -> None:
    ledger = make()
    first, second = grant(ledger), grant(ledger)
    assert ledger.finish(first.ticket_id, 0, "accepted", "", 1.0).known
    assert ledger.counted == 2
    train(ledger, 1, [first.ticket_id])
    assert ledger.counted == 2 and ledger.counts.by_state() == {
        "running": 1, "finished": 0, "waiting": 0, "claimed": 0, "trained": 1, "dropped": 0
    }  # fmt: skip
    ledger.finish(second.ticket_id, 0, "rejected", "success rate: 1.0", 3.0)
    assert ledger.counted == 1 and ledger.counts.dropped_by_reason == {"rejected success rate": 1}


def test_failed_attempts_are_retried_first_and_then_dropped_with_their_reason() -> None:
    ledger = make(max_attempts=3)
    first, second = grant(ledger), grant(ledger)
    counted = ledger.counted
    for attempt in range(2):
        finish = ledger.finish(first.ticket_id, attempt, "failed", "RewardError: timeout", 1.0)
        assert finish.known and finish.retry and ledger.counted == counted - 1
        again = grant(ledger)
        assert (again.ticket_id, again.attempt, again.prompt_index) == (
            first.ticket_id,
            attempt + 1,
            first.prompt_index,
        )
    last = ledger.finish(first.ticket_id, 2, "failed", "RewardError: timeout", 1.0)
    assert last.known and not last.retry
    assert ledger.counted == counted - 1, "the quota is given back once"
    assert ledger.ended(first.ticket_id) == "dropped: failed RewardError"
    assert grant(ledger).ticket_id not in (first.ticket_id, second.ticket_id)


def test_losses_do_not_use_up_the_attempts_of_a_prompt() -> None:
    ledger = make(max_attempts=2)
    ticket = grant(ledger)
    for _ in range(5):
        assert len(ledger.lose(lambda _: True, "worker lost", 1.0)) == 1
        assert grant(ledger).ticket_id == ticket.ticket_id
    assert ledger.counts.reissued_by_cause == {"worker lost": 5}
    assert ledger.finish(ticket.ticket_id, 5, "failed", "", 2.0).retry


def test_finish_of_unknown_superseded_and_repeated_attempts() -> None:
    ledger = make()
    ticket = grant(ledger)
    assert not ledger.finish("0000000007", 0, "accepted", "", 1.0).known
    assert not ledger.finish("../etc/passwd", 0, "accepted", "", 1.0).known
    assert not ledger.finish(ticket.ticket_id, 1, "accepted", "", 1.0).known
    ledger.lose(lambda _: True, "lease lapsed", 1.0)
    assert not ledger.finish(ticket.ticket_id, 0, "accepted", "", 1.0).known
    again = grant(ledger)
    assert not ledger.finish(ticket.ticket_id, 0, "accepted", "", 1.0).known
    first = ledger.finish(again.ticket_id, 1, "accepted", "", 1.0)
    repeated = ledger.finish(again.ticket_id, 1, "accepted", "", 1.0)
    assert first.event is not None and repeated.known and repeated.event is None
    assert ledger.counted == 1


def test_trained_before_its_finish_arrives() -> None:
    ledger = make()
    ticket = grant(ledger)
    assert train(ledger, 1, [ticket.ticket_id]) is not None
    finish = ledger.finish(ticket.ticket_id, 0, "accepted", "", 2.0)
    assert finish.known and finish.event is None
    assert ledger.ended(ticket.ticket_id) == "trained@1" and ledger.counts.trained == 1


def test_trained_is_idempotent() -> None:
    ledger = make()
    ticket = grant(ledger)
    ledger.claim(1, [ticket.ticket_id], 1.0)
    assert ledger.trained(1, 1, [ticket.ticket_id, ticket.ticket_id], 1.0) is not None
    assert ledger.trained(1, 1, [ticket.ticket_id], 1.0) is None
    assert ledger.ended(ticket.ticket_id) == "trained@1" and ledger.counts.trained == 1
    assert ledger.claim(2, [ticket.ticket_id], 1.0) == (None, [ticket.ticket_id])
    with pytest.raises(ValueError, match="0000000000 trained at version 2, though it is trained@1, not claimed"):
        ledger.trained(2, 2, [ticket.ticket_id], 1.0)


def test_only_what_was_claimed_is_trained_and_a_claim_changes_nothing_when_one_has_ended() -> None:
    ledger = make(max_attempts=1)
    failed, runs, finished = grant(ledger), grant(ledger), grant(ledger)
    ledger.finish(failed.ticket_id, 0, "failed", "lost answer", 1.0)
    ledger.finish(finished.ticket_id, 0, "accepted", "", 1.0)
    ids = [event.ticket_id for event in (failed, runs, finished)]
    for ticket_id, was in zip(ids, ("dropped: failed lost answer", "running", "finished"), strict=True):
        with pytest.raises(ValueError, match=f"{ticket_id} trained at version 1, though it is {was}, not claimed"):
            ledger.trained(1, 1, [ticket_id], 1.0)
    assert ledger.claim(1, ids, 1.0) == (None, [failed.ticket_id]), "its group had reached the trainer all the same"
    assert ledger.counts.open == {"running": 1, "finished": 1, "waiting": 0, "claimed": 0}
    assert ledger.claim(1, ids[1:], 1.0) == (Claimed(1, ids[1:], 1.0), [])
    assert ledger.claim(1, ids[1:], 1.0) == (None, []), "asked again"
    with pytest.raises(ValueError, match="ticket 0000000099 was never granted: the ledger has lost its end"):
        ledger.claim(1, ["0000000099"], 1.0)
    assert ledger.counted == 2 and ledger.trained(1, 1, ids[1:], 1.0) is not None


def test_what_is_claimed_ends_by_its_training_or_a_roll_back_only() -> None:
    ledger = make(max_attempts=1)
    first, second = grant(ledger), grant(ledger)
    ledger.finish(first.ticket_id, 0, "accepted", "", 1.0)
    ids = [first.ticket_id, second.ticket_id]
    ledger.claim(1, ids, 1.0)
    assert not ledger.touch(second.ticket_id, 0, 1.0), "its attempt may end"
    for outcome in ("failed", "rejected", "accepted"):
        finish = ledger.finish(second.ticket_id, 0, outcome, "", 2.0)  # type: ignore[arg-type]
        assert finish.known and finish.event is None
    assert ledger.lose(lambda _: True, "worker lost", 2.0) == ledger.never_arrived((), 9.0, 9.0) == []
    assert ledger.counted == 2 and ledger.grant("w", "1", 0, 3.0).ticket_id not in ids  # type: ignore[union-attr]
    ledger.roll_back(-1, -1, "2", "", 4.0)
    assert ledger.counts.open == {"running": 0, "finished": 0, "waiting": 3, "claimed": 0}


def test_trained_while_waiting_cancels_the_reissue() -> None:
    ledger = make()
    ticket = grant(ledger)
    ledger.lose(lambda _: True, "lease lapsed", 1.0)
    train(ledger, 1, [ticket.ticket_id])
    assert grant(ledger).ticket_id != ticket.ticket_id
    assert ledger.counted == 2


def test_stale_drop_gives_the_prompt_a_fresh_ticket() -> None:
    ledger = make(size=5)
    ticket = grant(ledger)
    ledger.finish(ticket.ticket_id, 0, "accepted", "", 1.0)
    assert ledger.drop(ticket.ticket_id, "stale", 2.0, requeue=True) is not None
    assert ledger.drop(ticket.ticket_id, "stale", 2.0, requeue=True) is None
    assert ledger.counted == 0
    fresh = grant(ledger)
    assert (fresh.ticket_id, fresh.attempt, fresh.prompt_index) == ("0000000001", 0, ticket.prompt_index)
    rest = [grant(ledger).prompt_index for _ in range(4)]
    assert sorted([ticket.prompt_index, *rest]) == list(range(5)), "no prompt of the epoch is lost or doubled"


def test_exhausted_only_when_nothing_waits() -> None:
    ledger = make(size=2, epochs=1)
    ticket, _ = grant(ledger), grant(ledger)
    assert ledger.exhausted and ledger.grant("w", "1", 0, 0.0) is None
    ledger.finish(ticket.ticket_id, 0, "failed", "", 1.0)
    assert not ledger.exhausted
    assert grant(ledger).attempt == 1


def test_roll_back_reissues_what_the_checkpoint_does_not_have() -> None:
    ledger = make()
    tickets = [grant(ledger).ticket_id for _ in range(5)]
    for ticket in tickets[:3]:
        ledger.finish(ticket, 0, "accepted", "", 1.0)
    train(ledger, 1, tickets[:1])
    train(ledger, 2, tickets[1:2])
    ledger.finish(tickets[4], 0, "rejected", "", 1.0)
    assert ledger.roll_back(1, 1, "2", "/c", 3.0) == RolledBack(1, 1, "2", "/c", 3.0)
    assert ledger.reissued == 3 and ledger.counts.reissued_by_cause == {"rolled back": 3}
    assert ledger.counts.by_state() == {
        "running": 0,
        "finished": 0,
        "waiting": 3,
        "claimed": 0,
        "trained": 1,
        "dropped": 1,
    }
    assert [grant(ledger).ticket_id for _ in range(3)] == tickets[1:4]
    assert ledger.counted == 4
    train(ledger, 2, tickets[1:3])
    assert ledger.ended(tickets[1]) == "trained@2", "again, after its first training was undone"


def test_roll_back_to_the_start_takes_everything_back_but_what_was_dropped() -> None:
    ledger = make(max_attempts=1)
    first, second, third = grant(ledger), grant(ledger), grant(ledger)
    train(ledger, 1, [first.ticket_id])
    ledger.finish(second.ticket_id, 0, "failed", "bad", 1.0)
    train(ledger, 2, [third.ticket_id])
    ledger.roll_back(-1, -1, "2", "", 2.0)
    states = {"running": 0, "finished": 0, "waiting": 2, "claimed": 0, "trained": 0, "dropped": 1}
    assert ledger.counts.by_state() == states
    assert ledger.counted == 0 and ledger.newest == -1


def test_training_sides_start_in_the_order_of_their_incarnations() -> None:
    ledger = make()
    ledger.roll_back(-1, -1, "2", "", 0.0)
    for incarnation in ("2", "1"):
        with pytest.raises(LedgerError, match="cannot follow"):
            ledger.apply(RolledBack(-1, -1, incarnation, "", 1.0))


def test_a_trial_that_was_resumed_does_not_go_back_beyond_its_beginning() -> None:
    ledger = make()
    resume(ledger)
    with pytest.raises(ValueError, match="version 2: this trial began at 3"):
        ledger.roll_back(2, 2, "1", "", 0.0)
    ledger.roll_back(3, 3, "1", "/c", 0.0)
    assert ledger.counted == 12


def test_never_arrived_looks_only_at_what_finished_before() -> None:
    ledger = make()
    old, young, held, running = [grant(ledger).ticket_id for _ in range(4)]
    for ticket, when in ((old, 1.0), (held, 1.0), (young, 5.0)):
        ledger.finish(ticket, 0, "accepted", "", when)
    events = ledger.never_arrived({held}, 5.0, 9.0)
    assert events == [Reissued(old, 0, "never arrived", 9.0)]
    assert ledger.counted == 3 and ledger.is_running(running, 0)
    assert ledger.never_arrived({held}, 5.0, 9.0) == []


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
        Dropped("0000000003", "stale", True, 0.0),
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


def test_the_position_names_what_was_granted_and_not_trained() -> None:
    """Order of seed 1; one trained, one bad, one finished, one failed (waiting), one too stale, one running."""
    ledger = make(size=10)
    prompts = permutation(1, 0, 10).tolist()
    ids = [grant(ledger).ticket_id for _ in range(6)]
    train(ledger, 1, [ids[0]])
    ledger.finish(ids[1], 0, "rejected", "too easy", 1.0)
    ledger.finish(ids[2], 0, "accepted", "", 1.0)
    ledger.finish(ids[3], 0, "failed", "x", 1.0)
    ledger.drop(ids[4], "stale", 1.0, requeue=True)
    position = ledger.position()
    # Open tickets in grant order, then the prompt that was given back; neither the trained nor the rejected one.
    assert position.pending == [prompts[2], prompts[3], prompts[5], prompts[4]]
    assert (position.cursor, position.prompts, position.seed) == (6, 10, 1)


def resume(ledger: Ledger, **changes: object) -> None:
    event = {"checkpoint": "/c", "step": 3, "groups": 12, "cursor": 14, "pending": [8, 2], "time": 0.0} | changes
    ledger.apply(Resumed(**event))  # type: ignore[arg-type]


def test_a_resumed_ledger_issues_pending_prompts_first_and_exactly_once() -> None:
    ledger = make(size=10)
    resume(ledger)
    assert ledger.counted == 12 and ledger.epoch == 1
    second = permutation(1, 1, 10).tolist()
    assert [grant(ledger).prompt_index for _ in range(5)] == [8, 2, second[4], second[5], second[6]]
    assert ledger.counted == 17 and ledger.counts.granted == 5
    assert sum(ledger.counts.by_state().values()) == 5, "what was trained before has no ticket here"


def test_pending_prompts_are_issued_when_the_epochs_are_used_up() -> None:
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
