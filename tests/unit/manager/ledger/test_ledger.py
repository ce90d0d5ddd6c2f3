"""The rollout ledger and the order of prompts."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.cluster.journal import encode_record
from realsys.errors import LedgerError
from realsys.manager.audit import Auditor
from realsys.manager.ledger.events import (
    MOST_SUBMITTED,
    Claimed,
    Dropped,
    Finished,
    Granted,
    Opened,
    Reissued,
    Resumed,
    RolledBack,
    Submitted,
    TicketEvent,
    Trained,
)
from realsys.manager.ledger.journal import decode_record
from realsys.manager.ledger.ledger import Ledger
from realsys.manager.ledger.prompt_order import UNSEEN, Curriculum, PromptOrder, permutation
from realsys.manager.ledger.staleness import StalenessBound
from realsys.manager.ledger.ticket_history import PromptRates
from realsys.manager.messages import BadCall
from realsys.types import sampling_seed


def make(*, size=10, epochs=0, max_attempts=3):
    return Ledger(PromptOrder(seed=1, size=size, epochs=epochs), max_attempts)


def grant(ledger, worker="w", now=0.0):
    event = ledger.grant(worker, "1", 0, now)
    assert event is not None
    return event


def train(ledger, version, tickets, now=1.0):
    """Claim and train, as the trainer does."""
    assert ledger.claim(version, tickets, now)[1] == []
    return ledger.trained(version, version, tickets, now)


def test_epochs_are_seeded_permutations():
    order = PromptOrder(seed=3, size=50, epochs=2)
    seen = [order.at(position) for position in range(100)]
    assert sorted(seen[:50]) == sorted(seen[50:]) == list(range(50))
    assert seen[:50] != seen[50:] and seen[:50] == permutation(3, 0, 50).tolist()
    assert order.at(100) is None
    assert order.at(7) == seen[7], "going back gives the same"
    assert permutation(4, 0, 50).tolist() != seen[:50]


def test_empty_dataset_is_an_error():
    with pytest.raises(ValueError, match="0 prompts"):
        PromptOrder(seed=1, size=0)


def test_sampling_seeds_differ_by_ticket_and_attempt():
    assert len({sampling_seed(1, ticket, attempt) for ticket in range(20) for attempt in range(3)}) == 60


def test_ticket_ids_sort_in_grant_order():
    ledger = make(size=200)
    ids = [grant(ledger).ticket_id for _ in range(120)]
    assert ids == sorted(ids)


def test_exhausted_only_when_nothing_waits():
    ledger = make(size=2, epochs=1)
    ticket, _ = grant(ledger), grant(ledger)
    assert ledger.exhausted and ledger.grant("w", "1", 0, 0.0) is None
    ledger.finish(ticket.ticket_id, 0, "failed", "", 1.0)
    assert not ledger.exhausted
    assert grant(ledger).attempt == 1


def test_roll_back_of_older_incarnation_is_refused():
    ledger = make()
    ledger.roll_back(-1, -1, "2", "", 0.0)
    for incarnation in ("2", "1"):
        with pytest.raises(LedgerError, match="cannot follow"):
            ledger.apply(RolledBack(-1, -1, incarnation, "", 1.0))


def test_resumed_trial_cannot_roll_back_beyond_its_start():
    ledger = make()
    resume(ledger)
    with pytest.raises(ValueError, match="version 2: this trial began at 3"):
        ledger.roll_back(2, 2, "1", "", 0.0)
    ledger.roll_back(3, 3, "1", "/c", 0.0)
    assert ledger.counted == 12


def test_drop_reasons_do_not_grow_without_bound():
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
def test_event_that_cannot_follow_is_refused(event):
    ledger = make()
    grant(ledger)
    with pytest.raises(
        LedgerError, match=event.tickets[0] if isinstance(event, Trained | Claimed) else event.ticket_id
    ):
        ledger.apply(event)


def test_data_position_lists_granted_untrained_prompts():
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


def resume(ledger, **changes):
    event = {"checkpoint": "/c", "step": 3, "groups": 12, "cursor": 14, "pending": [8, 2], "time": 0.0} | changes
    ledger.apply(Resumed(**event))  # type: ignore[arg-type]


def test_pending_prompts_are_granted_after_last_epoch():
    ledger = make(size=10, epochs=1)
    resume(ledger, cursor=10, pending=[4])
    assert not ledger.exhausted and grant(ledger).prompt_index == 4
    assert ledger.exhausted


def test_resuming_comes_before_everything_else():
    ledger = make()
    grant(ledger)
    with pytest.raises(LedgerError, match="only be resumed by a new trial, before its first ticket"):
        resume(ledger)
    ledger = make()
    resume(ledger)
    with pytest.raises(LedgerError, match="before its first ticket"):
        resume(ledger)


def test_a_resumed_trial_is_itself_resumed():
    """Pending prompts that were not issued again by the next checkpoint are still pending."""
    ledger = make(size=10)
    resume(ledger)
    first = grant(ledger)
    grant(ledger)
    train(ledger, 4, [first.ticket_id])
    assert ledger.position().pending == [2] and ledger.position().cursor == 14


# ---- The admission inequality


bounds = st.builds(StalenessBound, st.integers(1, 600), st.integers(0, 20))
versions = st.integers(0, 10_000)


@given(bounds, versions)
def test_capacity_is_the_largest_n_that_is_admitted(bound, version):
    capacity = bound.capacity(version)
    assert bound.admits(capacity, version)
    assert not bound.admits(capacity + 1, version)
    assert capacity == bound.batch_groups * (version + bound.eta + 1)


@given(bounds, versions, st.integers(1, 10_000_000))
def test_admits_is_the_papers_inequality(bound, version, n):
    assert bound.admits(n, version) == ((n - 1) // bound.batch_groups <= version + bound.eta)
    assert bound.admits(n, version) == (n <= bound.capacity(version))
    assert bound.headroom(n, version) == max(0, bound.capacity(version) - n)


@given(bounds, versions)
def test_one_version_makes_room_for_one_batch(bound, version):
    assert bound.capacity(version + 1) - bound.capacity(version) == bound.batch_groups


def test_eta_zero_is_synchronous():
    bound = StalenessBound(batch_groups=4, eta=0)
    assert [bound.capacity(version) for version in range(3)] == [4, 8, 12]
    assert bound.may_serve(3, 3) and not bound.may_serve(2, 3)


@given(bounds, versions, versions)
def test_weights_from_the_future_never_serve(bound, served, version):
    assert bound.may_serve(served, version) == (version - bound.eta <= served <= version)


@pytest.mark.parametrize(("batch", "eta"), [(0, 1), (-1, 0), (1, -1)])
def test_senseless_bounds_are_refused(batch, eta):
    with pytest.raises(ValueError, match="batch_groups"):
        StalenessBound(batch, eta)


# ---- Choice of prompts by their success rate: what is passed over, and that nothing is lost by it


MIDDLE = Curriculum(200, 800, 0.25)
SIZE = 8


class Trial:
    """A ledger of SIZE prompts with its journal. ``play`` grants a ticket and finishes it."""

    def __init__(self, curriculum=MIDDLE, *, size=SIZE, epochs=0):
        self.curriculum, self.order = curriculum, PromptOrder(1, size, epochs)
        self.ledger = self.fresh()
        self.journal: list[TicketEvent] = []
        bounds = (curriculum.low, curriculum.high, curriculum.floor) if curriculum else None
        self.keep(self.ledger.bind(Opened(size, 1, 1000, 4, "train", 4, 0.0, curriculum=bounds)))

    def fresh(self):
        return Ledger(self.order, 3, self.curriculum)

    def keep(self, event):
        if event is not None:
            self.journal.append(event)

    def grant(self):
        exhausted = self.ledger.exhausted
        granted = self.ledger.grant("w", "1", 0, 0.0)
        assert exhausted == (granted is None)
        self.keep(granted)
        return granted

    def play(self, correct, outcome="accepted"):
        granted = self.grant()
        if granted is None:
            return None
        verdicts = (correct, 4)
        _, end = self.ledger.finish(granted.ticket_id, granted.attempt, outcome, "x", 1.0, (0, 0), verdicts)  # type: ignore[arg-type]
        self.keep(end)
        return granted.prompt_index


def test_prompts_outside_the_target_come_less_often():
    """Two prompts are always right; each prompt outside is taken with the probability of the floor."""
    trial = Trial()
    counts: Counter[int] = Counter()
    for _ in range(4000):
        granted = trial.grant()
        counts[granted.prompt_index] += 1
        correct = 4 if granted.prompt_index < 2 else 2
        trial.keep(trial.ledger.finish(granted.ticket_id, 0, "accepted", "", 1.0, (0, 0), (correct, 4))[1])
    mean = sum(counts[k] for k in range(2, SIZE)) / (SIZE - 2)
    assert all(0.15 < counts[k] / mean < 0.35 for k in range(2)), counts
    assert trial.ledger.rates.shares() == {"unseen": 0.0, "wrong": 0.0, "between": 0.75, "right": 0.25}


def test_without_curriculum_rates_choose_nothing():
    trial = Trial(None)
    played = [trial.play(4) for _ in range(2 * SIZE)]
    assert played == [trial.order.at(position) for position in range(2 * SIZE)]
    assert trial.ledger.position().rates == []


def test_a_search_never_passes_a_whole_epoch():
    trial = Trial(Curriculum(400, 600, 1e-9))
    for _ in range(SIZE + 5):
        assert trial.play(4) is not None
    assert trial.ledger.cursor <= (SIZE + 5) * SIZE


def test_used_up_epochs_end_the_grants():
    """Though the last positions were passed over. No search passes over the whole second epoch."""
    trial = Trial(Curriculum(400, 600, 1e-9), epochs=2)
    played = [trial.play(4) for _ in range(3 * SIZE)]
    assert None not in played[: SIZE + 1] and played[SIZE + 1 :] == [None] * (2 * SIZE - 1)
    assert trial.ledger.exhausted


def test_rates_follow_the_newest_groups():
    rates = PromptRates([UNSEEN])
    seen = []
    for correct in (2, 4, 4, *[4] * 10, 0):
        rates.observe(0, correct, 4)
        seen.append(rates.of(0))
    assert (seen[:3], seen[-2:]) == ([500, 750, 875], [1000, 500])
    rates.observe(0, 0, 0)
    assert rates.of(0) == 500, "without a verdict nothing is measured"


def test_resumed_trial_keeps_the_rates():
    first = Trial()
    for _ in range(SIZE):
        first.play(4)
    position = first.ledger.position()
    second = Trial()
    second.ledger = second.fresh()
    second.ledger.apply(Resumed("/c", 1, 0, position.cursor, [], 0.0, position.rates))
    second.keep(second.ledger.bind(first.journal[0]))  # type: ignore[arg-type]
    assert second.ledger.rates.values == first.ledger.rates.values
    granted = second.grant()
    assert granted is not None and granted.position == first.ledger._next_position()


def test_gap_without_curriculum_is_damage():
    trial = Trial(None)
    with pytest.raises(LedgerError, match="the next prompt is that of position 0"):
        trial.ledger.apply(Granted("0000000000", 0, 0, 3, "w", "1", 0, 0.0))


def test_audit_finds_a_prompt_wrongly_passed_over():
    trial, auditor = Trial(), Auditor()
    wrong = Granted("0000000000", 0, trial.order.at(1) or 0, 1, "w", "1", 0, 0.0)
    for line, event in enumerate([trial.journal[0], wrong], 1):
        auditor.observe(event, line)
    assert auditor.problems["prompts"] == ["line 2: ticket 0000000000: prompt position 1 was granted before 0"]


PLAYS = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["accepted", "filtered", "failed", "lost"])), max_size=60)


@settings(deadline=None)
@given(PLAYS, st.integers(0, 60), st.sampled_from([0, 2, 3]))
def test_journal_leads_to_the_same_choices(plays, crash, epochs):
    """After a crash at any point, from the journal or from a snapshot; N counts what is not dropped or waiting."""
    trial = Trial(epochs=epochs)
    for number, (correct, outcome) in enumerate(plays):
        if number == crash:
            lines = [encode_record(event) for event in trial.journal]
            snapshot = encode_record(trial.ledger.snapshot(0.0, [], {}))
            replayed, compacted = trial.fresh(), trial.fresh()
            for line in lines:
                replayed.apply(decode_record(line))  # type: ignore[arg-type]
            compacted.apply(decode_record(snapshot))  # type: ignore[arg-type]
            for other in (replayed, compacted):
                assert other.rates.values == trial.ledger.rates.values
                assert other._next_position() == trial.ledger._next_position()
                assert other.counted == trial.ledger.counted
            trial.ledger = compacted
        if outcome == "lost":
            granted = trial.grant()
            if granted is not None:
                lost = trial.ledger.lose(lambda ticket: ticket.state == "running", "worker lost", 1.0)
                assert len(lost) == 1
                trial.journal += lost
        else:
            trial.play(correct, outcome)
    states = trial.ledger.counts.by_state()
    assert trial.ledger.counted == states["finished"] + states["running"]
    assert trial.ledger.counts.filtered().get("x", 0) == trial.ledger.counts.dropped_by_reason["filtered x"]
    auditor = Auditor()
    for line, event in enumerate(trial.journal, 1):
        auditor.observe(event, line)
    assert not any(auditor.problems.values()), auditor.problems


# ---- Prompts that the training script submits


BY_SCRIPT = Opened(10, 1, 1000, 4, "train", 4, 0.0, order="script")


def by_script(*events):
    ledger = make()
    for event in (BY_SCRIPT, *events):
        ledger.apply(event)
    return ledger


def test_submitted_prompts_are_granted_in_their_order():
    """Also numbers beyond the train split, and the same one twice. The seed decides nothing."""
    ledger = by_script()
    assert ledger.exhausted and ledger.grant("w", "1", 0, 0.0) is None
    assert ledger.submit(0, [7, 3], 0.0) == Submitted(0, [7, 3], 0.0)
    ledger.submit(2, [3, 10, 12], 0.0)
    assert [grant(ledger).prompt_index for _ in range(5)] == [7, 3, 3, 10, 12]
    assert ledger.exhausted and ledger.total_submitted == 5 and ledger.epoch == 0


def test_repeated_submission_adds_only_what_is_new():
    ledger = by_script()
    ledger.submit(0, [7, 3, 5], 0.0)
    grant(ledger)
    assert ledger.submit(0, [7, 3, 5], 1.0) is None and ledger.submit(99, [], 1.0) is None
    assert ledger.submit(1, [3, 5, 8], 1.0) == Submitted(3, [8], 1.0)
    assert ledger.submit(0, [1, 3], 1.0) is None, "a granted position is not compared: a snapshot does not have it"
    assert list(ledger.submitted) == [3, 5, 8]


@pytest.mark.parametrize(
    ("start", "prompts", "problem"),
    [
        (4, [1], "those from 3 on are missing"),
        (0, [7, 3, 6], "prompt 6 is submitted at position 2, which has prompt 5"),
        (3, [0] * (MOST_SUBMITTED - 1), "2 submitted prompts are not granted yet"),
    ],
)
def test_submission_that_contradicts_the_ledger_is_refused(start, prompts, problem):
    ledger = by_script(Submitted(0, [7, 3, 5], 0.0))
    grant(ledger)
    before = ledger.snapshot(0.0, [], {})
    with pytest.raises(BadCall, match=problem):
        ledger.submit(start, prompts, 0.0)
    assert ledger.snapshot(0.0, [], {}) == before


def test_seeded_order_takes_no_submission():
    ledger = make()
    ledger.bind(Opened(10, 1, 1000, 4, "train", 4, 0.0))
    with pytest.raises(BadCall, match="data.order=script"):
        ledger.submit(0, [1], 0.0)


@pytest.mark.parametrize(
    "event",
    [
        Submitted(1, [4], 0.0),
        Submitted(3, [4], 0.0),
        Granted("0000000000", 0, 3, 0, "w", "1", 0, 0.0),  # the second one
        Granted("0000000000", 0, 3, 1, "w", "1", 0, 0.0),
        Opened(10, 1, 1000, 4, "train", 4, 1.0),  # its order would be that of the seed
    ],
    ids=str,
)
def test_event_of_another_sequence_is_refused(event):
    ledger = by_script(Submitted(0, [7, 3], 0.0))
    with pytest.raises(LedgerError):
        ledger.apply(event)


def test_another_trial_gets_all_that_is_not_trained():
    """It does not have the sequence of this one: what was submitted and not granted is pending, too."""
    ledger = by_script(Submitted(0, [7, 3, 12, 5], 0.0))
    first, _ = grant(ledger), grant(ledger)
    train(ledger, 1, [first.ticket_id])
    position = ledger.position()
    assert (position.cursor, position.pending, position.order) == (4, [3, 12, 5], "script")
    other = make()
    resume(other, cursor=position.cursor, pending=position.pending)
    other.apply(BY_SCRIPT)
    other.submit(4, [9], 0.0)
    assert [grant(other).prompt_index for _ in range(4)] == [3, 12, 5, 9]


def test_audit_finds_a_prompt_that_was_not_submitted():
    auditor = Auditor()
    wrong = Granted("0000000000", 0, 4, 0, "w", "1", 0, 0.0)
    for line, event in enumerate([BY_SCRIPT, Submitted(0, [7], 0.0), Submitted(5, [7], 0.0), wrong], 1):
        auditor.observe(event, line)
    assert auditor.problems["prompts"] == [
        "line 3: prompts submitted from position 5 on, and the next one is 1",
        "line 4: ticket 0000000000: prompt 4 instead of 7",
    ]


SUBMISSIONS = st.lists(st.one_of(st.lists(st.integers(0, 20), max_size=4), st.just("grant"), st.just("lose")))


@settings(deadline=None)
@given(SUBMISSIONS, st.sets(st.integers(0, 40)))
def test_each_submitted_prompt_is_granted_once_whatever_dies(steps, crashes):
    """After a crash the call is made again, and the ledger comes from its journal or from a snapshot."""
    ledger, journal, sequence, granted = by_script(), [BY_SCRIPT], [], []
    for number, step in enumerate(steps):
        if step == "grant":
            events = [ledger.grant("w", "1", 0, 0.0)]
            granted += [event for event in events if event is not None]
        elif step == "lose":
            events = ledger.lose(lambda ticket: ticket.state == "running", "worker lost", 1.0)
        else:
            sequence += step
            start = len(sequence) - len(step)
            events = [ledger.submit(start, step, 0.0)]
        journal += [event for event in events if event is not None]
        if number in crashes:
            replayed, compacted, auditor = make(), make(), Auditor()
            for line, event in enumerate(journal, 1):
                replayed.apply(decode_record(encode_record(event)))  # type: ignore[arg-type]
                auditor.observe(event, line)
            snapshot = ledger.snapshot(0.0, [], {})
            compacted.apply(decode_record(encode_record(snapshot)))  # type: ignore[arg-type]
            assert replayed.snapshot(0.0, [], {}) == compacted.snapshot(0.0, [], {}) == snapshot
            assert not any(auditor.problems.values()), auditor.problems
            ledger, journal = (compacted, [snapshot]) if number % 2 else (replayed, journal)
            if isinstance(step, list):
                assert ledger.submit(start, step, 0.0) is None
    new = [event.prompt_index for event in granted if event.attempt == 0]
    assert new == sequence[: len(new)] and list(ledger.submitted) == sequence[len(new) :]
