"""The holder of each array, the completion of a record, and records that cannot be written."""

import asyncio
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from realsys.cluster.topology import place
from realsys.config.allocation import parse_allocation
from realsys.config.dataflow import dataflow_of
from realsys.config.machine import Machine
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import NotFiniteError
from realsys.launch.commands.replay import tolerance_of
from realsys.model_calls import Empty
from realsys.train import record_files as files
from realsys.train.master.executor import CallResult, Minibatches
from realsys.train.master.recorder import StepRecorder, array_holders, check_finite
from realsys.train.master.replay import compare
from realsys.train.record_files import StepRecord
from realsys.train.requests import (
    CopyWeightsRequest,
    DigestWeightsRequest,
    HoldRequest,
    Recorded,
    RecordReply,
    RecordRequest,
    SaveWeightsReply,
)
from realsys.types import SampleMeta
from tests.support.processes.config_trees import changed
from tests.support.training.sample_records import make_ref

CONFIG = changed("train.ppo.critic.enabled=true", "train.ppo.skip_zero_advantage=false", "record.keep_steps=2")
ADAPTED = changed("train.lora.rank=4", "train.ppo.critic.enabled=true", "train.ppo.skip_zero_advantage=false")
FLOW = dataflow_of(CONFIG)
MESHES = place(parse_allocation("sglang.d1+actor.p2,critic.d2"), ["actor", "critic"])
GROUPS = [[SampleMeta(f"t/{k}", "t", 0, 4, 2, 1.0, False, 0, 0, owner=1) for k in range(2)]]
REFS = [make_ref(sample.sample_id, 4, 2, 1.0, False, 0) for sample in GROUPS[0]]
PLANS: dict[str, Minibatches] = {"actor": [[REFS]], "critic": [[[REFS[0]], [REFS[1]]]]}


class Workers:
    """Replies immediately, and remembers the requests in order."""

    def __init__(self):
        self.asked: list[msgspec.Struct] = []

    def hold(self, step, arrays):
        return self._answer(HoldRequest(step, arrays[0]), [Empty()] * 2)

    def record(self, payload):
        return self._answer(payload, [RecordReply(w, 0.001) for w in range(2)])

    def copy_weights(self, payload):
        return self._answer(payload, [Empty()] * 2)

    def digest_weights(self, payload):
        return self._answer(payload, saved())

    def _answer(self, payload, reply):  # type: ignore[no-untyped-def]
        self.asked.append(payload)
        future = asyncio.get_running_loop().create_future()
        future.set_result(reply)
        return future


def saved():
    """The replies of the ranks that have written the actor's weights, or computed their checksums."""
    return [SaveWeightsReply(None, 0.0, worker, {"weight": f"sum{worker}"}) for worker in range(2)]


def result(**stats):
    return CallResult(stats, {}, 0.1, 0.0, 0.1, 0)


async def take(recorder, step):
    recording = recorder.begin(step, GROUPS, FLOW, PLANS, {"actor_train": {"lr": 0.5}})
    await recording.end({"actor_train": result(loss=float("nan"), grad_norm=1.5)})
    recorder.saved(step, saved())


def write_files(workers, step, of=(0, 1)):
    """Write the workers' files, as their threads do."""
    directory = Path(next(p.directory for p in reversed(workers.asked) if isinstance(p, RecordRequest)))
    directory.mkdir(parents=True, exist_ok=True)
    for worker in of:
        (directory / files.worker_file(worker)).write_bytes(b"content")
    return [Recorded(worker, step, 7, "c", weights={"critic": {"head": f"sum{worker}"}}) for worker in of]


def test_every_array_is_recorded_by_one_worker():
    held = array_holders(GROUPS, FLOW, PLANS, MESHES)
    ids = ["t/0", "t/1"]
    # The stream brought the samples to the actor's last stage, which also makes the actor's arrays.
    actor = ("behav_logprobs", "loss_mask", "tokens", "versions", "prox_logprobs", "advantages", "returns")
    assert held[1] == {**dict.fromkeys(actor, ids), "values": ["t/1"]}
    assert held[0] == {"values": ["t/0"]}


