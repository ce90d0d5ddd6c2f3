"""The Tinker protocol on the wire: JSON bodies, and the protobuf messages of the package tinker. No state.

A datum has inputs x[0..n) and targets t[0..n). It becomes a row of n + 1 tokens, x and t[n-1]: the log-prob of the
token at i + 1 is that of target t[i]. So a target must be the next input token; one that is not (a padded prompt) is
left out if it has no weight, and its log-prob in the reply is 0.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from realsys.algorithm.client_loss_settings import CONFIGS, problem_of
from realsys.cluster.http_server import RefusedRequest
from realsys.errors import ConfigError
from realsys.serve.contract import CallRefused, ClientRow, Passed, Sampled, Sampling
from realsys.types import is_temperature

_NO_LOGPROB = -99999.0  # pads the log-probs of top tokens
_CHUNK = 5_000_000  # bytes of the rows in one call of the SDK; smaller ones make shorter turns
_INSTALL = "needs the package tinker: run pip install 'realsys[tinker]'"


@functools.cache
def messages() -> Any:
    """Return the module of the protobuf messages. Raises ConfigError if the package tinker is not installed.

    The file is loaded alone: the package itself imports torch.
    """
    found = importlib.util.find_spec("tinker")
    path = Path(str(found.origin)).parent / "proto/tinker_public_pb2.py" if found is not None else None
    spec = importlib.util.spec_from_file_location("tinker_public_pb2", path) if path and path.is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigError("train.loop", "serve", _INSTALL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- JSON bodies. Fields that change nothing here (tags, metadata, times to live) are not read.


class Optimizer(msgspec.Struct):
    """Optimizer of a model; only adamw."""

    type: str = "adamw"


class Lora(msgspec.Struct):
    """``train_unembed`` is True in the SDK by default, and accepted: the head is not trained."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(msgspec.Struct):
    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: Lora | None = None
    optimizer_config: Optimizer = msgspec.field(default_factory=Optimizer)


class AdamParams(msgspec.Struct):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(msgspec.Struct):
    model_id: str
    seq_id: int
    adam_params: AdamParams | None = None


class SaveWeights(msgspec.Struct):
    model_id: str
    seq_id: int
    path: str | None = None
    overwrite: bool = False


class SaveForSampler(msgspec.Struct):
    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"


class LoadWeights(msgspec.Struct):
    """Into the model ``model_id``, or into a new one of a session (``session_id``, ``model_seq_id``)."""

    path: str
    optimizer: bool
    model_id: str = ""
    seq_id: int = 0
    session_id: str = ""
    model_seq_id: int = 0
    base_model: str | None = None
    optimizer_config: Optimizer | None = None
    seed: int = 0  # not of the protocol: of the adapter that the weights replace


class CreateSampler(msgspec.Struct):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class SamplingParams(msgspec.Struct):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class InputChunk(msgspec.Struct):
    type: str
    tokens: list[int] = []


class ModelInput(msgspec.Struct):
    chunks: list[InputChunk]


class Sample(msgspec.Struct):
    """``target_prompt_logprobs`` and the fields after it are refused unless they have their defaults."""

    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None


def sampling(request: Sample, vocab: int, longest: int) -> tuple[list[int], Sampling]:
    """Return prompt and settings. Raises CallRefused with the name of the field that is wrong or not supported."""
    params = request.sampling_params
    for name in Sample.__struct_fields__[Sample.__struct_fields__.index("target_prompt_logprobs") :]:
        if getattr(request, name):
            hint = ": the loss stable_reinforce needs it, whose formula is closed" if name.startswith("record_") else ""
            raise CallRefused(f"{name} is not supported here{hint}")
    prompt: list[int] = []
    for number, chunk in enumerate(request.prompt.chunks):
        if chunk.type != "encoded_text":
            raise CallRefused(f"prompt.chunks[{number}]: {chunk.type} is not supported: only encoded_text")
        prompt += chunk.tokens
    limit = longest - len(prompt)
    most = limit if params.max_tokens is None else params.max_tokens
    stop = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
    rules = (
        (prompt and all(0 <= token < vocab for token in prompt), f"prompt must have tokens from 0 to {vocab - 1}"),
        (
            1 <= most <= limit,
            f"max_tokens must be 1 to {limit}: rows have at most {longest} tokens, the prompt {len(prompt)}",
        ),
        (1 <= request.num_samples <= 1024, "num_samples must be 1 to 1024"),
        (is_temperature(params.temperature), "temperature must be 0, or at least 1e-6 and finite"),
        (0 < params.top_p <= 1, "top_p must be above 0 and at most 1"),
        (params.top_k == -1 or params.top_k >= 1, "top_k must be -1 or at least 1"),
        (params.seed is None or 0 <= params.seed < 1 << 63, "seed must be 0 to 2**63 - 1"),
        (0 <= request.topk_sample_logprobs <= 20, "topk_sample_logprobs must be 0 to 20"),
        (params.stop is None or (stop and "" not in stop), "stop must not be empty: completions end at EOS"),
    )
    for holds, problem in rules:
        if not holds:
            raise CallRefused(problem)
    return prompt, Sampling(
        max_tokens=most,
        n=request.num_samples,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        stop=tuple(each for each in stop if isinstance(each, str)),
        stop_token_ids=tuple(each for each in stop if isinstance(each, int)),
        seed=params.seed,
        top_logprobs=request.topk_sample_logprobs,
    )


