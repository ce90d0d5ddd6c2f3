"""Arrays move between ranks as planned."""

from __future__ import annotations

import numpy as np
import pytest

from realsys.config.schema import Config
from realsys.train.data_manager import DataManager
from realsys.train.device import Device
from realsys.train.mesh import any_rank
from realsys.train.transfer import execute
from realsys.types import SequenceRef, Transfer
from tests.train_ranks import run_ranks

REFS = {f"s{i}": SequenceRef(f"s{i}", 4 + i, 3, 0.0, False, 0) for i in range(4)}


def arrays(name: str) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    ref = REFS[name]
    base = 100 * int(name[1:])
    return {
        "tokens": np.arange(base, base + ref.length, dtype=np.int32),
        "behav_logprobs": -np.arange(ref.answer_len, dtype=np.float32) - base,
    }


def test_arrays_arrive_where_the_plan_says_and_nowhere_else() -> None:
    plan = [
        Transfer(0, 1, ["s0", "s1"], ["tokens", "behav_logprobs"]),
        Transfer(0, 2, ["s1"], ["tokens"]),
        Transfer(2, 0, ["s3"], ["behav_logprobs"]),
        Transfer(2, 0, ["s3", "s2"], ["tokens"]),
        Transfer(1, 1, ["s0"], ["tokens"]),
    ]

    def body(rank: int, device: Device) -> tuple[DataManager, int]:
        data = DataManager(rank)
        for name in {0: ["s0", "s1"], 1: [], 2: ["s2", "s3"]}[rank]:
            data.put(name, arrays(name))
        received = execute(plan, REFS, data, rank, device)
        assert execute([], REFS, data, rank, device) == 0
        return {
            (name, key): data.get(name, key) for name in REFS for key in arrays(name) if data.has(name, key)
        }, received  # type: ignore[return-value]

    held = run_ranks(3, body, Config())
    expected = {
        1: [("s0", "tokens"), ("s0", "behav_logprobs"), ("s1", "tokens"), ("s1", "behav_logprobs")],
        2: [("s1", "tokens")],
        0: [("s3", "behav_logprobs"), ("s3", "tokens"), ("s2", "tokens")],
    }
    for rank, moved in expected.items():
        found, received = held[rank]
        own = {0: 4, 1: 0, 2: 4}[rank]
        assert len(found) == own + len(moved)
        assert received == sum(arrays(name)[key].nbytes for name, key in moved)
        for name, key in moved:
            np.testing.assert_array_equal(found[name, key], arrays(name)[key])
            assert found[name, key].dtype == arrays(name)[key].dtype


def test_a_source_that_lacks_the_sample_says_so() -> None:
    def body(rank: int, device: Device) -> str:
        if rank == 1:
            return ""
        with pytest.raises(KeyError) as caught:
            execute([Transfer(0, 1, ["s0"], ["tokens"])], REFS, DataManager(0), 0, device)
        return str(caught.value)

    assert "model_worker/0 has no tokens of sample s0" in run_ranks(2, body, Config())[0]


def test_a_flag_on_one_rank_is_seen_by_all() -> None:
    def body(rank: int, device: Device) -> tuple[bool, bool]:
        return any_rank(rank == 1, device), any_rank(False, device)

    assert run_ranks(2, body, Config()) == [(True, False), (True, False)]
