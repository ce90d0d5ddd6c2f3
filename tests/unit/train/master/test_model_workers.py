"""Each ModelWorker is sent its own part of a request, and nothing of the others."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from realsys.cluster.stream.codec import encode_message
from realsys.cluster.topology import Mesh
from realsys.config.allocation import ParallelLayout
from realsys.model_calls import ClearRequest, KeepDroppedRequest, MfcRequest, MfcShare, Transfer, TransferRequest
from realsys.train.master.model_workers import ModelWorkers
from realsys.train.requests import HoldRequest
from tests.support.training.sample_records import make_ref

MESH = Mesh(ParallelLayout(data=2, tensor=2), (0, 1, 2, 3))
REFS = {name: make_ref(name, 4, 2, 1.0, False, 0) for name in "abcd"}


class SentStream:
    """Keeps the payload of each worker."""

    def __init__(self) -> None:
        self.payloads: dict[int, bytes] = {}
        self.handler = ""

    def scatter(self, payloads: dict[int, bytes], handler: str, *args: Any, **kwargs: Any) -> asyncio.Future[list[Any]]:
        self.payloads, self.handler = payloads, handler
        return asyncio.get_running_loop().create_future()


def sent(send: Any, kind: Any) -> dict[int, Any]:
    """Return worker -> the request that it decodes."""

    async def body() -> dict[int, bytes]:
        stream: Any = SentStream()
        send(ModelWorkers(stream, {"actor": MESH}, 1.0))
        return stream.payloads

    return {worker: msgspec.msgpack.decode(data, type=kind) for worker, data in asyncio.run(body()).items()}


def test_rank_is_sent_sequences_of_its_data_rank() -> None:
    a, b, c, d = REFS.values()
    request = MfcRequest("actor_inf", "actor", "actor_inf", 3, 2, [[[a], [b, c]], [[d], []]], {"lr": 0.5})
    shares = sent(lambda workers: workers.run_mfc(MESH, request), MfcShare)
    assert {worker: share.own for worker, share in shares.items()} == {
        0: [[a], [d]],
        1: [[a], [d]],
        2: [[b, c], []],
        3: [[b, c], []],
    }
    assert {(share.request.step, share.request.args["lr"]) for share in shares.values()} == {(3, 0.5)}
    assert not any(share.request.minibatches for share in shares.values())


def test_worker_is_sent_its_transfers_and_arrays_only() -> None:
    requests = {w: TransferRequest([Transfer(0, [w], ["a"], ["tokens"])], [REFS["a"]]) for w in (1, 3)}
    encoded = {worker: encode_message(request) for worker, request in requests.items()}
    assert sent(lambda workers: workers.transfer(encoded), TransferRequest) == requests
    cleared = sent(lambda workers: workers.clear({2: ["a", "b"], 3: ["c"]}, ["values"]), ClearRequest)
    assert cleared == {2: ClearRequest(["a", "b"], ["values"]), 3: ClearRequest(["c"], ["values"])}
    held = sent(lambda workers: workers.hold(5, {2: {"tokens": ["a"]}}), HoldRequest)
    assert held == {worker: HoldRequest(5, {"tokens": ["a"]} if worker == 2 else {}) for worker in range(4)}


def test_too_old_group_is_sent_to_its_owner() -> None:
    async def body() -> SentStream:
        stream: Any = SentStream()
        ModelWorkers(stream, {"actor": MESH}, 1.0).keep_dropped({1: KeepDroppedRequest("masked", 4, [])})
        return stream

    stream = asyncio.run(body())
    assert stream.handler == "keep_dropped" and stream.payloads.keys() == {1}
    assert msgspec.msgpack.decode(stream.payloads[1], type=KeepDroppedRequest).next_version == 4
