"""The replay buffer: each ticket trained at most once, nothing lost, nothing too stale."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from realsys.algorithm.sequence_buffer import SequenceBuffer, owners_of
from realsys.types import SampleMeta


def sample(ticket, k, *, versions=(0, 0), attempt=0, owner=0):
    return row(ticket, k, 0, 2, versions=versions, attempt=attempt, owner=owner)


def row(ticket, episode, number, of, *, versions=(0, 0), attempt=0, owner=0):
    """Row ``number`` of an episode; the group has ``of`` rows."""
    low, high = versions
    sample_id = f"{ticket}.{attempt}/{episode}.{number}"
    place = {"episode": episode, "row": number, "group_rows": of}
    meta = SampleMeta(sample_id, ticket, attempt, 10, 4, 5.0, False, low, high, owner, **place)  # type: ignore[arg-type]
    meta.version_tokens = [(low, 2), (high, 2)] if low < high else []
    return meta


def group(ticket, size=2, *, version=0, attempt=0, owner=0):
    versions = (version, version)
    return [row(ticket, k, 0, size, versions=versions, attempt=attempt, owner=owner) for k in range(size)]


def ids(groups):
    return [members[0].ticket_id for members in groups]


def test_group_is_ready_when_last_completion_arrived():
    buffer = SequenceBuffer()
    buffer.add(group("t1", 3)[:2])
    assert (buffer.ready_groups, buffer.incomplete_groups) == (0, 1)
    buffer.add(group("t1", 3)[2:])
    assert (buffer.ready_groups, buffer.incomplete_groups) == (1, 0)


def test_oldest_ticket_first_whatever_the_order_of_arrival():
    buffer = SequenceBuffer()
    for ticket in ("t0003", "t0001", "t0010", "t0002"):
        buffer.add(group(ticket))
    assert ids(buffer.take(3).groups) == ["t0001", "t0002", "t0003"]
    assert buffer.ready_groups == 1


def test_answers_of_a_group_are_ordered_by_number():
    buffer = SequenceBuffer()
    buffer.add(reversed(group("t1", 12)))
    (members,) = buffer.take(1).groups
    assert [m.sample_id for m in members] == [f"t1.0/{k}.0" for k in range(12)]


def test_group_completes_with_all_rows_of_all_episodes():
    """Episodes may have different numbers of rows, and a group may have fewer episodes than were asked for."""
    buffer = SequenceBuffer()
    rows = [row("t1", 0, 0, 4), row("t1", 0, 1, 4), row("t1", 1, 0, 4), row("t1", 0, 2, 4)]
    buffer.add(rows[:3])
    assert (buffer.ready_groups, buffer.incomplete_groups) == (0, 1)
    buffer.add(rows[3:])
    (members,) = buffer.take(1).groups
    assert [(m.episode, m.row) for m in members] == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_too_few_groups_leave_buffer_unchanged():
    buffer = SequenceBuffer()
    buffer.add(group("t1"))
    assert buffer.take(2).groups == []
    assert buffer.ready_groups == 1


def test_masking_leaves_only_tokens_within_bound():
    buffer = SequenceBuffer()
    buffer.add([sample("t1", 0, versions=(2, 7)), sample("t1", 1, versions=(2, 2))])
    batch = buffer.take(1, oldest=3)
    [[row]] = batch.groups
    assert (row.loss_tokens, row.version_min, row.episode_tokens, row.sampled_tokens) == (2, 7, 2, 4)
    assert [s.sample_id for s in batch.masked] == ["t1.0/0.0"] and [s.sample_id for s in batch.unused] == ["t1.0/1.0"]


def test_group_without_remaining_token_is_dropped():
    """Even if the batch does not fill: otherwise their quota is never refunded, and the batch never fills."""
    buffer = SequenceBuffer()
    buffer.add(group("t1", version=0))
    buffer.add(group("t2", version=5))
    batch = buffer.take(2, oldest=1)
    assert (batch.groups, batch.dropped, buffer.ready_groups) == ([], [("t1", "masked")], 1)
    assert [s.sample_id for s in batch.clear] == ["t1.0/0.0", "t1.0/1.0"]


def test_without_bound_every_group_is_trained():
    buffer = SequenceBuffer()
    buffer.add([*group("t1", version=0), *group("t2", version=5)])
    batch = buffer.take(2)
    assert (ids(batch.groups), batch.dropped, batch.masked) == (["t1", "t2"], [], [])


def test_released_group_has_all_its_tokens_again():
    buffer = SequenceBuffer()
    buffer.add([sample("t1", 0, versions=(2, 7)), sample("t1", 1, versions=(2, 2))])
    buffer.take(1, oldest=3)
    buffer.release([])
    assert [row.loss_tokens for row in buffer.take(1).groups[0]] == [4, 4]


def test_too_old_group_leaves_until_later_attempt():
    buffer = SequenceBuffer(too_old=lambda group: "stale" if group[0].version_min < 3 else "")
    added = buffer.add(group("t1", version=2, attempt=1))
    assert (added.stale, added.dropped, len(added.clear), buffer.ready_groups) == ([("t1", 1)], [], 2, 0)
    assert buffer.add(group("t1", version=3, attempt=0)).accepted == 0, "a copy of an earlier attempt"
    assert buffer.add(group("t1", version=3, attempt=2)).accepted == 2
    assert ids(buffer.take(1).groups) == ["t1"]


@pytest.mark.parametrize("attempt", [0, 1])
def test_copy_or_earlier_attempt_is_rejected(attempt):
    """The buffer has the group ready. The rejected copy is cleared on the worker that stores it."""
    buffer = SequenceBuffer()
    buffer.add(group("t1", owner=0, attempt=1))
    result = buffer.add(group("t1", owner=1, attempt=attempt))
    assert (result.accepted, result.rejected, buffer.rejected) == (0, 2, 2)
    assert [(s.sample_id, s.owner) for s in result.clear] == [(f"t1.{attempt}/0.0", 1), (f"t1.{attempt}/1.0", 1)]


def test_copy_beside_its_original_is_not_cleared():
    """Both have the same sample id on that worker: clearing the copy would take the original's tensors."""
    buffer = SequenceBuffer()
    buffer.add(group("t1", owner=0))
    result = buffer.add(group("t1", owner=0))
    assert (result.rejected, result.clear) == (2, [])


