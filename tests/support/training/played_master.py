"""A ModelWorker on real ranks, and the stream to its master, without the master."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from realsys.cluster.gpu_devices import GpuMeter
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.model_calls import InitializeRequest, MfcRequest, MfcShare
from realsys.train.megatron.device import Device
from realsys.train.worker.call_service import ModelWorkerService, WorkerParts
from realsys.train.worker.data_manager import DataManager
from realsys.weights.disk.writer import DiskWriter, ShardWriter
from tests.support.training.ppo_batch import make_batch
from tests.support.training.train_ranks import FORMED

REFS, ARRAYS = make_batch()
Script = Sequence[tuple[str, msgspec.Struct]]


class Message:
    """A request as the stream delivers it: encoded."""

    def __init__(self, handler: str, payload: msgspec.Struct) -> None:
        self.handler, self._payload = handler, msgspec.msgpack.encode(payload)

    def decode(self, type: Any) -> Any:
        return msgspec.msgpack.decode(self._payload, type=type)


class PlayedMaster:
    """Hands out a script of requests, then stops the loop."""

    def __init__(self, script: Script, stop: threading.Event) -> None:
        self._script, self._stop = deque(Message(*entry) for entry in script), stop
        self.replies: list[Any] = []
        self.errors: list[str] = []

    def next_request(self, timeout_s: float) -> Message | None:
        if self._script:
            return self._script.popleft()
        self._stop.set()
        return None

    def serve_in_background(self, *handlers: str) -> None:
        """The script is served in its order, on the main thread."""

    def next_background(self, timeout_s: float) -> None:
        self._stop.wait(timeout_s)

    def reply(self, request: Message, payload: msgspec.Struct) -> None:
        self.replies.append(payload)

    def reply_error(self, request: Message, exc: BaseException) -> None:
        self.errors.append(f"{type(exc).__name__}: {exc}")

    def notify(self, handler: str, payload: msgspec.Struct) -> None:
        raise AssertionError(f"nobody asked for a notice {handler}")


class FlopsMeter(GpuMeter):
    """The meter of a GPU, without the GPU."""

    def read(self, flops: float, computed: float) -> dict[str, float]:
        return {"flops": flops, "computed_flops": computed}


def own_share(request: MfcRequest) -> MfcShare:
    """Return what the master sends to this rank."""
    return request.share(FORMED[request.role].data_rank if request.role in FORMED else 0)


class PlayedWorker:
    """A ModelWorker that is to serve ``script``, and has the batch if it is one of ``holders``."""

    def __init__(self, script: Script, rank: int, device: Device, config: Config, holders: Sequence[int] = ()) -> None:
        self.stop = threading.Event()
        own = [(name, own_share(payload) if name == "mfc" else payload) for name, payload in script]
        self.endpoint, self.data = PlayedMaster(own, self.stop), DataManager(rank)
        if rank in holders:
            for name, arrays in ARRAYS.items():
                self.data.put(name, arrays)
        paths = TrialPaths.of(config)
        writer = DiskWriter(ShardWriter())
        meter = FlopsMeter(device.device, peak=1.0)
        parts = WorkerParts(rank, FORMED, self.endpoint, self.data, device, writer, meter=meter)
        self._service = ModelWorkerService(config, paths, parts)

    def serve(self) -> list[Any]:
        self._service.run(self.stop)
        assert not self.endpoint.errors
        return self.endpoint.replies


def make_config(**settings: Any) -> Config:
    return Config.model_validate({**settings, "train": {"microbatch_tokens": 64, **settings.get("train", {})}})


def call(
    handler: str, role: str, parts: list[Any], *, lr: float = 0.0, before: Sequence[str] = (), after: Sequence[str] = ()
) -> tuple[str, MfcRequest]:
    request = MfcRequest(handler, role, handler, 0, 0, [parts], {"lr": lr})
    request.pre_hooks, request.post_hooks = [*before], [*after]
    return "mfc", request


def load(role: str, folders: Mapping[str, Path], trainable: bool = True) -> tuple[str, InitializeRequest]:
    return "initialize", InitializeRequest(role, str(folders[role]), trainable)
