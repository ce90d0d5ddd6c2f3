"""Every act that others see is preceded by the question whether the lease still holds, with nothing between them.

The check says yes until the moment under test and then no for ever, as it does in a process that was suspended there.
"""

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from aiohttp import web

from realsys.cluster.http_server import Admission, Guard
from realsys.cluster.stream.master_stream import MasterStream
from realsys.cluster.stream.push_pull import Puller, Pusher
from realsys.cluster.stream.worker_endpoint import WorkerEndpoint
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import CheckpointError, Fenced, KeyMissing, StreamError
from realsys.generation.client import GenerationClient
from realsys.manager.client import ManagerClient
from realsys.manager.commit_loop import ManagerService
from realsys.manager.decisions import ManagerSettings, ManagerState
from realsys.manager.ledger.journal import Journal
from realsys.manager.messages import DataPosition
from realsys.model_calls import Empty
from realsys.train.checkpoint.checkpoint_files import CheckpointState
from realsys.train.master.checkpoints import Checkpoints, CheckpointSources, commit, prepare
from realsys.train.master.publish import Publisher, VersionKey
from realsys.train.master.recorder import StepRecorder
from realsys.train.master.step_statistics import StepLog
from realsys.train.requests import SaveWeightsReply
from realsys.types import PublishedVersion
from realsys.weights.contract import PublisherParts
from realsys.weights.disk import manifest
from realsys.weights.disk.manifest import ShardInfo, StoredPiece, TensorInfo
from realsys.weights.disk.plain_folders import write_safetensors
from realsys.weights.disk.transport import DiskPublisher
from tests.support.ledger.memory_store import MemoryNameStore
from tests.support.streams.stream_parts import BOUND_S, make_group, pulling
from tests.support.streams.weight_ranks import WeightRanks


class Lease:
    """``left``: how many times it still holds; None: until it is lost."""

    def __init__(self, left=None):
        self.left, self.asked = left, 0

    def check(self):
        self.asked += 1
        if self.left is not None and self.asked > self.left:
            raise Fenced("this worker must stop")

    def lose(self):
        self.left = 0


@pytest.mark.parametrize(("holds", "on_disk"), [(0, 0), (1, 1)])
def test_fenced_publication_stops_before_manifest_and_names(tmp_path, holds, on_disk):
    store, lease, model = MemoryNameStore(), Lease(holds), tmp_path / "hf"
    model.mkdir()

    async def save(request):
        path = Path(request.plan.directory) / "model-00001-of-00001.safetensors"
        file, starts = write_safetensors(path, {"w": ("F32", [1], 4)}, lambda name: np.zeros(4, np.uint8))
        folder = path.parent.name.removesuffix(".tmp")
        tensor = TensorInfo("F32", [1], "0" * 16, [StoredPiece(path.name, starts["w"], 4, "0" * 16, folder=folder)])
        return [SaveWeightsReply([ShardInfo(path.name, file.size, file.checksum, {"w": tensor})])]

    weights = DiskPublisher(PublisherParts(tmp_path / "weights", model, "1"), keep=2)
    key = VersionKey(store, "model_version", check_alive=lease.check)
    publisher = Publisher(weights, WeightRanks(save), key, incarnation="1")
    with pytest.raises(Fenced):
        asyncio.run(publisher.publish(0, 0))
    assert len(manifest.complete_versions(tmp_path / "weights")) == on_disk
    with pytest.raises(KeyMissing):
        store.get("model_version")
    assert publisher.newest is None
    store.close()


def test_checkpoint_stops_before_its_state_is_written(tmp_path):
    tmp = tmp_path / "step-00000001.tmp"
    tmp.mkdir()
    with pytest.raises(Fenced):
        commit(tmp, _state(), [], Lease(0).check)
    assert not list(tmp.iterdir()) and not (tmp_path / "step-00000001").exists()
    with pytest.raises(Fenced):  # suspended while it was synced
        commit(tmp, _state(), [], Lease(1).check)
    assert not (tmp_path / "step-00000001").exists()
    assert commit(tmp, _state(), [], Lease(2).check).name == "step-00000001"


def _state():
    return CheckpointState(
        step=1,
        version=1,
        seed=1,
        batch_groups=1,
        position=DataPosition(cursor=0, pending=[], prompts=1, seed=1),
        roles={},
        kl={},
        config_digest="",
        time=0.0,
    )


def test_checkpoint_begins_with_nothing_removed(tmp_path):
    """A successor may be writing the folder that would go."""
    theirs = tmp_path / "checkpoints" / "step-00000001.2.tmp"
    theirs.mkdir(parents=True)

    async def position():
        raise AssertionError("asked for where the data is")

    config = Config.model_validate({"checkpoint": {"every_steps": 1}})
    checkpoints = Checkpoints(
        config,
        TrialPaths(tmp_path),
        CheckpointSources(meshes={}, workers=cast(Any, None), position=position, kl=dict),
        incarnation="1",
        check_alive=Lease(0).check,
    )
    with pytest.raises(CheckpointError, match="this worker must stop"):
        asyncio.run(checkpoints.after_step(1))
    assert theirs.is_dir()


def test_rank_of_earlier_incarnation_finds_no_folder(tmp_path):
    """It was suspended right before it opened its file; the step is being saved again."""
    before, now = prepare(tmp_path, 1, "1"), prepare(tmp_path, 1, "2")
    with pytest.raises(FileNotFoundError):
        (before / "actor-00001-of-00001.safetensors").write_bytes(b"old")
    assert commit(now, _state(), []) == tmp_path / "step-00000001"