@pytest.mark.parametrize("owner", [0, 1])
def test_later_attempt_replaces_ready_one_before_training(owner):
    """The ledger goes by the later one, and it is the fresher: the earlier one here is too stale to be trained."""
    buffer = SequenceBuffer()
    buffer.add(group("t1", owner=0))
    result = buffer.add(group("t1", owner=owner, attempt=1, version=5))
    assert (result.accepted, result.rejected) == (2, 2)
    assert [(s.sample_id, s.owner) for s in result.clear] == [("t1.0/0.0", 0), ("t1.0/1.0", 0)]
    assert buffer.held() == {"t1": 1}
    [members] = buffer.take(1).groups
    assert {(m.attempt, m.owner) for m in members} == {(1, owner)}
    late = buffer.add(group("t1", attempt=2, version=6))
    assert (late.accepted, late.clear, buffer.held()) == (0, [], {})
    assert [s.sample_id for s in buffer.take(1).clear] == ["t1.2/0.0", "t1.2/1.0"], "the batch is trained"


def test_partial_later_attempt_does_not_delay_complete_one():
    """The incomplete later attempt leaves nothing behind."""
    buffer = SequenceBuffer()
    buffer.add([*group("t1"), *group("t2", version=9)])
    for ticket in ("t1", "t2"):
        buffer.add(group(ticket, attempt=1)[:1])
    assert buffer.held() == {"t1": 0, "t2": 0}
    batch = buffer.take(1, oldest=9)
    assert (batch.dropped, ids(batch.groups)) == ([("t1", "masked")], ["t2"])
    assert [s.sample_id for s in batch.clear] == ["t1.0/0.0", "t1.0/1.0", "t1.1/0.0"]
    assert [s.sample_id for s in buffer.take(1).clear] == ["t2.1/0.0"]
    assert buffer.incomplete_groups == 0


@pytest.mark.parametrize("owner", [0, 1])
def test_copy_of_training_group_is_cleared_after_step(owner):
    """Also on another worker: the plan may have moved the original there."""
    buffer = SequenceBuffer()
    buffer.add(group("t1", owner=0))
    assert ids(buffer.take(1).groups) == ["t1"]
    result = buffer.add(group("t1", owner=owner))
    assert (result.rejected, result.clear) == (2, [])
    after = buffer.take(1)
    assert after.groups == []
    assert [(s.sample_id, s.owner) for s in after.clear] == [("t1.0/0.0", owner), ("t1.0/1.0", owner)]
    assert buffer.take(1).clear == [], "once"


def test_untrained_batch_is_ready_again_without_ended_tickets():
    """A copy that came meanwhile goes, where it is not the original itself."""
    buffer = SequenceBuffer()
    for ticket in ("t1", "t2", "t3"):
        buffer.add(group(ticket))
    assert ids(buffer.take(3).groups) == ["t1", "t2", "t3"]
    for copy in (group("t1", owner=1), group("t2"), group("t3", attempt=1)):
        buffer.add(copy)
    cleared = [(s.sample_id, s.owner) for s in buffer.release(["t1"]).clear]
    assert cleared == [(f"t1.0/{k}.0", owner) for owner in (0, 1) for k in (0, 1)] + [("t3.1/0.0", 0), ("t3.1/1.0", 0)]
    assert buffer.held() == {"t2": 0, "t3": 0}
    assert buffer.add(group("t1", attempt=5)).accepted == 0, "it has ended"
    again = buffer.take(2)
    assert (ids(again.groups), again.clear) == (["t2", "t3"], [])


