"""The ledger's file: checksums, torn tails, damage, one writer."""

import asyncio
import os
import random
import stat

import msgspec
import pytest

from realsys.cluster import journal as journal_module
from realsys.cluster.journal import Compactor, encode_record, twin_path
from realsys.errors import Fenced, LedgerError
from realsys.manager.decisions import ManagerState
from realsys.manager.ledger.events import (
    EvalAnswered,
    EvalHeld,
    EvalStarted,
    Event,
    Finished,
    Granted,
    Opened,
    Reissued,
    RolledBack,
    Snapshot,
    Trained,
)
from realsys.manager.ledger.journal import Journal, decode_record, read_journal
from realsys.manager.ledger.ledger import Ledger
from realsys.manager.ledger.prompt_order import PromptOrder
from realsys.manager.messages import AllocateRequest, EvaluateRequest, RollBackRequest
from realsys.types import PublishedVersion
from tests.support.ledger.manager_states import SETTINGS, finish, ready, tickets, update, version

EVENTS: list[Event] = [
    Granted("0000000000", 0, 7, 0, "rollout_worker/0", "1", 0, 1.5),
    Finished("0000000000", 0, "failed", 'line\n"quoted" \u00e9', True, 2.0),
    Reissued("0000000000", 0, "lease lapsed", 2.5),
    Trained(1, 1, ["0000000000"], 3.0),
    EvalStarted("before", "eval", 4, 0, 0, 3.5),
    EvalHeld("before", PublishedVersion(0, "1", "/v0", 0), 3.75),
    EvalAnswered("before", 2, False, True, 12, 0, 1),
]


def written(path, events=EVENTS):
    with Journal(path) as journal:
        journal.append(events)
    return path.read_bytes()


def test_replay_gives_back_what_was_appended(tmp_path):
    path = tmp_path / "made" / "ledger.jsonl"
    written(path)
    with Journal(path) as journal:
        assert journal.replay() == EVENTS and journal.records == len(EVENTS)
        journal.append(EVENTS[:1])
    assert [event for event, _ in read_journal(path)] == [*EVENTS, EVENTS[0]]


def test_every_torn_last_record_is_repaired(tmp_path):
    path = tmp_path / "ledger.jsonl"
    content = written(path)
    last = len(encode_record(EVENTS[-1]))
    for cut in range(len(content) - last, len(content)):
        path.write_bytes(content[:cut])
        with Journal(path) as journal:
            assert journal.replay() == EVENTS[:-1], cut
            journal.append(EVENTS[-1:])
        assert path.read_bytes() == content


def test_zeros_after_a_crash_are_a_torn_tail(tmp_path):
    path = tmp_path / "ledger.jsonl"
    content = written(path)
    path.write_bytes(content + b"\0" * 100)
    with Journal(path) as journal:
        assert journal.replay() == EVENTS
    assert path.read_bytes() == content


def test_any_flipped_bit_is_noticed():
    line = encode_record(EVENTS[0])
    for position in range(len(line)):
        damaged = bytearray(line)
        damaged[position] ^= 1
        assert decode_record(bytes(damaged)) in (None, EVENTS[0])  # the checksum's own letter case may change


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b"failed", b"fooled", r"ledger\.jsonl: line 2 is damaged"),
        # the last line is whole: a write that was torn has no end, and cut off it would be lost without a word
        (b'"length":12', b'"length":13', "line 7 was changed, or records before it are missing"),
    ],
)
def test_changed_record_names_its_line(tmp_path, old, new, problem):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(written(path).replace(old, new, 1))
    with pytest.raises(LedgerError, match=problem):
        Journal(path)


@pytest.mark.parametrize("written_bytes", [0, 20])
def test_no_record_follows_a_failed_write(tmp_path, monkeypatch, written_bytes):
    """The disk has room again before the process has ended: what comes now must not follow a hole or half a line."""
    path, write = tmp_path / "ledger.jsonl", os.write

    def full(fd, data):
        if not written_bytes:
            raise OSError(28, "No space left on device")
        return write(fd, data[:written_bytes])

    with Journal(path) as journal:
        journal.append(EVENTS[:1])
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(LedgerError, match=r"cannot write|disk full"):
                journal.append(EVENTS[1:2])
        with pytest.raises(LedgerError, match=r"cannot write|disk full"):
            journal.append(EVENTS[2:])
    with Journal(path) as journal:
        assert journal.replay() == EVENTS[:1]


