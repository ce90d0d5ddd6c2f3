"""Groups that were not trained stay on disk: the newest, within bounds, and never in the way of a run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from realsys.data.prompts import Prompt
from realsys.generation.client import Generated
from realsys.rollout.stores import dropped_store
from realsys.rollout.stores.dropped_store import DroppedStore, group_files, read_group
from realsys.types import Episode, Row, Ticket

PROMPT = Prompt("1+2=", "3", [1, 2])


def episode(tokens: int = 4) -> Episode:
    mask = np.arange(tokens) > 0
    numbers = np.full(tokens - 1, 5, np.int32)
    return Episode(
        [Row(np.arange(tokens, dtype=np.int32), mask, -np.ones(tokens - 1, np.float32), numbers, "stop")], 1.0
    )


def kept(root: Path) -> list[str]:
    return [read_group(path).ticket.ticket_id for path in group_files(root)]


def store(root: Path, groups: int, keep: int = 64, gap: float = 2.0, tokens: int = 4) -> None:
    """Add as many dropped groups, ``gap`` seconds apart."""

    async def body() -> None:
        clock = iter(range(10**6))
        made = DroppedStore(root, "rollout_worker/0", keep, lambda: gap * next(clock))
        for number in range(groups):
            made.add(Ticket(str(number), 0, 0), PROMPT, "equal_rewards", {0: episode(tokens)}, {})
            await made.flush()

    asyncio.run(body())


def test_newest_groups_are_kept(tmp_path: Path) -> None:
    store(tmp_path, 9, keep=3)
    assert kept(tmp_path) == ["8", "7", "6"]
    store(tmp_path, 1, keep=3)  # after a restart of the worker
    assert kept(tmp_path) == ["0", "8", "7"]


def test_no_more_than_one_group_a_second(tmp_path: Path) -> None:
    store(tmp_path, 9, gap=0.25)
    assert kept(tmp_path) == ["8", "4", "0"]


def test_zero_groups_write_nothing(tmp_path: Path) -> None:
    store(tmp_path, 3, keep=0)
    assert list(tmp_path.iterdir()) == []


def test_folder_has_a_bound_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropped_store, "MOST_BYTES", 5000)
    store(tmp_path, 9, tokens=100)
    assert sum(path.stat().st_size for path in group_files(tmp_path)) <= 5000 and len(kept(tmp_path)) > 1


def test_large_group_keeps_some_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropped_store, "MOST_GROUP_BYTES", 100)

    async def body() -> None:
        made = DroppedStore(tmp_path, "rollout_worker/0", 4)
        made.add(Ticket("7", 0, 0), PROMPT, "x", {k: episode() for k in range(4)}, {})
        await made.flush()

    asyncio.run(body())
    [path] = group_files(tmp_path)
    assert [len(made.rows) for made in read_group(path).episodes] == [1, 1, 0, 0]


def test_failed_episode_has_its_last_call(tmp_path: Path) -> None:
    async def body() -> None:
        made = DroppedStore(tmp_path, "rollout_worker/0", 4)
        ones = np.ones(2, np.int32)
        call = ([1, 2], Generated(8 * ones, -ones.astype(np.float32), 5 * ones, "length"))
        made.add(
            Ticket("7", 0, 0), PROMPT, "RewardError: x", {}, {1: ("RewardError: no verdict", call), 2: ("died", None)}
        )
        await made.flush()

    asyncio.run(body())
    [path] = group_files(tmp_path)
    first, second = read_group(path).episodes
    assert first.rows[0].arrays()["tokens"].tolist() == [1, 2, 8, 8] and first.rows[0].finish_reason == "length"
    assert first.rows[0].arrays()["loss_mask"].tolist() == [False, False, True, True]
    assert (first.error, second.error, second.rows) == ("RewardError: no verdict", "died", [])


def test_full_disk_does_not_end_the_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "dropped").write_text("a file where the folder should be")
    store(tmp_path / "dropped", 1)
    assert "dropped group 0 not kept" in caplog.text