def test_record_is_complete_after_the_last_worker(tmp_path):
    async def body():
        workers, paths = Workers(), TrialPaths(tmp_path)
        recorder = StepRecorder(CONFIG, paths, MESHES, workers, "inc")
        await take(recorder, 3)
        assert [type(payload) for payload in workers.asked] == [HoldRequest, RecordRequest]
        first, second = write_files(workers, 3)
        recorder.written(first)
        recorder.written(first)  # a duplicated notice
        assert files.recorded_steps(paths.records) == {}
        recorder.written(second)
        await recorder.finish()
        found = files.read_record(files.record_of_step(paths.records, 3))
        assert (found.step, found.version, found.incarnation, found.groups) == (3, 2, "inc", GROUPS)
        assert files.config_of(Path(), found) == CONFIG, "that of the trial may change"
        assert found.stats == {"actor_train": {"loss": "nan", "grad_norm": 1.5}}
        assert found.weights == {
            "actor": {0: {"weight": "sum0"}, 1: {"weight": "sum1"}},
            "critic": {0: {"head": "sum0"}, 1: {"head": "sum1"}},
        }
        assert list(found.files) == [files.worker_file(0), files.worker_file(1)]
        recorder.written(second)  # a late notice is ignored

    asyncio.run(body())


def test_early_notice_does_not_complete_a_record(tmp_path):
    """A worker writes before the replies of all workers are in."""

    async def body():
        workers, paths = Workers(), TrialPaths(tmp_path)
        recorder = StepRecorder(CONFIG, paths, MESHES, workers, "inc")
        recording = recorder.begin(3, GROUPS, FLOW, PLANS, {})
        ended = recording.end({})
        recorder.saved(3, saved())
        for notice in write_files(workers, 3):
            recorder.written(notice)
        assert files.recorded_steps(paths.records) == {}
        await ended
        await recorder.finish()
        assert list(files.recorded_steps(paths.records)) == [3]

    asyncio.run(body())


def test_failed_worker_costs_only_the_record(tmp_path, caplog):
    async def body():
        workers, paths = Workers(), TrialPaths(tmp_path)
        recorder = StepRecorder(CONFIG, paths, MESHES, workers, "inc")
        await take(recorder, 3)
        first, _ = write_files(workers, 3)
        recorder.written(first)
        recorder.written(Recorded(1, 3, failure="model_worker/1: cannot be written: No space left on device"))
        await recorder.finish()
        assert files.recorded_steps(paths.records) == {}
        await take(recorder, 4)
        for notice in write_files(workers, 4):
            recorder.written(notice)
        await recorder.finish()
        assert list(files.recorded_steps(paths.records)) == [4]

    with caplog.at_level(logging.ERROR):
        asyncio.run(body())
    (problem,) = [entry.getMessage() for entry in caplog.records]
    assert problem == "step 3 is not recorded: model_worker/1: cannot be written: No space left on device"
    assert not list(tmp_path.rglob("*.tmp"))


def test_repeated_step_replaces_its_record(tmp_path):
    """Old records are pruned."""

    async def body():
        workers, paths = Workers(), TrialPaths(tmp_path)

        async def steps(incarnation, *numbers):
            recorder = StepRecorder(CONFIG, paths, MESHES, workers, incarnation)
            await recorder.rewind(numbers[0] - 1)
            for step in numbers:
                await take(recorder, step)
                for notice in write_files(workers, step):
                    recorder.written(notice)
                await recorder.finish()

        await steps("first", 1, 2, 3)
        assert list(files.recorded_steps(paths.records)) == [2, 3]  # record.keep_steps
        await steps("second", 3)
        found = [files.read_record(path).incarnation for path in files.recorded_steps(paths.records).values()]
        assert found == ["first", "second"]

    asyncio.run(body())


def test_one_data_rank_computes_what_is_not_published(tmp_path):
    """The publication has the checksums of the actor; its adapters are not published."""

    async def body():
        for config, digests in ((CONFIG, {0: ["critic"]}), (ADAPTED, {0: ["actor", "critic"], 1: ["actor"]})):
            workers = Workers()
            await take(StepRecorder(config, TrialPaths(tmp_path), MESHES, workers, "inc"), 3)
            assert [p.digests for p in workers.asked if isinstance(p, RecordRequest)] == [digests]

    asyncio.run(body())


