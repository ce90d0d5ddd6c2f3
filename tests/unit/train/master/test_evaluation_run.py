"""The evaluator of `realsys eval`: its phases, the weights that it publishes, and a model that changes under it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from realsys.cluster.names.connect import trial_names
from realsys.config.paths import TrialPaths
from realsys.errors import WeightsError
from realsys.manager.messages import EvaluateRequest, EvaluationReply, RollBackRequest
from realsys.observe.step_log import read_steps
from realsys.train.master.request_evaluations import EvaluationRun
from realsys.train.master.step_statistics import StepLog
from realsys.types import PublishedVersion
from realsys.weights.disk.plain_folders import verify
from tests.support.ledger.memory_store import MemoryNameStore
from tests.support.processes.config_trees import changed

INCARNATION = f"{7:019d}"


class Manager:
    """A manager whose evaluations end at once; it keeps what the name store had at each call."""

    def __init__(self, published: Any) -> None:
        self.calls: list[tuple[str, bool]] = []
        self.requests: list[EvaluateRequest] = []
        self._published = published

    async def roll_back(self, request: RollBackRequest) -> None:
        assert (request.version, request.incarnation) == (-1, INCARNATION)
        self.calls.append(("roll_back", self._published() is not None))

    async def evaluate(self, request: EvaluateRequest) -> None:
        self.calls.append(("evaluate", self._published() is not None))
        self.requests.append(request)

    async def evaluation(self, eval_id: str) -> EvaluationReply:
        counts = {"problems": 2, "ended": True, "tallies": [(1, 1, 1), (1, 0, 1)]}
        return EvaluationReply(2, 2, 0, 0.5, 0.0, 3.0, 0, 0, **counts)

    async def status(self) -> dict[str, Any]:
        return {"servers": [], "version": 0}


class Trial:
    """The parts of a process in a trial that evaluates a small model."""

    def __init__(self, root: Path) -> None:
        self.model = root / "hf"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        self.write_weights(1.0)
        self.paths = TrialPaths(root / "trial")
        self.paths.root.mkdir()
        self.config = changed("evaluation.problems=2", f"model.path={self.model}", "evaluate_only=true")
        self.names, self.store = trial_names(self.config), MemoryNameStore()
        self.manager = Manager(self.published)
        self.log = StepLog(self.paths.steps)
        context: Any = SimpleNamespace(
            config=self.config,
            paths=self.paths,
            names=self.names,
            store=self.store,
            incarnation=INCARNATION,
            set_state=lambda state: None,
            check_alive=lambda: None,
        )
        self.run = EvaluationRun(context, self.manager, self.log)  # type: ignore[arg-type]

    def write_weights(self, value: float) -> None:
        save_file({"a": torch.full((2,), value)}, self.model / "model.safetensors")

    def published(self) -> PublishedVersion | None:
        found = self.store.get_subtree(self.names.model_version())
        return msgspec.json.decode(next(iter(found.values())), type=PublishedVersion) if found else None


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


def test_model_is_published_before_its_evaluation(trial):
    asyncio.run(trial.run.run())
    assert trial.manager.calls == [("roll_back", False), ("evaluate", True)]
    published = trial.published()
    assert (published.version, published.incarnation) == (0, INCARNATION)
    verify(Path(published.locator), 0)


def test_results_and_phases_are_in_the_step_log(trial):
    asyncio.run(trial.run.run())
    records = list(read_steps(trial.paths.steps))
    assert [record["phase"] for record in records if record["kind"] == "phase"] == ["load", "evaluate", "done"]
    [result] = [record for record in records if record["kind"] == "eval"]
    assert (result["set"], result["step"], result["accuracy"]) == ("eval", 0, 0.5)


def test_model_that_changes_meanwhile_ends_it(trial):
    asyncio.run(trial.run.run())
    trial.write_weights(2.0)
    status = {"servers": [{"failures": 1, "version": -1}], "version": 0}
    with pytest.raises(WeightsError, match="has changed since the start: .*corrupt"):
        asyncio.run(trial.run.check_weights(status))
