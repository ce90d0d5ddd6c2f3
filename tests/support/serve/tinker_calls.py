"""Calls of clients of the training service, without HTTP."""

import asyncio
import contextlib
from pathlib import Path

import msgspec
import numpy as np

from realsys.serve import wire
from realsys.serve.service import Service, ServiceSettings
from realsys.serve.settings import Owner
from tests.support.serve.numpy_ranks import VOCAB, Killed, NumpySampler, NumpyTrainer

SETTINGS = ServiceSettings(base_model="tiny", lora_rank=4, vocab=VOCAB, longest=16, checkpoint_every=2)


def datum(message, inputs, targets=None, **arrays):
    """Add a datum. Targets are the next tokens, 1 after the last one; arrays are float32."""
    proto, each = wire.messages(), message.data.add()
    each.model_input.add().encoded_text.tokens = np.asarray(inputs, np.int32).tobytes()
    targets = [*inputs[1:], 1] if targets is None else targets
    for name, values in {"target_tokens": np.asarray(targets, np.int64), **arrays}.items():
        array = np.asarray(values, np.int64 if name == "target_tokens" else np.float32)
        tensor = each.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = (
            array.tobytes(),
            proto.DTYPE_INT64 if array.dtype == np.int64 else proto.DTYPE_FLOAT32,
        )
        tensor.shape.extend(array.shape)
    return each


def passing(model, seq, inputs, *, loss="cross_entropy", forward_only=False, **arrays):
    """Return the body of forward_backward with one row."""
    message = wire.messages().ForwardBackwardRequest(
        model_id=model, seq_id=seq, loss_fn=loss, forward_only=forward_only
    )
    datum(message, inputs, **(arrays or {"weights": np.ones(len(inputs))}))
    return "forward" if forward_only else "forward_backward", message.SerializeToString()


def stepping(model, seq, rate=0.1):
    return "optim_step", msgspec.json.encode({"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": rate}})


def json_call(kind, model, seq, /, **fields):
    return kind, msgspec.json.encode({"model_id": model, "seq_id": seq, **fields})


class Client:
    """One owner's view of a service."""

    def __init__(self, service: Service, owner: Owner | None = None) -> None:
        self.service = service
        self.owner = owner or service.owner("")

    async def create(self, session: str, number: int = 0, seed: int = 7) -> str:
        lora = wire.Lora(4, seed=seed)
        future = await self.service.create_model(self.owner, wire.CreateModel(session, number, "tiny", lora))
        return future["model_id"]

    async def call(self, model: str, seq: int, call: tuple[str, bytes]) -> str:
        if call[0] == "load_weights":
            request = msgspec.json.decode(call[1], type=wire.LoadWeights)
            return (await self.service.load_weights(self.owner, request))["request_id"]
        return (await self.service.accept(self.owner, model, seq, *call))["request_id"]

    async def result(self, request_id: str):
        """Return the payload of a result, or the error as (category, message)."""
        async with asyncio.timeout(30):
            while (answer := await self.service.retrieve(self.owner, request_id)) is None:
                pass
        if answer.error:
            return answer.error, msgspec.json.decode(answer.payload)["error"]
        return answer.payload


@contextlib.asynccontextmanager
async def serving(folder: Path, settings: ServiceSettings = SETTINGS, trainer: NumpyTrainer | None = None):
    """Run a service. The block ends with Killed if the process would have died. Its trainer is ``service.ranks``."""
    service = Service(trainer or NumpyTrainer(folder / "snapshots"), NumpySampler(), settings, folder / "service")
    service.ranks = service._trainer
    await service.open()
    running = asyncio.create_task(service.run())
    block = asyncio.current_task()
    running.add_done_callback(lambda task: None if task.cancelled() else block.cancel())
    try:
        yield service
    except asyncio.CancelledError:
        if not running.done() or running.cancelled():
            raise
        block.uncancel()
    finally:
        running.cancel()
        ended = (await asyncio.gather(running, return_exceptions=True))[0]
        service.close()
    if not isinstance(ended, asyncio.CancelledError):
        raise ended if isinstance(ended, BaseException) else AssertionError("run ended")


__all__ = ["SETTINGS", "Client", "Killed", "datum", "json_call", "passing", "serving", "stepping"]