def test_record_waits_for_the_published_checksums(tmp_path):
    async def body():
        workers, paths = Workers(), TrialPaths(tmp_path)
        recorder = StepRecorder(CONFIG, paths, MESHES, workers, "inc")
        await recorder.begin(3, GROUPS, FLOW, PLANS, {}).end({})
        for notice in write_files(workers, 3):
            recorder.written(notice)
        assert 3 in recorder._writing and not recorder._completing
        recorder.saved(3, saved())
        await recorder.finish()
        assert list(files.recorded_steps(paths.records)) == [3]
        recorder.saved(3, saved())  # a version that is written again says nothing new

    asyncio.run(body())


def test_step_that_ends_the_run_is_recorded(tmp_path):
    """Nothing is published after NaN, so the ranks compute the checksums for the record alone."""

    async def body():
        workers, paths = Workers(), TrialPaths(tmp_path)
        recorder = StepRecorder(CONFIG, paths, MESHES, workers, "inc")
        failed = {"actor_train": CallResult({}, {}, 0.1, 0.0, 0.1, 0, not_finite=("actor", 1, ["t/0"]))}
        await recorder.begin(3, GROUPS, FLOW, PLANS, {}).end(failed)
        for notice in write_files(workers, 3):
            recorder.written(notice)
        with pytest.raises(NotFiniteError):
            await check_finite(failed, recorder, 3)
        assert workers.asked[-2:] == [CopyWeightsRequest("actor", 3), DigestWeightsRequest("actor", 3)]
        found = files.read_record(files.record_of_step(paths.records, 3))
        assert found.weights["actor"] == {0: {"weight": "sum0"}, 1: {"weight": "sum1"}}

    asyncio.run(body())


# ---- Comparison of a step with its replay: bit by bit, or within a tolerance


GPU = Machine(cpus=1, memory_bytes=0, gpus=("0",), torch_has_cuda=True)


def record(loss, weights):
    fields: dict[str, Any] = {field.name: None for field in msgspec.structs.fields(StepRecord) if field.required}
    fields |= {"step": 1, "groups": [], "plan": "p", "calls": ["actor_train"], "args": {}, "scores": {}}
    fields |= {"stats": {"actor_train": {"loss": loss, "bad": math.nan}}, "weights": {"actor": {0: {"w": weights}}}}
    return StepRecord(**fields)


def compared(far, tolerance):
    one, two = (
        {("s", "prox_logprobs"): np.float32([-1.0, at]), ("s", "tokens"): np.int32([1, 2])} for at in (-2.0, -2.0 - far)
    )
    return compare(record(1.0, "a"), record(1.0 + far, "b" if far else "a"), one, two, tolerance)


@pytest.mark.parametrize(
    ("far", "tolerance", "unequal"),
    [
        (0.0, 0.0, set()),
        (1e-6, 0.0, {"array", "statistic", "parameter"}),
        (0.01, 0.05, set()),
        (0.5, 0.05, {"array", "statistic"}),
    ],
)
def test_numbers_may_differ_by_the_tolerance(far, tolerance, unequal):
    found = compared(far, tolerance)
    assert {kind for kind, count in found.unequal.items() if count} == unequal
    assert ("parameter" in found.compared) == (not tolerance)


def test_tokens_are_compared_exactly_within_a_tolerance():
    arrays = ({("s", "tokens"): np.int32([1000, at])} for at in (1000, 1001))
    assert compare(record(1.0, "a"), record(1.0, "a"), *arrays, 0.05).unequal["array"] == 1


def test_tolerance_is_for_gpus_without_deterministic_algorithms():
    exact = Config.model_validate({"train": {"deterministic": True}})
    assert tolerance_of(Config(), GPU) > 0
    assert tolerance_of(exact, GPU) == tolerance_of(Config(), replace(GPU, gpus=())) == 0
