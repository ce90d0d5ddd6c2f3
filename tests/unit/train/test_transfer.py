"""Moving arrays between workers, on real ranks."""

import numpy as np
import pytest

from realsys.cluster.topology import Mesh
from realsys.config.allocation import ParallelLayout
from realsys.config.schema import Config
from realsys.errors import ModelError
from realsys.model_calls import Transfer, TransferRequest
from realsys.train.worker.call_service import execute
from realsys.train.worker.data_manager import DataManager
from tests.support.training.sample_records import make_ref
from tests.support.training.train_ranks import run_ranks

pytestmark = pytest.mark.processes

#: sample "s{i}": 3 prompt tokens, 1 + i answer tokens
REFS = [make_ref(f"s{i}", 4 + i, 3, 0.0, False, 0) for i in range(4)]


def arrays(name):  # type: ignore[type-arg]
    ref = REFS[int(name[1:])]
    base = 100 * int(name[1:])
    return {
        "tokens": np.arange(base, base + ref.length, dtype=np.int32),
        "behav_logprobs": -np.arange(ref.loss_tokens, dtype=np.float32) - base,
        "values": np.arange(ref.loss_tokens + 1, dtype=np.float32) / 7 + base,  # the last: after the answer
    }


def holding(worker, names):
    data = DataManager(worker)
    for name in names:
        data.put(name, arrays(name))
    return data


def test_arrays_arrive_only_where_plan_says():
    plan = [
        Transfer(0, [1], ["s0"], ["tokens", "behav_logprobs", "values"]),
        Transfer(0, [1], ["s1"], ["behav_logprobs", "values"]),
        Transfer(0, [1, 2], ["s1"], ["tokens"]),
        Transfer(2, [0], ["s3"], ["values"]),
        Transfer(2, [0], ["s3", "s2"], ["tokens"]),
        Transfer(1, [1], ["s0"], ["tokens"]),
    ]

    def body(rank, device):
        data = holding(rank, {0: ["s0", "s1"], 1: [], 2: ["s2", "s3"]}[rank])
        received = execute(TransferRequest(plan, REFS), data, rank, device)
        assert execute(TransferRequest([], REFS), data, rank, device) == 0
        names = [ref.sample_id for ref in REFS]
        held = {(name, key): data.get(name, key) for name in names for key in arrays(name) if data.has(name, key)}
        return held, received

    held = run_ranks(3, body, Config())
    expected = {
        1: [(name, key) for name in ("s0", "s1") for key in ("tokens", "behav_logprobs", "values")],
        2: [("s1", "tokens")],
        0: [("s3", "values"), ("s3", "tokens"), ("s2", "tokens")],
    }
    # 4 bytes each: 4+1+2 and 5+2+3 elements to worker 1; 5 to worker 2; 5+7+6 to worker 0
    assert [received for _, received in held] == [72, 68, 20]
    for rank, moved in expected.items():
        found, _ = held[rank]
        own = {0: 6, 1: 0, 2: 6}[rank]
        assert len(found) == own + len(moved)
        for name, key in moved:
            np.testing.assert_array_equal(found[name, key], arrays(name)[key])
            assert found[name, key].dtype == arrays(name)[key].dtype


def test_workers_outside_a_transfer_take_no_part():
    meshes = {"actor": Mesh(ParallelLayout(data=2), (0, 1)), "critic": Mesh(ParallelLayout(tensor=2), (2, 3))}
    plan = [Transfer(0, [3], ["s2"], ["tokens", "values"]), Transfer(3, [0], ["s1"], ["behav_logprobs"])]

    def body(rank, device):
        data = holding(rank, {0: ["s2"], 3: ["s1"]}.get(rank, []))
        if rank in (0, 3):
            execute(TransferRequest(plan, REFS), data, rank, device)
        return [data.has("s2", "values"), data.has("s1", "behav_logprobs")], len(data)

    assert run_ranks(4, body, Config(), meshes=meshes) == [
        ([True, True], 2),
        ([False, False], 0),
        ([False, False], 0),
        ([True, True], 2),
    ]


def test_an_empty_answer_arrives_empty():
    empty = make_ref("s", 3, 3, 0.0, False, 0)
    request = TransferRequest([Transfer(0, [1], ["s"], ["behav_logprobs"])], [empty])

    def body(rank, device):
        data = DataManager(rank)
        if rank == 0:
            data.put("s", {"behav_logprobs": np.zeros(0)})
        return execute(request, data, rank, device), len(data.get("s", "behav_logprobs"))

    assert run_ranks(2, body, Config()) == [(0, 0), (0, 0)]


def test_a_source_that_lacks_the_sample_says_so():
    def body(rank, device):
        if rank == 1:
            return ""
        with pytest.raises(KeyError) as caught:
            execute(TransferRequest([Transfer(0, [1], ["s0"], ["tokens"])], REFS), DataManager(0), 0, device)
        return str(caught.value)

    assert "model_worker/0 has no tokens of sample s0" in run_ranks(2, body, Config())[0]


def test_array_with_wrong_length_is_not_sent():
    data = DataManager(0)
    data.put("s1", {"values": np.zeros(2)})

    def body(rank, device):
        with pytest.raises(ModelError) as caught:
            execute(TransferRequest([Transfer(0, [1], ["s1"], ["values"])], REFS), data, 0, device)
        return str(caught.value)

    expected = "values of sample s1 has 2 elements, the plan expects 3 for its 5 tokens, 2 of them in the loss: "
    [problem] = run_ranks(1, body, Config())
    assert problem.startswith(expected)
