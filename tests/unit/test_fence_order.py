"""Every act that others see is preceded by the question whether the lease still holds, with nothing between them.

The check says yes until the moment under test and then no for ever, as it does in a process that was suspended there.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from realsys.admission.journal import Journal
from realsys.admission.manager import ManagerState
from realsys.admission.messages import DataPosition
from realsys.admission.settings import ManagerSettings
from realsys.cluster.http_guard import Guard
from realsys.cluster.memory_store import MemoryNameStore
from realsys.config.schema import Config
from realsys.errors import Fenced, KeyMissing, StreamError
from realsys.master.checkpoints import commit
from realsys.master.publish import Publisher
from realsys.rollout.manager_client import ManagerClient
from realsys.stream.push_pull import Puller, Pusher
from realsys.stream.request_reply import MasterStream, WorkerEndpoint
from realsys.train.checkpoint_files import CheckpointState
from realsys.types import Empty, Piece, SaveWeightsReply, SaveWeightsRequest, ShardInfo, TensorInfo
from realsys.weights import manifest
from realsys.weights.files import write_safetensors
from tests.stream_parts import BOUND_S, make_group, pulling
from workers.manager_service import ManagerService


class Lease:
    """``left``: how many times it still holds; None: until it is lost."""

    def __init__(self, left: int | None = None) -> None:
        self.left, self.asked = left, 0

    def check(self) -> None:
        self.asked += 1
        if self.left is not None and self.asked > self.left:
            raise Fenced("this worker must stop")

    def lose(self) -> None:
        self.left = 0


@pytest.mark.parametrize(("holds", "on_disk"), [(0, 0), (1, 1)])
def test_publication_stops_before_the_manifest_and_before_the_name_store(tmp_path: Path, holds: int, on_disk: int):
    store, lease, model = MemoryNameStore(), Lease(holds), tmp_path / "hf"
    model.mkdir()

    async def save(request: SaveWeightsRequest) -> list[SaveWeightsReply]:
        path = Path(request.directory) / "model-00001-of-00001.safetensors"
        file, starts = write_safetensors(path, {"w": ("F32", [1], 4)}, lambda name: np.zeros(4, np.uint8))
        folder = path.parent.name.removesuffix(".tmp")
        tensor = TensorInfo("F32", [1], "0" * 16, [Piece(file.file, starts["w"], 4, "0" * 16, folder=folder)])
        return [SaveWeightsReply([ShardInfo(file.file, file.size, file.checksum, {"w": tensor})])]

    publisher = Publisher(
        store=store,
        key="model_version",
        root=tmp_path / "weights",
        model_dir=model,
        incarnation="1",
        keep=2,
        save=save,
        check_alive=lease.check,
    )
    with pytest.raises(Fenced):
        asyncio.run(publisher.publish(0, 0))
    assert len(manifest.complete_versions(tmp_path / "weights")) == on_disk
    with pytest.raises(KeyMissing):
        store.get("model_version")
    assert publisher.newest is None
    store.close()


def test_checkpoint_stops_before_its_state_is_written(tmp_path: Path):
    tmp = tmp_path / "step-00000001.tmp"
    tmp.mkdir()
    with pytest.raises(Fenced):
        commit(tmp, _state(), [], Lease(0).check)
    assert not list(tmp.iterdir()) and not (tmp_path / "step-00000001").exists()
    assert commit(tmp, _state(), [], Lease(1).check).name == "step-00000001"


def _state() -> CheckpointState:
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


def test_group_is_not_sent_and_the_push_ends():
    lease = Lease()

    async def run(address: str) -> None:
        pusher = Pusher(lambda dp: address, [0], "rollout_worker/0", check_alive=lease.check)
        await pusher.push(make_group("t0"))
        lease.lose()
        with pytest.raises(Fenced):
            await pusher.push(make_group("t1"))
        await pusher.close()

    with pulling() as puller:
        asyncio.run(run(puller.address))
        assert puller.tickets == ["t0"]


def test_stored_group_is_not_acknowledged():
    """Suspended between storing and acknowledging: the sender keeps it, and the successor gets it again."""
    lease = Lease()
    puller = Puller(check_alive=lease.check)
    stored = []

    async def run() -> None:
        pusher = Pusher(lambda dp: puller.address, [0], "rollout_worker/0")
        push = asyncio.create_task(pusher.push(make_group("t0")))

        def store(group) -> None:
            stored.append(group)
            lease.lose()

        deadline = time.monotonic() + BOUND_S
        with pytest.raises(Fenced):
            while time.monotonic() < deadline:
                await asyncio.sleep(0.001)
                puller.drain(store)
        assert not push.done()
        await pusher.close()
        with pytest.raises(StreamError):
            await push

    asyncio.run(run())
    puller.close()
    assert len(stored) == 1


def test_request_of_the_master_is_not_sent():
    async def run() -> None:
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

    async def run() -> None:
        async def answer(request: web.Request) -> web.Response:
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


@pytest.mark.parametrize(("holds", "served"), [(0, 0), (1, 1)])
def test_service_neither_takes_a_request_nor_answers_one_that_it_took(holds: int, served: int):
    """No answer at all: in a worker the check does not return."""
    taken, sent = [], []

    async def app(scope, receive, send) -> None:
        taken.append(await receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message) -> None:
        sent.append(message)

    async def run() -> None:
        guard = Guard(app, token=None, max_body=10, error=str, check_alive=Lease(holds).check)
        call = asyncio.create_task(guard({"type": "http", "method": "POST", "path": "/", "headers": []}, receive, send))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not call.done()
        call.cancel()
        await asyncio.wait({call})

    asyncio.run(run())
    assert (len(taken), sent) == (served, [])


def test_ledger_gets_no_record(tmp_path: Path):
    async def run() -> None:
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