# ---- requests in protobuf


def inflate(body: bytes, encoding: str, limit: int) -> bytes:
    """Return the body without its Content-Encoding. Raises RefusedRequest unless it is zstd within ``limit``."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise RefusedRequest(415, f"Content-Encoding {encoding[:40]} is not supported: only zstd")
    import zstandard

    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            plain: bytes = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise RefusedRequest(400, f"the body is not zstd: {error}") from None
    if len(plain) > limit:
        raise RefusedRequest(413, f"the body is over the limit of {limit} bytes")
    return plain


def forward_backward_request(body: bytes) -> Any:
    """Return the message ForwardBackwardRequest. Raises RefusedRequest if it is none."""
    from google.protobuf.message import DecodeError

    message = messages().ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise RefusedRequest(400, f"the body is not a ForwardBackwardRequest: {error}") from None
    return message


def loss_config(message: Any) -> dict[str, float]:
    """Return the settings of the loss. Raises CallRefused for a loss that is not computed here, and for texts."""
    if message.loss_fn not in CONFIGS:
        raise CallRefused(f"loss_fn {message.loss_fn!r} is not computed here: choose one of {', '.join(CONFIGS)}")
    config = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if not value.HasField("number"):
            raise CallRefused(f"loss_fn_config.{name} must be a number")
        config[name] = value.number
    for name, number in config.items():
        if not math.isfinite(number):
            raise CallRefused(f"loss_fn_config.{name} must be finite")
    if problem := problem_of(message.loss_fn, config):
        raise CallRefused(f"loss_fn_config: {problem}")
    return config


def client_rows(message: Any, vocab: int, longest: int, most_tokens: int) -> list[ClientRow]:
    """Return the rows of a ForwardBackwardRequest. Raises CallRefused with datum and field."""
    if not message.data:
        raise CallRefused("data must have at least one datum")
    rows, tokens = [], 0
    for number, datum in enumerate(message.data):
        try:
            rows.append(_client_row(datum, message.loss_fn, vocab, longest))
        except CallRefused as error:
            raise CallRefused(f"datum {number}: {error}") from None
        tokens += len(rows[-1].tokens)
        if tokens > most_tokens:
            raise CallRefused(f"datum {number}: a call has at most {most_tokens} tokens: send fewer rows in each call")
    return rows


_MASKS = ("mask", "sequence_ratio_mask")


def _client_row(datum: Any, loss: str, vocab: int, longest: int) -> ClientRow:
    parts = []
    for chunk in datum.model_input:
        kind = next((name for name in ("image", "dmel") if chunk.HasField(name)), "")
        if kind or len(chunk.encoded_text.tokens) % 4:
            raise CallRefused(f"model_input: {kind or 'torn tokens'} not supported: only encoded text")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
    inputs = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    n = len(inputs)
    if not 1 <= n < longest:
        raise CallRefused(f"model_input has {n} tokens: must be 1 to {longest - 1}")
    weight = "weights" if loss == "cross_entropy" else "advantages"
    needed = ["target_tokens"] + ([] if loss == "cross_entropy" else ["logprobs", weight])
    needed += ["sequence_ratio_mask"] if loss == "gspo" else []
    allowed = {*needed, weight, "mask"}
    given = set(datum.loss_fn_inputs)
    for name in sorted(given - allowed) + [each for each in needed if each not in given]:
        raise CallRefused(f"loss_fn_inputs.{name}: {loss} {'needs' if name in allowed else 'does not use'} it")
    arrays = {name: _array(name, tensor, n) for name, tensor in datum.loss_fn_inputs.items()}
    targets = arrays["target_tokens"].astype(np.int64)
    if (targets != arrays["target_tokens"]).any():
        raise CallRefused("loss_fn_inputs.target_tokens must be whole numbers")
    for name, ids in (("model_input", inputs), ("loss_fn_inputs.target_tokens", targets)):
        if ids.min() < 0 or ids.max() >= vocab:
            raise CallRefused(f"{name}: tokens must be 0 to {vocab - 1}")
    tokens = np.append(inputs, targets[-1:]).astype(np.int32)
    weights = arrays.get(weight, np.ones(n, np.float32)).astype(np.float32)
    is_next = targets == tokens[1:]
    if loss == "cross_entropy" and weight not in arrays:
        weights = is_next.astype(np.float32)
    chosen = is_next.copy()
    for name in _MASKS:
        if name in arrays:
            if not np.isin(arrays[name], (0, 1)).all():
                raise CallRefused(f"loss_fn_inputs.{name} must be 0 or 1")
            chosen &= arrays[name] != 0
    for position in np.flatnonzero((weights != 0) & ~chosen)[:1]:
        why = "is outside the mask" if is_next[position] else "its target is not the next input token"
        raise CallRefused(f"loss_fn_inputs.{weight}[{position}] is not 0, and {why}")
    return ClientRow(
        tokens=tokens,
        loss_mask=np.append(False, chosen),
        logprobs=arrays.get("logprobs", np.zeros(n, np.float32))[chosen].astype(np.float32),
        advantages=weights[chosen],
    )


def _array(name: str, tensor: Any, n: int) -> npt.NDArray[Any]:
    """Return a tensor of shape [n] or [n, 1] as numbers [n]. Raises CallRefused."""
    name = f"loss_fn_inputs.{name}"
    proto = messages()
    dtype = {proto.DTYPE_FLOAT32: np.float32, proto.DTYPE_INT64: np.int64}.get(tensor.dtype)
    if dtype is None:
        raise CallRefused(f"{name} must be float32 or int64")
    if list(tensor.shape) not in ([], [n], [n, 1]):
        raise CallRefused(f"{name} has the shape {list(tensor.shape)}: must be [{n}], one number per input token")
    try:
        if tensor.HasField("sparse_csr"):
            values = np.zeros(n, dtype)
            csr = tensor.sparse_csr
            rows, columns = np.frombuffer(csr.crow_indices, np.int64), np.frombuffer(csr.col_indices, np.int64)
            listed = np.frombuffer(csr.values, dtype)
            counts = np.diff(rows)
            if list(tensor.shape) != [n, 1] or len(rows) != n + 1 or rows[0] != 0 or rows[-1] != len(listed):
                raise ValueError
            if len(columns) != len(listed) or columns.any() or ((counts != 0) & (counts != 1)).any():
                raise ValueError
            values[counts == 1] = listed
        else:
            values = np.frombuffer(tensor.dense, dtype)
    except ValueError:
        raise CallRefused(f"{name}: not a tensor of shape {list(tensor.shape)}") from None
    if len(values) != n:
        raise CallRefused(f"{name} has {len(values)} numbers, and there are {n} input tokens")
    if not np.isfinite(values).all():
        raise CallRefused(f"{name} must be finite")
    return values


# ---- replies in protobuf


def forward_backward_output(rows: Sequence[ClientRow], passed: Passed) -> bytes:
    """Encode ForwardBackwardOutput: for each datum log-probs of the length of its input."""
    proto = messages()
    arrays = []
    for row, logprobs in zip(rows, passed.logprobs, strict=True):
        array = np.zeros(len(row.tokens) - 1, np.float32)
        array[row.loss_mask[1:]] = logprobs
        arrays.append(array)
    offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
    field = proto.BatchedTensor(data=b"".join(map(bytes, arrays)), offsets=offsets.tobytes(), dtype=proto.DTYPE_FLOAT32)
    record = proto.ArrayRecord(num_datums=len(arrays))
    record.fields["logprobs"].CopyFrom(field)
    reply = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record])
    for name, value in passed.metrics.items():
        reply.metrics[name] = value
    encoded: bytes = reply.SerializeToString(deterministic=True)
    return encoded


def sample_response(samples: Sequence[Sampled], top_k: int) -> bytes:
    """Encode SampleResponse."""
    proto = messages()
    reply = proto.SampleResponse()
    for sample in samples:
        sequence = reply.sequences.add(
            stop_reason=proto.STOP_REASON_STOP if sample.stopped else proto.STOP_REASON_LENGTH,
            tokens=np.asarray(sample.tokens, np.int32).tobytes(),
            logprobs=np.asarray(sample.logprobs, np.float32).tobytes(),
        )
        if top_k and sample.top is not None:
            ids = np.zeros((len(sample.top), top_k), np.int32)
            logprobs = np.full((len(sample.top), top_k), _NO_LOGPROB, np.float32)
            for position, pairs in enumerate(sample.top):
                for rank, (token, logprob) in enumerate(pairs[:top_k]):
                    ids[position, rank], logprobs[position, rank] = token, logprob
            sequence.topk_sampled_logprobs.CopyFrom(
                proto.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=top_k, length=len(ids))
            )
    encoded: bytes = reply.SerializeToString(deterministic=True)
    return encoded


def failed(error: str, category: str) -> bytes:
    """Encode RequestFailedResponse; ``category`` is user or server."""
    return msgspec.json.encode({"error": error, "category": category})


def client_config(tokens_per_call: int) -> Mapping[str, object]:
    """Return what the SDK is told at its start. A token of a chunk has at least 12 bytes in the SDK's estimate."""
    return {
        "pjwt_auth_enabled": False,
        "parallel_fwdbwd_chunks": True,
        "proto_compress_fwdbwd": False,
        "fwdbwd_max_chunk_bytes_count": min(_CHUNK, 12 * tokens_per_call),
        "sample_use_retrieve_futures": False,
        "sample_join_sampling_session": True,
        "custom_loss_server_side": False,
        "use_pyqwest_transport": False,
    }