def test_trained_ticket_never_comes_back():
    buffer = SequenceBuffer()
    buffer.add(group("t1", 1))
    buffer.take(1)
    buffer.take(1)
    result = buffer.add(group("t1", 1, attempt=1))
    assert (result.accepted, [s.sample_id for s in result.clear]) == (0, ["t1.1/0.0"])


def test_dropped_ticket_never_comes_back():
    """Its place is taken by another ticket: N would be exceeded."""
    buffer = SequenceBuffer()
    buffer.add(group("t1", 1, version=0))
    assert buffer.take(1, oldest=9).dropped == [("t1", "masked")]
    result = buffer.add(group("t1", 1, version=9, attempt=1))
    assert (result.accepted, [s.sample_id for s in result.clear]) == (0, ["t1.1/0.0"])


def test_later_attempt_replaces_an_incomplete_one_whole():
    """Answers of two attempts never mix: they may come from different prompts' seeds and policies."""
    buffer = SequenceBuffer()
    buffer.add([sample("t1", 0, attempt=0, owner=0)])
    result = buffer.add([sample("t1", 1, attempt=1, owner=1)])
    assert [(s.sample_id, s.owner) for s in result.clear] == [("t1.0/0.0", 0)]
    assert buffer.ready_groups == 0
    assert buffer.add([sample("t1", 0, attempt=0, owner=0)]).accepted == 0
    buffer.add([sample("t1", 0, attempt=1, owner=1)])
    (members,) = buffer.take(1).groups
    assert {m.attempt for m in members} == {1}


def test_memory_of_finished_tickets_is_bounded():
    buffer = SequenceBuffer(remember=3)
    for number in range(50):
        buffer.add(group(f"t{number:03d}", 1))
        assert len(buffer.take(1).groups) == 1
    assert len(buffer._ended) == 3
    assert buffer.add(group("t048", 1)).accepted == 0


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="remember=0"):
        SequenceBuffer(remember=0)


def test_owners_are_where_the_stream_brought_the_samples():
    assert owners_of([group("t1", owner=4)]) == {"t1.0/0.0": {4}, "t1.0/1.0": {4}}


GROUP_SIZE, ETA, BATCH = 2, 2, 2


class BufferMachine(RuleBasedStateMachine):
    """Copies, attempts, owners and versions at random; the truth is kept in plain sets beside the buffer."""

    def __init__(self):
        super().__init__()
        self.buffer = SequenceBuffer()
        self.version = 0
        self.accepted: dict[str, list[SampleMeta]] = {}  # complete groups, neither trained nor dropped
        self.trained: list[str] = []
        self.dropped: list[str] = []
        self.in_training: set[str] = set()  # sample ids

    def is_needed(self, sample):
        """Whether clearing it on its owner may take tensors that will be or are being trained."""
        held = {(s.sample_id, s.owner) for members in self.accepted.values() for s in members}
        return (sample.sample_id, sample.owner) in held or sample.sample_id in self.in_training

    @rule(number=st.integers(0, 12), attempt=st.integers(0, 2), owner=st.integers(0, 1), lag=st.integers(0, 3))
    def deliver(self, number, attempt, owner, lag):
        ticket = f"t{number:03d}"
        members = group(ticket, GROUP_SIZE, version=max(0, self.version - lag), attempt=attempt, owner=owner)
        before = self.accepted.get(ticket)
        ended = ticket in self.trained or ticket in self.dropped
        fresh = not ended and (before is None or attempt > before[0].attempt)
        result = self.buffer.add(members)
        assert result.accepted == (GROUP_SIZE if fresh else 0)
        assert result.accepted + result.rejected == GROUP_SIZE * (1 + (fresh and before is not None))
        if fresh:
            self.accepted[ticket] = members
            assert before is None or all(s in result.clear for s in before)
        assert not any(self.is_needed(s) for s in result.clear)

    @rule(masks=st.booleans())
    def take(self, masks):
        oldest = self.version - ETA if masks else None
        batch = self.buffer.take(BATCH, oldest)
        self.in_training.clear()
        for ticket, reason in batch.dropped:
            assert reason == "masked" and masks
            members = self.accepted.pop(ticket)
            assert max(s.version_max for s in members) < self.version - ETA
            self.dropped.append(ticket)
        candidates = sorted(self.accepted)
        assert ids(batch.groups) == (candidates[:BATCH] if len(candidates) >= BATCH else [])
        for members in batch.groups:
            assert members == self.accepted.pop(members[0].ticket_id)
            assert members[0].ticket_id not in self.trained
            assert not masks or all(self.version - s.version_min <= ETA for s in members)
            self.trained.append(members[0].ticket_id)
            self.in_training |= {s.sample_id for s in members}
        assert not any(self.is_needed(s) for s in batch.clear)
        if batch.groups:
            self.version += 1

    @invariant()
    def nothing_vanishes(self):
        assert self.buffer.ready_groups == len(self.accepted)
        assert all(ticket in self.buffer for ticket in self.accepted)


TestBufferMachine = BufferMachine.TestCase
TestBufferMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
