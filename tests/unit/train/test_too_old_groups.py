"""A ModelWorker keeps a group that was too old on disk, before it clears its samples."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import numpy as np

from realsys.config.paths import TrialPaths
from realsys.model_calls import ClearRequest, Empty, KeepDroppedRequest
from realsys.observe.dropped_groups import DroppedWriter, group_files, read_group
from realsys.train.recording import TooOldGroups
from realsys.train.worker.call_service import ModelWorkerService, WorkerParts
from realsys.train.worker.data_manager import DataManager
from realsys.types import Episode, Group, Row, SampleMeta, Ticket
from tests.support.processes.config_trees import changed
from tests.support.training.played_master import Message, PlayedMaster
from tests.support.training.sample_records import make_row

TICKET = Ticket("0000000007", 1, 3, version=2, n=2)


def row(*versions: int, reason: Any = "stop") -> Row:
    count = len(versions)
    return make_row(
        np.arange(2 + count, dtype=np.int32), -np.ones(count, np.float32), np.array(versions, np.int32), reason
    )


def arrived(data: DataManager) -> list[SampleMeta]:
    """Add a group of two episodes; the first has two rows."""
    episodes = [Episode([row(3, 4), row(5)], 1.0, True), Episode([row(2, 2, reason="length")], 0.0, False)]
    notice = data.add_group(Group(TICKET, episodes, "rollout_worker/1"))
    assert notice is not None
    return notice.samples


def test_too_old_group_is_kept_with_versions(tmp_path: Path) -> None:
    data, writer = DataManager(0), DroppedWriter(tmp_path, "model_worker/0", 4)
    samples = arrived(data)
    TooOldGroups(data, writer).keep(KeepDroppedRequest("masked", 9, samples))
    data.clear([sample.sample_id for sample in samples])
    writer.flush()
    [file] = group_files(tmp_path)
    assert file.path.parent.name == "model_worker-0"
    group = read_group(file.path)
    assert (group.ticket, group.worker) == (TICKET, "rollout_worker/1")
    assert (group.reason, group.next_version, group.reference) == ("masked", 9, None)
    first, second = group.episodes
    assert (first.number, first.reward, first.correct, first.tokens, first.versions) == (0, 1.0, True, 3, (3, 5))
    assert (second.number, second.correct, second.finish_reason, second.versions) == (1, False, "length", (2, 2))
    assert [kept.arrays()["versions"].tolist() for kept in first.rows] == [[3, 4], [5]]


def test_group_that_is_not_here_is_left_out(tmp_path: Path) -> None:
    samples = arrived(DataManager(0))
    writer = DroppedWriter(tmp_path, "model_worker/0", 4)
    assert TooOldGroups(DataManager(0), writer).keep(KeepDroppedRequest("masked", 9, samples)) == Empty()
    writer.flush()
    assert group_files(tmp_path) == []


def test_service_keeps_a_group_and_clears_it(tmp_path: Path) -> None:
    paths, data, nothing = TrialPaths(tmp_path), DataManager(2), cast(Any, None)
    endpoint = PlayedMaster([], threading.Event())
    service = ModelWorkerService(changed(), paths, WorkerParts(2, {}, endpoint, data, nothing, nothing))
    samples = arrived(data)
    service.handle(Message("keep_dropped", KeepDroppedRequest("stale", 4, samples)))
    service.handle(Message("clear", ClearRequest([sample.sample_id for sample in samples])))
    assert endpoint.replies == [Empty(), Empty()] and len(data) == 0
    for thread in threading.enumerate():
        if thread.name == "dropped group":
            thread.join()
    [file] = group_files(paths.dropped)
    assert read_group(file.path).reason == "stale" and file.path.parent.name == "model_worker-2"
