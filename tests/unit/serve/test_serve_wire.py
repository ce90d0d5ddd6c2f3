"""Rows of a client from protobuf: what is left out, and what is refused by name."""

import msgspec
import numpy as np
import pytest

from realsys.cluster.http_server import RefusedRequest
from realsys.serve import wire
from realsys.serve.contract import CallRefused, Passed
from tests.support.needs import need_package
from tests.support.serve.tinker_calls import datum


@pytest.fixture(autouse=True)
def tinker():
    need_package("tinker")


def rows_of(loss, *data, **arrays):
    message = wire.messages().ForwardBackwardRequest(loss_fn=loss)
    for inputs, targets in data:
        datum(message, inputs, targets, **arrays)
    return wire.client_rows(message, vocab=11, longest=8, most_tokens=12)


def test_padded_prompt_is_left_out_of_the_row():
    """As the loops of tinker-cookbook make it: targets and log-probs of the prompt are 0."""
    (row,) = rows_of(
        "importance_sampling", ([5, 6, 7, 8], [0, 0, 8, 9]), logprobs=[0, 0, -1, -2], advantages=[0, 0, 0.5, 0.5]
    )
    assert row.tokens.tolist() == [5, 6, 7, 8, 9] and row.tokens.dtype == np.int32
    assert row.loss_mask.tolist() == [False, False, False, True, True]
    assert row.logprobs.tolist() == [-1, -2] and row.advantages.tolist() == [0.5, 0.5]
    reply = wire.messages().ForwardBackwardOutput()
    reply.ParseFromString(wire.forward_backward_output([row], Passed([np.float32([-3, -4])], {"loss:sum": 1.5})))
    (record,) = reply.loss_fn_outputs
    assert np.frombuffer(record.fields["logprobs"].data, np.float32).tolist() == [0, 0, -3, -4]
    assert np.frombuffer(record.fields["logprobs"].offsets, np.int64).tolist() == [0, 16]
    assert dict(reply.metrics) == {"loss:sum": 1.5} and record.num_datums == 1


def test_gspo_takes_the_ratio_over_its_mask():
    arrays = {"logprobs": [-1, -1, -1], "advantages": [0, 1, 1], "sequence_ratio_mask": [0, 1, 1]}
    (row,) = rows_of("gspo", ([5, 6, 7], [6, 7, 8]), **arrays)
    assert row.loss_mask.tolist() == [False, False, True, True]


def test_sparse_weights_equal_dense_ones():
    message = wire.messages().ForwardBackwardRequest(loss_fn="cross_entropy")
    each = datum(message, [5, 6, 7])
    tensor = each.loss_fn_inputs["weights"]
    tensor.sparse_csr.values = np.float32([2]).tobytes()
    tensor.sparse_csr.crow_indices = np.int64([0, 0, 1, 1]).tobytes()
    tensor.sparse_csr.col_indices = np.int64([0]).tobytes()
    tensor.shape.extend([3, 1])
    tensor.dtype = wire.messages().DTYPE_FLOAT32
    (row,) = wire.client_rows(message, 11, 8, 12)
    assert row.advantages.tolist() == [0, 2, 0]
    tensor.sparse_csr.crow_indices = np.int64([0, 0, 9, 1]).tobytes()
    with pytest.raises(CallRefused, match="weights: not a tensor"):
        wire.client_rows(message, 11, 8, 12)


WEIGHTS = {"weights": [1, 1, 1]}
REFUSED = [
    ("cross_entropy", [5, 6, 7], [6, 0, 8], WEIGHTS, r"datum 0: loss_fn_inputs.weights\[1\] is not 0, and its target"),
    ("cross_entropy", [5, 6, 11], None, WEIGHTS, "model_input: tokens must be 0 to 10"),
    ("cross_entropy", [5, 6, 7], [6, 7, -1], WEIGHTS, "target_tokens: tokens must be"),
    ("cross_entropy", [1] * 8, None, {}, "model_input has 8 tokens: must be 1 to 7"),
    ("cross_entropy", [5, 6, 7], None, {"weights": [1, 1]}, r"weights has the shape \[2\]"),
    ("cross_entropy", [5, 6, 7], None, {"weights": [1, np.inf, 1]}, "weights must be finite"),
    ("cross_entropy", [5, 6, 7], None, {**WEIGHTS, "other": [1, 1, 1]}, "other: cross_entropy does not use it"),
    ("ppo", [5, 6, 7], None, {"logprobs": [0, 0, 0]}, "advantages: ppo needs it"),
    ("gspo", [5, 6, 7], None, {"logprobs": [0, 0, 0], "advantages": [1, 1, 1]}, "sequence_ratio_mask: gspo needs it"),
    (
        "cross_entropy",
        [5, 6, 7],
        None,
        {**WEIGHTS, "mask": [0, 1, 1]},
        r"weights\[0\] is not 0, and is outside the mask",
    ),
    ("cross_entropy", [5, 6, 7], None, {**WEIGHTS, "mask": [0.5, 1, 1]}, "mask must be 0 or 1"),
]


@pytest.mark.parametrize(("loss", "inputs", "targets", "arrays", "why"), REFUSED)
def test_wrong_datum_is_refused_by_field(loss, inputs, targets, arrays, why):
    with pytest.raises(CallRefused, match=why):
        rows_of(loss, (inputs, targets), **arrays)


def test_images_and_long_calls_are_refused():
    message = wire.messages().ForwardBackwardRequest(loss_fn="cross_entropy")
    message.data.add().model_input.add().image.data = b"png"
    with pytest.raises(CallRefused, match="datum 0: model_input: image"):
        wire.client_rows(message, 11, 8, 12)
    with pytest.raises(CallRefused, match="datum 4: a call has at most 12 tokens"):
        rows_of("cross_entropy", *[([1, 2], None)] * 5)


def test_zstd_is_bounded():
    import zstandard

    body = zstandard.ZstdCompressor().compress(b"0" * 100_000)
    assert wire.inflate(body, "zstd", 100_000) == b"0" * 100_000
    for data, encoding, limit, status in ((body, "zstd", 99_999, 413), (b"0", "zstd", 9, 400), (b"0", "gzip", 9, 415)):
        with pytest.raises(RefusedRequest) as refused:
            wire.inflate(data, encoding, limit)
        assert refused.value.status == status


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"prompt_logprobs": True}, "prompt_logprobs is not supported"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, "image is not supported"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [11]}]}}, "prompt must have tokens from 0 to 10"),
        ({"sampling_params": {"max_tokens": 8}}, "max_tokens must be 1 to 7"),
        ({"sampling_params": {"stop": []}}, "stop must not be empty"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
    ],
)
def test_wrong_sample_is_refused_by_field(fields, why):
    body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}, "sampling_params": {}, **fields}
    with pytest.raises(CallRefused, match=why):
        wire.sampling(msgspec.convert(body, wire.Sample), vocab=11, longest=8)


def test_sampling_settings_arrive():
    body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "num_samples": 3,
            "sampling_params": {"stop": [5, 6], "seed": 4, "top_k": 2}, "topk_sample_logprobs": 1}  # fmt: skip
    prompt, sampling = wire.sampling(msgspec.convert(body, wire.Sample), vocab=11, longest=8)
    assert prompt == [1, 2] and sampling.max_tokens == 6 and sampling.n == 3
    assert sampling.stop_token_ids == (5, 6) and sampling.stop == () and sampling.top_logprobs == 1
