"""Choice of prompts by their success rate: what is passed over, and that nothing is lost by it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.errors import LedgerError
from realsys.manager.audit import Auditor
from realsys.manager.ledger.events import Granted, Opened, Resumed, TicketEvent
from realsys.manager.ledger.journal import decode_record, encode_record
from realsys.manager.ledger.ledger import Ledger
from realsys.manager.ledger.prompt_order import UNSEEN, Curriculum, PromptOrder
from realsys.manager.ledger.ticket_history import PromptRates

MIDDLE = Curriculum(200, 800, 0.25)
SIZE = 8


class Trial:
    """A ledger of SIZE prompts with its journal. ``play`` grants a ticket and finishes it."""

    def __init__(self, curriculum: Curriculum | None = MIDDLE, *, size: int = SIZE, epochs: int = 0) -> None:
        self.curriculum, self.order = curriculum, PromptOrder(1, size, epochs)
        self.ledger = self.fresh()
        self.journal: list[TicketEvent] = []
        bounds = (curriculum.low, curriculum.high, curriculum.floor) if curriculum else None
        self.keep(self.ledger.bind(Opened(size, 1, 1000, 4, "train", 4, 0.0, curriculum=bounds)))

    def fresh(self) -> Ledger:
        return Ledger(self.order, 3, self.curriculum)

    def keep(self, event: TicketEvent | None) -> None:
        if event is not None:
            self.journal.append(event)

    def grant(self) -> Granted | None:
        exhausted = self.ledger.exhausted
        granted = self.ledger.grant("w", "1", 0, 0.0)
        assert exhausted == (granted is None)
        self.keep(granted)
        return granted

    def play(self, correct: int, outcome: str = "accepted") -> int | None:
        granted = self.grant()
        if granted is None:
            return None
        verdicts = (correct, 4)
        _, end = self.ledger.finish(granted.ticket_id, granted.attempt, outcome, "x", 1.0, (0, 0), verdicts)  # type: ignore[arg-type]
        self.keep(end)
        return granted.prompt_index


def test_prompts_outside_the_target_come_less_often() -> None:
    """Two prompts are always right; each prompt outside is taken with the probability of the floor."""
    trial = Trial()
    counts: Counter[int] = Counter()
    for _ in range(4000):
        granted = trial.grant()
        assert granted is not None
        counts[granted.prompt_index] += 1
        correct = 4 if granted.prompt_index < 2 else 2
        trial.keep(trial.ledger.finish(granted.ticket_id, 0, "accepted", "", 1.0, (0, 0), (correct, 4))[1])
    mean = sum(counts[k] for k in range(2, SIZE)) / (SIZE - 2)
    assert all(0.15 < counts[k] / mean < 0.35 for k in range(2)), counts
    assert trial.ledger.rates.shares() == {"unseen": 0.0, "wrong": 0.0, "between": 0.75, "right": 0.25}


def test_without_curriculum_rates_choose_nothing() -> None:
    trial = Trial(None)
    played = [trial.play(4) for _ in range(2 * SIZE)]
    assert played == [trial.order.at(position) for position in range(2 * SIZE)]
    assert trial.ledger.position().rates == []


def test_a_search_never_passes_a_whole_epoch() -> None:
    trial = Trial(Curriculum(400, 600, 1e-9))
    for _ in range(SIZE + 5):
        assert trial.play(4) is not None
    assert trial.ledger.cursor <= (SIZE + 5) * SIZE


def test_used_up_epochs_end_the_grants() -> None:
    """Though the last positions were passed over. No search passes over the whole second epoch."""
    trial = Trial(Curriculum(400, 600, 1e-9), epochs=2)
    played = [trial.play(4) for _ in range(3 * SIZE)]
    assert None not in played[: SIZE + 1] and played[SIZE + 1 :] == [None] * (2 * SIZE - 1)
    assert trial.ledger.exhausted


def test_rates_follow_the_newest_groups() -> None:
    rates = PromptRates([UNSEEN])
    seen = []
    for correct in (2, 4, 4, *[4] * 10, 0):
        rates.observe(0, correct, 4)
        seen.append(rates.of(0))
    assert (seen[:3], seen[-2:]) == ([500, 750, 875], [1000, 500])
    rates.observe(0, 0, 0)
    assert rates.of(0) == 500, "without a verdict nothing is measured"


def test_resumed_trial_keeps_the_rates() -> None:
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


def test_gap_without_curriculum_is_damage() -> None:
    trial = Trial(None)
    with pytest.raises(LedgerError, match="the next prompt is that of position 0"):
        trial.ledger.apply(Granted("0000000000", 0, 0, 3, "w", "1", 0, 0.0))


def test_audit_finds_a_prompt_wrongly_passed_over() -> None:
    trial, auditor = Trial(), Auditor()
    wrong = Granted("0000000000", 0, trial.order.at(1) or 0, 1, "w", "1", 0, 0.0)
    for line, event in enumerate([trial.journal[0], wrong], 1):
        auditor.observe(event, line)
    assert auditor.problems["prompts"] == ["line 2: ticket 0000000000: prompt position 1 was granted before 0"]


PLAYS = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["accepted", "filtered", "failed", "lost"])), max_size=60)


@settings(deadline=None)
@given(PLAYS, st.integers(0, 60), st.sampled_from([0, 2, 3]))
def test_journal_leads_to_the_same_choices(plays: list[tuple[int, str]], crash: int, epochs: int) -> None:
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
