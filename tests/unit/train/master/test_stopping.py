"""A stop while a step runs: the step is abandoned or finished, and the stop shows its progress."""

import asyncio

import pytest

from realsys.config.paths import TrialPaths
from realsys.train.master.stopping import Stopping, progress
from realsys.train.step_gate import GateState, SettleRequest, StepAbandoned

BOUND_S = 30.0


class Workers:
    """Two ranks in step 3. ``settled`` is set by the first decision."""

    def __init__(self, *, updating=False):
        self.settled = asyncio.Event()
        self.decision: SettleRequest | None = None
        self._states = [GateState(2, {"actor_train": 4}, updating), GateState(2, {"actor_train": 5})]

    async def pause_step(self):
        return self._states

    async def settle_step(self, payload):
        self.decision = payload
        self.settled.set()
        return self._states


def stopped(path, *, updating):
    """Stop a run in step 3; returns the result of the step, and the decision."""

    async def body():
        workers, stop = Workers(updating=updating), asyncio.Event()

        async def step():
            stop.set()
            await workers.settled.wait()
            await asyncio.sleep(0)  # the file is written in the turn of the decision
            if workers.decision.abandon:
                raise StepAbandoned("actor_train")
            return "trained"

        result = await asyncio.wait_for(Stopping(stop, workers, path).run(3, step()), BOUND_S)
        return result, workers.decision

    return asyncio.run(body())


def test_step_without_updates_is_abandoned(tmp_path):
    paths = TrialPaths(tmp_path)
    result, decision = stopped(paths.stopping, updating=False)
    assert result is None and decision == SettleRequest(abandon=True, limits={"actor_train": 5})
    text, _ = progress(paths)
    assert text.startswith("stopping: step 3 is not finished, it will be trained again; saving step 2\n")


def test_step_that_updates_runs_to_its_end(tmp_path):
    paths = TrialPaths(tmp_path)
    assert stopped(paths.stopping, updating=True) == ("trained", SettleRequest(abandon=False))
    assert progress(paths)[0].startswith("stopping: step 3 has begun to update the weights")


def test_full_disk_does_not_delay_a_stop(tmp_path):
    assert stopped(tmp_path, updating=False)[0] is None, "the path is a folder"


def test_error_of_a_step_is_raised(tmp_path):
    async def body():
        async def step():
            raise ValueError("a rank failed")

        with pytest.raises(ValueError, match="a rank failed"):
            await Stopping(asyncio.Event(), Workers(), tmp_path / "stopping").run(3, step())

    asyncio.run(body())


def test_bytes_of_unfinished_files_are_progress(tmp_path):
    paths = TrialPaths(tmp_path)
    assert progress(paths) == ("", 0)
    folder = paths.checkpoints / "step-00000002.a.tmp"
    folder.mkdir(parents=True)
    (folder / "actor.safetensors").write_bytes(b"1234")
    assert progress(paths) == ("", 4)
