"""Fuzz targets: readers of stream messages and of HTTP bodies."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from realsys import model_calls, types
from realsys.cluster.http_client import reason_of
from realsys.cluster.stream import codec
from realsys.cluster.stream import codec as protocol
from realsys.errors import DecodeError, GenerationError, StreamError
from realsys.generation import client as generation_client
from realsys.generation import protocol as p
from realsys.generation.sglang import api as sglang_api
from realsys.launch.nodes import orders
from realsys.manager import messages as m
from realsys.manager.client import ManagerClient
from realsys.manager.commit_loop import ManagerService
from realsys.manager.decisions import ManagerSettings, ManagerState
from realsys.manager.ledger.journal import Journal
from realsys.manager.routes import ManagerApp
from realsys.manager.routing.servers import UpdateOrder
from realsys.train import requests
from realsys.types import PublishedVersion, ServerAddress, Ticket
from tests.support.fuzz.mutations import Spoiler, example, examples
from tests.support.fuzz.targets import Target
from tests.support.training.sample_records import group_of, single_turn

KNOBS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
EXTREMES = (0.0, 1e-320, 1e-38, 1e-7, 1e-6, 1e-3, 1.0, 2.0, -2.0, 1e30, 1e308)


#: messages between the coordinator and the agents of other nodes
ORDERS = [kind for kind in vars(orders).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]


class HttpRefused(Exception):
    """Status 4xx, or 503."""


def frames_of(rng: Any) -> list[bytes]:
    """The frames of a valid group."""
    episodes = []
    for _ in range(rng.randrange(1, 5)):
        prompt, size = rng.randrange(1, 6), rng.randrange(6)
        arrays = np.arange(prompt + size, dtype=np.int32), np.full(size, -0.5, np.float32), np.zeros(size, np.int32)
        episodes.append(single_turn(*arrays, 1.0))
    group = group_of(Ticket("t", 0, 1), episodes, started=1.0, finished=2.0)
    return [bytes(frame) for frame in codec.encode_group(group)]


def spoilt_group(spoiler: Spoiler) -> list[bytes]:
    header, payload = frames_of(spoiler.rng)
    match spoiler.rng.randrange(8):
        case 0:
            return [header, spoiler.spoil_bytes(payload)]
        case 1:
            return [header, payload, b""][: spoiler.rng.randrange(4)]
        case _:
            return [spoiler.spoil(header), payload]


def messages() -> Iterator[Target]:
    """Every message and payload of both streams."""
    yield Target("stream: group", spoilt_group, codec.decode_group, (DecodeError,), "msgpack", weight=3)
    ends: Mapping[str, tuple[Any, Any]] = {
        "to a puller": (protocol.TO_PULLER, protocol.Push),
        "to a pusher": (protocol.TO_PUSHER, protocol.PushAck | protocol.PushNack),
        "to the master": (protocol.TO_MASTER, protocol.Hello | protocol.ReplyHeader | protocol.NoticeHeader),
        "to a worker": (
            protocol.TO_WORKER,
            protocol.Welcome | protocol.Refused | protocol.RequestHeader | protocol.Ack,
        ),
    }
    for name, (decoder, kind) in ends.items():
        yield Target(
            f"stream: {name}",
            examples(kind, "msgpack"),
            lambda data, decoder=decoder: codec.decode_with(decoder, data, "message"),
            (DecodeError,),
            "msgpack",
        )
    calls = model_calls
    large = (
        calls.SamplesArrived,
        calls.MfcShare,
        calls.MfcReply,
        calls.TransferRequest,
        requests.SaveWeightsReply,
    )
    for kind in large:
        yield Target(
            f"payload: {kind.__name__}",
            examples(kind, "msgpack"),
            lambda data, kind=kind: codec.decode_message(data, kind),
            (DecodeError,),
            "msgpack",
        )
    names = re.compile(r".*(Request|Reply)|Recorded|Empty")
    sources = (types, model_calls, requests, requests)
    declared = {name: kind for source in sources for name, kind in vars(source).items()}
    others = [kind for name, kind in declared.items() if names.fullmatch(name) and kind not in large]
    others += ORDERS
    makers = [(kind, examples(kind, "msgpack")) for kind in others]

    def any_payload(spoiler: Spoiler) -> tuple[Any, bytes]:
        kind, make = spoiler.rng.choice(makers)
        return kind, make(spoiler)

    yield Target(
        "payload: the others",
        any_payload,
        lambda chosen: codec.decode_message(chosen[1], chosen[0]),
        (DecodeError,),
        "msgpack",
    )


def replies() -> Iterator[Target]:
    """Readers of replies, in the clients."""

    def answer(spoiler: Spoiler) -> bytes:
        """With as many tokens as log-probs and versions."""
        value, size = example(p.CompletionReply, spoiler.rng), spoiler.rng.randrange(1, 6)
        value["output_ids"] = list(range(size))
        value["meta_info"] |= {
            "output_token_logprobs": [[-0.5, token, None] for token in range(size)],
            "weight_versions": [["3", 1], ["4", size - 1]],
        }
        return spoiler.spoil(spoiler.encode(value))

    yield Target("reply: /generate", answer, _completion, (GenerationError,), weight=2)
    yield Target(
        "reply: SGLang",
        examples(list[sglang_api.Reply]),
        lambda data: [r.logprobs() for r in generation_client.decode_reply("SGLang", data, list[sglang_api.Reply])],
        (GenerationError,),
    )
    manager = ManagerClient(lambda: "", "")
    for kind in (m.AllocateReply, m.ScheduleReply, m.DataPosition, m.EvaluationReply):
        yield Target(
            f"reply: {kind.__name__}",
            examples(kind),
            lambda data, kind=kind: manager._decode("/call", data, kind),
            (StreamError,),
        )
    yield Target("reply: error body", examples(p.ErrorReply), reason_of, ())


def _completion(data: bytes) -> object:
    return generation_client._completion(
        "http://x", generation_client.decode_reply("http://x", data, p.CompletionReply)
    )


class Calls:
    """An ASGI app in a private event loop; one call at a time, with the token."""

    def __init__(self, app: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._app, self._loop = app, loop

    def post(self, path: str, body: bytes) -> None:
        """Raises HttpRefused where the service refuses; RuntimeError for any other status."""
        self._loop.run_until_complete(asyncio.wait_for(self._post(path, body), 60))

    async def _post(self, path: str, body: bytes) -> None:
        status: list[int] = []
        pending: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if pending:
                return pending.pop()
            return await asyncio.Event().wait()  # the caller stays

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])

        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        scope |= {"headers": [(b"authorization", b"Bearer token")], "root_path": "", "scheme": "http"}
        scope |= {"server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2), "http_version": "1.1"}
        await self._app(scope, receive, send)
        if not 200 <= status[0] < 300:
            if 400 <= status[0] < 500 or status[0] == 503:
                raise HttpRefused(status[0])
            raise RuntimeError(f"status {status[0]}")


@contextmanager
def manager(folder: Path) -> Iterator[list[Target]]:
    """Every POST of a manager with one server, a real ledger, and tickets to speak of."""
    loop = asyncio.new_event_loop()
    with ExitStack() as stack:
        stack.callback(loop.close)
        journal = stack.enter_context(Journal(folder / "ledger.jsonl"))
        state = ManagerState(ManagerSettings(8, 4, 2, 3, 0, {"train": 64, "eval": 8}))

        async def service() -> ManagerService:
            return ManagerService(state, journal)

        served = loop.run_until_complete(service())
        served.closing = True  # held calls are answered immediately
        _route_to_one_server(state)
        calls = Calls(ManagerApp(served, "token", _nothing).build(), loop)
        known: list[str] = ["t0"]

        def make(kind: Any) -> Callable[[Spoiler], bytes]:
            def one(spoiler: Spoiler) -> bytes:
                value = example(kind, spoiler.rng)
                known[:] = [ticket.ticket_id for ticket in state.ledger.running()][:8] or known
                _name(value, known, state, spoiler.rng)
                return spoiler.spoil(spoiler.encode(value))

            return one

        bodies = {
            "/allocate_rollout": m.AllocateRequest,
            "/schedule_request": m.ScheduleRequest,
            "/finish_rollout": m.FinishRequest,
            "/claim": m.ClaimRequest,
            "/trained": m.TrainedRequest,
            "/evaluate": m.EvaluateRequest,
            "/roll_back": m.RollBackRequest,
        }
        yield [
            Target(f"manager: {path}", make(kind), _call(calls, path), (HttpRefused,), weight=2)
            for path, kind in bodies.items()
        ]
        assert not served.fatal.done(), served.fatal


def _call(calls: Calls, path: str) -> Callable[[bytes], None]:
    return lambda body: calls.post(path, body)


async def _nothing() -> None: ...


def _name(value: Any, tickets: list[str], state: ManagerState, rng: Any) -> None:
    """Speak of tickets that there are, and of training sides about as new as the one that is known."""
    if "ticket_id" in value:
        value["ticket_id"] = rng.choice(tickets)
        value["attempt"] = rng.choice((0, 0, 1))
    if "eval_id" in value:
        value |= {"eval_id": f"e{rng.randrange(50)}", "split": "eval", "n": rng.randrange(1, 8)}
    if "step" in value and "incarnation" in value and "trained" not in value:
        newest = state.trainer_incarnation or f"{1:019d}"
        later = f"{int(newest) + rng.choice((-1, 1, 1)):019d}" if newest.isdigit() else newest
        value["incarnation"] = rng.choice((newest, later, later))
        value |= {"version": -1, "step": -1} if rng.random() < 0.5 else {"version": 0, "step": 0}
    elif "incarnation" in value and "worker" not in value and rng.random() < 0.7:
        value["incarnation"] = state.trainer_incarnation
    if value.get("tickets"):
        value["tickets"] = [rng.choice(tickets)]
    if value.get("trained"):
        value["trained"] = [rng.choice(tickets)]
    if value.get("dropped"):
        value["dropped"] = [[rng.choice(tickets), rng.choice(("masked", "success_rate"))]]
    if value.get("stale"):
        value["stale"] = [[rng.choice(tickets), rng.randrange(2)]]


def _route_to_one_server(state: ManagerState) -> None:
    state.servers.publish(PublishedVersion(0, "1", "/weights/v0", 0))
    state.observe_servers([ServerAddress("generation_server/0", "http://127.0.0.1:1", 1, "h", "1")])
    order = state.next_order("generation_server/0", "1", 0.0)
    assert isinstance(order, UpdateOrder)
    assert state.begin_update(order, 0.0)
    state.servers.succeeded(order, 0.1, {})


@contextmanager
def generation_server(folder: Path) -> Iterator[list[Target]]:
    """Every POST of a server with a small embedded engine."""
    import torch

    from realsys.config.schema import EmbeddedConfig, GenerationConfig
    from realsys.generation.embedded.engine import build_engine
    from realsys.generation.server import build_app
    from realsys.weights.disk.stage import DiskReader
    from tests.support.serving.generation_models import VOCAB, make_model

    torch.set_num_threads(1)
    make_model("qwen2", folder / "hf")
    config = GenerationConfig(embedded=EmbeddedConfig(max_running=4, max_queued=4, context_length=32))
    engine = build_engine(folder / "hf", config, DiskReader().stage)
    loop = asyncio.new_event_loop()
    engine.start()
    try:
        calls = Calls(build_app(engine, token="token"), loop)

        def generate(spoiler: Spoiler) -> bytes:
            value = example(p.GenerateRequest, spoiler.rng)
            value["input_ids"] = [spoiler.rng.randrange(VOCAB) for _ in range(spoiler.rng.randrange(1, 8))]
            value.setdefault("sampling_params", {})
            params = value["sampling_params"]
            value["sampling_params"] = {k: v for k, v in params.items() if spoiler.rng.random() < 0.2}
            value["sampling_params"]["max_new_tokens"] = spoiler.rng.randrange(1, 5)
            if spoiler.rng.random() < 0.3:  # let in, and then something to reckon with
                value["sampling_params"][spoiler.rng.choice(KNOBS)] = spoiler.rng.choice(EXTREMES)
                return spoiler.encode(value)
            return spoiler.spoil(spoiler.encode(value))

        def pause_and_go_on(body: bytes) -> None:
            try:
                calls.post("/pause_generation", body)
            finally:
                calls.post("/continue_generation", b"{}")

        def post(path: str) -> Callable[[bytes], None]:
            def one(body: bytes) -> None:
                try:
                    calls.post(path, body)
                finally:
                    if engine.failure is not None:  # later requests would be refused, and so would pass
                        raise RuntimeError(engine.failure)

            return one

        refused = (HttpRefused,)
        yield [
            Target("server: /generate", generate, post("/generate"), refused),
            Target("server: /update", examples(p.UpdateRequest), post("/update_weights_from_disk"), refused),
            Target("server: /pause", examples(p.PauseRequest), pause_and_go_on, refused),
            Target("server: /abort", examples(p.AbortRequest), post("/abort_request"), refused),
        ]
        calls.post("/generate", msgspec.json.encode({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}))
    finally:
        engine.close()
        loop.close()
