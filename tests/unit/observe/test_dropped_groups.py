"""Groups that were not trained stay on disk: the newest, within bounds, and never in the way of a run."""

import numpy as np
import pytest

from realsys.errors import RecordError
from realsys.observe import dropped_groups
from realsys.observe.dropped_groups import DroppedGroup, DroppedWriter, Room, group_files, read_group
from realsys.types import Ticket
from tests.support.training.sample_records import make_row


def group(name, rows=1, tokens=4):
    room = Room()
    ids = np.arange(tokens, dtype=np.int32)
    row = make_row(ids, -np.ones(tokens - 1, np.float32), np.full(tokens - 1, 5, np.int32))
    episodes = [room.episode(k, [row], 1.0, True) for k in range(rows)]
    return DroppedGroup(1.0, Ticket(name, 0, 0), "p/0", "equal_rewards", "1+2=", "3", episodes)


def kept(root):
    return [read_group(file.path).ticket.ticket_id for file in group_files(root)]


def write(root, groups, keep=64, gap=2.0, tokens=4):
    """Offer as many groups, ``gap`` seconds apart."""
    clock = iter(range(10**6))
    writer = DroppedWriter(root, "p/0", keep, lambda: gap * next(clock))
    for number in range(groups):
        writer.offer(lambda number=number: group(str(number), tokens=tokens))
        writer.flush()


def test_newest_groups_are_kept(tmp_path):
    write(tmp_path, 9, keep=3)
    assert kept(tmp_path) == ["8", "7", "6"]
    write(tmp_path, 1, keep=3)  # after a restart of the process
    assert kept(tmp_path) == ["0", "8", "7"]


def test_no_more_than_one_group_a_second(tmp_path):
    write(tmp_path, 9, gap=0.25)
    assert kept(tmp_path) == ["8", "4", "0"]


def test_refused_group_is_never_made(tmp_path):
    """The writer of every group would cost copies of arrays that are thrown away."""
    made: list[str] = []

    def make():
        made.append("made")
        return group("0")

    writer = DroppedWriter(tmp_path, "p/0", 4, lambda: 0.0)
    writer.offer(make)
    writer.flush()
    writer.offer(make)
    DroppedWriter(tmp_path, "p/0", 0).offer(make)
    assert made == ["made"]


def test_zero_groups_write_nothing(tmp_path):
    write(tmp_path, 3, keep=0)
    assert list(tmp_path.iterdir()) == []


def test_folder_has_a_bound_in_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(dropped_groups, "MOST_BYTES", 5000)
    write(tmp_path, 9, tokens=100)
    assert sum(file.size for file in group_files(tmp_path)) <= 5000 and len(kept(tmp_path)) > 1


def test_large_group_keeps_some_rows(tmp_path, monkeypatch):
    """The numbers of an episode are those of all its rows."""
    monkeypatch.setattr(dropped_groups, "MOST_GROUP_BYTES", 100)
    episodes = group("7", rows=4).episodes
    assert [len(made.rows) for made in episodes] == [1, 1, 0, 0]
    assert [(made.tokens, made.versions) for made in episodes] == [(3, (5, 5))] * 4


def test_full_disk_does_not_end_the_process(tmp_path, caplog):
    (tmp_path / "dropped").write_text("a file where the folder should be")
    write(tmp_path / "dropped", 1)
    assert "dropped group 0 not kept" in caplog.text


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x81\xa1\xff\x01"])
def test_damaged_group_is_named(tmp_path, content):
    path = tmp_path / "00000000.msgpack"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"00000000\.msgpack: cannot be read"):
        read_group(path)