def test_numbers_that_no_ledger_can_hold_are_damage():
    for event in (
        Trained(1 << 31, 1, ["0000000000"], 3.0),
        Trained(1, 1, ["0000000000"], 3.0, [1 << 40]),
        Granted("0000000000", -1, 7, 0, "w", "1", 0, 1.5),
        Granted("0000000000", 0, 1 << 63, 0, "w", "1", 0, 1.5),
        RolledBack(-2, 0, "1", "", 0.0),
    ):
        assert decode_record(encode_record(event)) is None, event


def test_second_writer_is_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with Journal(path) as first:
        with pytest.raises(LedgerError, match="another gserver_manager"):
            Journal(path)
        first.append(EVENTS)
    assert len(list(read_journal(path))) == len(EVENTS)


def test_no_descriptor_stays_open(tmp_path):
    path = tmp_path / "ledger.jsonl"
    before = len(os.listdir("/proc/self/fd"))
    written(path)
    path.write_bytes(b"damaged\n" + encode_record(EVENTS[0]))
    with pytest.raises(LedgerError):
        Journal(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_append_after_close_says_what_is_wrong(tmp_path):
    journal = Journal(tmp_path / "ledger.jsonl")
    journal.close()
    with pytest.raises(LedgerError, match="cannot write"):
        journal.append(EVENTS)


# ---- Compaction of the ledger's file: same state, one writer, nothing that was promised is lost, whatever goes wrong


def history(seed, length=300):
    """A random life of a ledger, event by event. With an odd seed a script submits the prompts."""
    rng, ledger, events = random.Random(seed), Ledger(PromptOrder(seed, 40), 2), []
    order = "script" if seed % 2 else "shuffled"
    opened = ledger.bind(Opened(40, seed, 4, 9, "drop", 2, 0.0, order=order))
    assert opened is not None
    events.append(opened)
    version, starts = 0, 0
    for now in range(length):
        names = sorted(ledger.open)
        some = [name for name in names if rng.random() < 0.3]
        match rng.choice(["grant", "grant", "grant", "finish", "finish", "train", "drop", "stale", "lose", "back"]):
            case "grant":
                if seed % 2 and rng.random() < 0.4:
                    events.append(ledger.submit(ledger.total_submitted, rng.choices(range(99), k=3), now))
                events.append(ledger.grant("w", "1", version, now, f"r{now // 3}"))
            case "finish":
                for name in some:
                    outcome = rng.choice(["accepted", "accepted", "rejected", "failed"])
                    events.append(ledger.finish(name, ledger.open[name].attempt, outcome, "why: x", now)[1])
            case "train":
                version += 1
                events.append(ledger.claim(version, some, now, "1")[0])
                some = some[1:]  # a claim that is not trained yet
                events.append(ledger.trained(version, version, some, now, [max(0, version - 2)] * len(some), "1"))
                version = ledger.newest if ledger.newest > 0 else 0
            case "drop" if names:
                events.append(ledger.drop(rng.choice(names), "filtered", now))
            case "stale":
                events += ledger.reissue_stale([(name, ledger.open[name].attempt) for name in some], now)
            case "lose":
                events += ledger.lose(lambda ticket: rng.random() < 0.2, "worker lost", now)
            case "back" if rng.random() < 0.2:
                starts += 1
                version = max(0, rng.randint(-1, version))
                events.append(ledger.roll_back(version, version, f"{starts:019d}", "/c", now))
    return ledger, [event for event in events if event is not None]


def replay(path):
    ledger = Ledger(PromptOrder(0, 40), 2)
    for event, _ in read_journal(path):
        ledger.apply(event)  # type: ignore[arg-type]
    return ledger


def state_of(ledger):
    return ledger.snapshot(0.0, [], {})


@pytest.mark.parametrize("seed", range(20))
def test_compaction_keeps_state_and_later_decisions(tmp_path, seed):
    """Compacted in the middle of a random history; what comes after is replayed on top of the snapshot."""
    whole, events = history(seed)
    middle = len(events) // 2
    half = Ledger(PromptOrder(seed, 40), 2)
    path = tmp_path / "ledger.jsonl"
    with Journal(path) as journal:
        for event in events[:middle]:
            half.apply(event)  # type: ignore[arg-type]
        journal.append(events[:middle])
        assert asyncio.run(Compactor(journal, 1).compact(lambda: half.snapshot(7.0, [], {})))
        assert journal.base == journal.size > 0
        journal.append(events[middle:])
    assert len(list(read_journal(path))) == 1 + len(events) - middle
    assert state_of(replay(path)) == state_of(whole)


def test_records_appended_during_compaction_keep_order(tmp_path, monkeypatch):
    """While the snapshot is written and again while both files are synced; the lock moves with the name."""
    path, ledger = tmp_path / "ledger.jsonl", Ledger(PromptOrder(1, 40), 2)
    journal = Journal(path)

    def grant():
        event = ledger.grant("w", "1", 0, 0.0)
        assert event is not None
        journal.append([event])

    def during(real):
        def wrapped(*args):
            asyncio.run_coroutine_threadsafe(asyncio.to_thread(lambda: None), loop).result(60)
            loop.call_soon_threadsafe(grant)
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(60)
            return real(*args)  # type: ignore[operator]

        return wrapped

    async def main():
        nonlocal loop
        loop = asyncio.get_running_loop()
        assert await Compactor(journal, 1).compact(lambda: ledger.snapshot(0.0, [], {}))

    loop: asyncio.AbstractEventLoop
    for _ in range(5):
        grant()
    monkeypatch.setattr(Compactor, "_write", during(Compactor._write))
    monkeypatch.setattr(journal_module, "_sync_and_close", during(journal_module._sync_and_close))
    asyncio.run(main())
    with pytest.raises(LedgerError, match="another gserver_manager"):
        Journal(path)
    grant()
    journal.close()
    kinds = [type(event) for event, _ in read_journal(path)]
    assert kinds == [Snapshot, Granted, Granted, Granted]
    assert state_of(replay(path)) == state_of(ledger) and ledger.counts.granted == 8


@pytest.mark.parametrize("where", ["write", "tail", "sync"])
def test_full_disk_leaves_journal_unchanged(tmp_path, monkeypatch, where):
    path = tmp_path / "ledger.jsonl"
    ledger, events = history(3)
    journal = Journal(path)
    journal.append(events)
    before, descriptors = path.read_bytes(), len(os.listdir("/proc/self/fd"))
    compactor = Compactor(journal, 1000)

    def full(*given):
        if where == "sync":
            os.close(given[0])  # type: ignore[arg-type]
        raise OSError(28, "No space left on device")

    target = {"write": (journal_module, "lock"), "tail": (os, "pread"), "sync": (journal_module, "_sync_and_close")}[
        where
    ]
    with monkeypatch.context() as patch:
        patch.setattr(*target, full)
        assert compactor.due
        assert not asyncio.run(compactor.compact(lambda: state_of(ledger)))
    assert path.read_bytes() == before and not twin_path(path).exists()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not compactor.due, "not again before it has grown"
    journal.append(events[:1] * 20)
    assert compactor.due and asyncio.run(compactor.compact(lambda: state_of(ledger)))
    journal.close()


def test_sync_error_of_journal_is_no_failed_compaction(tmp_path, monkeypatch):
    ledger, events = history(3)
    with Journal(tmp_path / "ledger.jsonl") as journal:
        journal.append(events)

        def broken():
            raise LedgerError("cannot sync")

        monkeypatch.setattr(journal, "sync", broken)
        with pytest.raises(LedgerError, match="cannot sync"):
            asyncio.run(Compactor(journal, 1).compact(lambda: state_of(ledger)))


def test_writer_without_lease_does_not_exchange_files(tmp_path):
    """Where files have no locks its successor may have appended by then."""
    path = tmp_path / "ledger.jsonl"
    ledger, events = history(3)

    def fenced():
        raise Fenced("this worker has lost its lease")

    with Journal(path) as journal:
        journal.append(events)
        before = path.read_bytes()
        with pytest.raises(Fenced):
            asyncio.run(Compactor(journal, 1).compact(lambda: state_of(ledger), fenced))
        assert path.read_bytes() == before and not twin_path(path).exists()


def test_sync_after_exchange_syncs_the_directory(tmp_path, monkeypatch):
    ledger, events = history(3)
    fsync, folders = os.fsync, list[bool]()

    def seen(fd):
        folders.append(stat.S_ISDIR(os.fstat(fd).st_mode))
        fsync(fd)

    with Journal(tmp_path / "ledger.jsonl") as journal:
        journal.append(events)
        fd, size = Compactor(journal, 1)._write(state_of(ledger))
        journal.copy_tail(journal.size, fd)
        monkeypatch.setattr(os, "fsync", seen)
        assert journal.switch(size)
        journal.sync()
        assert folders == [False, True], "the file, and its name"
        journal.sync()
        assert folders == [False, True, False]


def test_start_removes_unfinished_compaction(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger, events = history(4)
    with Journal(path) as journal:
        journal.append(events)
    twin_path(path).write_bytes(encode_record(state_of(ledger))[:100])
    with Journal(path) as journal:
        assert journal.replay() == events
    assert not twin_path(path).exists()


def test_a_compaction_that_is_cancelled_leaves_nothing_behind(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger, events = history(5)
    journal = Journal(path)
    journal.append(events)
    descriptors = len(os.listdir("/proc/self/fd"))

    async def main():
        task = asyncio.create_task(Compactor(journal, 1).compact(lambda: state_of(ledger)))
        await asyncio.sleep(0)  # it has begun to write
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not twin_path(path).exists() and len(os.listdir("/proc/self/fd")) == descriptors
    journal.close()
    assert [event for event, _ in read_journal(path)] == events


def test_compaction_is_due_by_size(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger, events = history(6)
    with Journal(path) as journal:
        assert not Compactor(journal, 100).due
        journal.append(events)
        compactor = Compactor(journal, 100)
        assert compactor.due and not Compactor(journal, journal.size).due
        asyncio.run(compactor.compact(lambda: state_of(ledger)))
        assert journal.size > 100 and not compactor.due
    with Journal(path) as journal:
        assert journal.base == journal.size and not Compactor(journal, 100).due


def test_inconsistent_or_late_snapshot_is_refused():
    ledger, _ = history(7)
    good = state_of(ledger)
    with pytest.raises(LedgerError, match="after .* others"):
        ledger.apply(good)
    for broken in ({"lag": good.lag[1:]}, {"open": good.open[1:]}):
        with pytest.raises(LedgerError, match="do not match"):
            Ledger(PromptOrder(0, 40), 2).apply(msgspec.structs.replace(good, **broken))


def test_a_snapshot_holds_evaluations_and_running_tickets():
    state = ready()
    state.open(0.0)
    state.evaluate(EvaluateRequest("e", "eval", 3), 0.0)
    state.roll_back(RollBackRequest(-1, -1, "m"), 0.0)  # forgets that evaluation
    state.servers.publish(version(0))
    update(state, 0)
    state.evaluate(EvaluateRequest("e", "eval", 3, incarnation="m"), 0.0)
    for ticket in tickets(state, 2):
        finish(state, ticket)
    held = [t for t in state.allocate(AllocateRequest("w", 3, request_id="lost"), 0.0).tickets if t.kind == "train"]
    state.outbox.clear()
    snapshot = msgspec.json.decode(msgspec.json.encode(state.snapshot(1.0)), type=Event)
    again = ManagerState(SETTINGS)
    again.restore_from([snapshot])
    evaluation = again.evaluations.find("e")
    assert (evaluation.saved.done, list(evaluation.waiting)) == ([0, 1], [2])
    assert again.allocate(AllocateRequest("w", 3, request_id="lost"), 0.0).tickets == held
    assert [ticket.trainer_incarnation for ticket in held] == ["m"] * 2 and again.trainer_incarnation == "m"
    assert again.ledger.position() == state.ledger.position() and again.ledger.opened == state.ledger.opened
    assert again.evaluations.snapshot() == state.evaluations.snapshot(), "and that it was forgotten once"