def test_records_of_two_training_sides_are_written_apart(tmp_path):
    paths = TrialPaths(tmp_path)
    recorders = [StepRecorder(Config(), paths, {}, cast(Any, None), incarnation) for incarnation in ("1", "2")]
    assert recorders[0].tmp(7) != recorders[1].tmp(7)


def test_step_log_gets_no_line(tmp_path):
    lease, path = Lease(1), tmp_path / "steps.jsonl"
    log = StepLog(path, lease.check)
    log.append({"kind": "train", "step": 1})
    with pytest.raises(Fenced):
        log.append({"kind": "train", "step": 2})
    log.close()
    assert path.read_bytes().count(b"\n") == 1


def test_export_is_not_written(tmp_path):
    weights = DiskPublisher(PublisherParts(tmp_path, tmp_path, "1"), keep=2)
    key = VersionKey(MemoryNameStore(), "model_version", check_alive=Lease(0).check)
    publisher = Publisher(weights, cast(Any, None), key, incarnation="1")
    publisher.newest = PublishedVersion(1, "1", str(tmp_path / "v00000001.1"), 1)
    with pytest.raises(Fenced):
        asyncio.run(publisher.export(tmp_path / "final" / "model"))
    assert not (tmp_path / "final").exists()


def test_group_is_not_sent_and_the_push_ends():
    lease = Lease()

    async def run(address):
        pusher = Pusher(lambda dp: address, [0], "rollout_worker/0", check_alive=lease.check)
        await pusher.push(make_group("t0"))
        lease.lose()
        with pytest.raises(Fenced):
            await pusher.push(make_group("t1"))
        assert not pusher._links[0]._pending, "it would be sent again"
        await pusher.close()

    with pulling() as puller:
        asyncio.run(run(puller.address))
        assert puller.tickets == ["t0"]


@pytest.mark.parametrize("holds", [0, 1])
def test_group_is_not_stored_nor_acknowledged(holds):
    """Suspended before or after it was stored: the sender keeps it, and the successor gets it again."""
    puller = Puller(check_alive=Lease(holds).check)
    stored = []

    async def run():
        pusher = Pusher(lambda dp: puller.address, [0], "rollout_worker/0")
        push = asyncio.create_task(pusher.push(make_group("t0")))

        deadline = time.monotonic() + BOUND_S
        with pytest.raises(Fenced):
            while time.monotonic() < deadline:
                await asyncio.sleep(0.001)
                puller.drain(stored.append)
        assert not push.done()
        await pusher.close()
        with pytest.raises(StreamError):
            await push

    asyncio.run(run())
    puller.close()
    assert len(stored) == holds


def test_request_of_the_master_is_not_sent():
    async def run():
        lease = Lease()
        stream = MasterStream(check_alive=lease.check)
        endpoint = WorkerEndpoint(0, stream.address)
        await stream.barrier([0], BOUND_S)
        lease.lose()
        with pytest.raises(Fenced):
            stream.request(0, "save_weights", Empty(), Empty)
        assert await asyncio.to_thread(endpoint.next_request, 0.05) is None
        await asyncio.to_thread(endpoint.close)
        stream.close()

    asyncio.run(run())


def test_call_of_the_manager_is_not_made():
    asked = []

    async def run():
        async def answer(request):
            asked.append(request.path)
            return web.json_response({})

        app = web.Application()
        app.add_routes([web.get("/status", answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        client = ManagerClient(lambda: f"http://{host}:{port}", "t", check_alive=Lease(1).check)
        await client.status()
        with pytest.raises(Fenced):
            await client.status()
        await client.close()
        await runner.cleanup()

    asyncio.run(run())
    assert asked == ["/status"]


def test_call_of_a_server_is_not_made():
    """Above all not one that has it load weights."""
    asked = []

    async def run():
        async def answer(request):
            asked.append(request.path)
            return web.json_response({"success": True, "message": ""})

        app = web.Application()
        app.add_routes([web.post("/update_weights_from_disk", answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        client = GenerationClient(BOUND_S, check_alive=Lease(1).check)
        await client.update_weights(f"http://{host}:{port}", "/weights", 1, BOUND_S)
        with pytest.raises(Fenced):
            await client.update_weights(f"http://{host}:{port}", "/weights", 2, BOUND_S)
        await client.close()
        await runner.cleanup()

    asyncio.run(run())
    assert asked == ["/update_weights_from_disk"]


@pytest.mark.parametrize(("holds", "served"), [(0, 0), (1, 1)])
def test_fenced_service_takes_and_answers_no_request(holds, served):
    """No answer at all: in a worker the check does not return."""
    taken, sent = [], []

    async def app(scope, receive, send):
        taken.append(await receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message):
        sent.append(message)

    async def run():
        guard = Guard(app, Admission(None, check_alive=Lease(holds).check), max_body=10, error=str)
        call = asyncio.create_task(guard({"type": "http", "method": "POST", "path": "/", "headers": []}, receive, send))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not call.done()
        call.cancel()
        await asyncio.wait({call})

    asyncio.run(run())
    assert (len(taken), sent) == (served, [])


def test_ledger_gets_no_record(tmp_path):
    async def run():
        with Journal(tmp_path / "ledger.jsonl") as journal:
            state, lease = ManagerState(ManagerSettings.of(Config(), {"train": 8})), Lease(0)
            service = ManagerService(state, journal, check_alive=lease.check)
            service.commit()  # nothing to write: nothing to ask
            assert lease.asked == 0
            state.outbox.append(object())  # type: ignore[arg-type]
            with pytest.raises(Fenced):
                service.commit()

    asyncio.run(run())
    assert (tmp_path / "ledger.jsonl").read_bytes() == b""
