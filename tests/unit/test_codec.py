"""Trajectories as bytes: the way there and back, and bytes that are no trajectories."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.errors import DecodeError, StreamError
from realsys.stream.codec import (
    AnswerHeader,
    GroupHeader,
    Slabs,
    decode_group,
    decode_message,
    decode_with,
    encode_group,
    encode_message,
)
from realsys.stream.protocol import TO_MASTER, TO_PULLER, TO_PUSHER, TO_WORKER, PushAck
from realsys.types import ClearRequest, SamplesArrived, Ticket, Trajectory, TrajectoryGroup
from tests.stream_parts import make_group


@st.composite
def groups(draw: st.DrawFn) -> TrajectoryGroup:
    trajectories = []
    for _ in range(draw(st.integers(1, 4))):
        prompt_len, answer_len = draw(st.integers(0, 20)), draw(st.integers(0, 50))
        if prompt_len + answer_len == 0:
            prompt_len = 1
        rng = np.random.default_rng(draw(st.integers(0, 1000)))
        trajectories.append(
            Trajectory(
                rng.integers(0, 2**31 - 1, prompt_len + answer_len, dtype=np.int32),
                -np.abs(rng.normal(size=answer_len)).astype(np.float32),
                np.sort(rng.integers(0, 3, answer_len, dtype=np.int32)),
                prompt_len,
                draw(st.floats(-10, 10)),
                draw(st.sampled_from(["stop", "length", "abort"])),
                draw(st.sampled_from([(), (("generation_server/1", answer_len),)])) if answer_len else (),
            )
        )
    ticket = Ticket(draw(st.text("abc", min_size=1, max_size=5)), draw(st.integers(0, 5)), draw(st.integers(0, 100)))
    return TrajectoryGroup(ticket, trajectories, "rollout_worker/1", 1.5, 2.5, {"turns": 2.0})


def assert_same(a: TrajectoryGroup, b: TrajectoryGroup) -> None:
    assert replace(a, trajectories=[]) == replace(b, trajectories=[])
    assert len(a.trajectories) == len(b.trajectories)
    for x, y in zip(a.trajectories, b.trajectories, strict=True):
        for name in ("tokens", "logprobs", "versions"):
            assert getattr(x, name).dtype == getattr(y, name).dtype
            np.testing.assert_array_equal(getattr(x, name), getattr(y, name))
        assert (x.prompt_len, x.reward, x.finish_reason) == (y.prompt_len, y.reward, y.finish_reason)
        assert x.route == y.route


@given(groups(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_group_comes_back_as_it_was(group: TrajectoryGroup, with_slabs: bool) -> None:
    assert_same(decode_group(encode_group(group, Slabs(2) if with_slabs else None)), group)


def test_decoded_arrays_are_views_that_cannot_be_written() -> None:
    frames = encode_group(make_group("t1"))
    [first, _] = decode_group(frames).trajectories
    assert np.shares_memory(first.tokens, np.frombuffer(frames[1], dtype=np.uint8))
    for array in (first.tokens, first.logprobs, first.versions):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_an_unaligned_payload_is_copied_into_place() -> None:
    group = make_group("t1")
    header, payload = encode_group(group)
    shifted = memoryview(b"x" + payload)[1:]
    decoded = decode_group([header, shifted])
    assert decoded.trajectories[0].tokens.flags.aligned
    assert_same(decoded, group)


def test_versions_that_change_at_every_token_survive() -> None:
    group = make_group("t1", answers=1)
    group.trajectories[0].versions = np.arange(group.trajectories[0].answer_len, dtype=np.int32)
    assert_same(decode_group(encode_group(group)), group)


def test_strided_arrays_are_encoded() -> None:
    group = make_group("t1", answers=1)
    group.trajectories[0].tokens = np.repeat(group.trajectories[0].tokens, 2)[::2]
    assert_same(decode_group(encode_group(group)), group)


def test_slabs_are_used_again_and_kept_few() -> None:
    slabs = Slabs(keep=2)
    taken = [slabs.take(size) for size in (10, 20, 30)]
    for slab in taken:
        slabs.give_back(slab)
    assert slabs.take(5).obj is taken[2].obj  # the one given back last
    slabs.give_back(taken[2])
    assert slabs.take(25).obj is taken[2].obj
    assert slabs.take(5).obj is taken[1].obj  # the smallest of the three was let go
    assert len(slabs.take(5).obj) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.zeros(40, np.int64)}, r"group t1: trajectory 0: tokens is int64\[40\], needs int32\[40\]"),
        ({"logprobs": np.zeros(30)}, r"logprobs is float64\[30\], needs float32\[30\]"),
        ({"versions": np.zeros(29, np.int32)}, r"versions is int32\[29\], needs int32\[30\]"),
        ({"prompt_len": 11}, r"40 tokens are not prompt_len=11 \+ 30 logprobs"),
    ],
)
def test_a_wrong_array_is_named_by_the_encoder(change: dict[str, object], message: str) -> None:
    group = make_group("t1")
    group.trajectories[0] = replace(group.trajectories[0], **change)
    with pytest.raises(StreamError, match=message):
        encode_group(group)


def changed_values(name: str, value: float) -> TrajectoryGroup:
    group = make_group("t1")
    getattr(group.trajectories[1], name)[3] = value
    return group


@pytest.mark.parametrize(
    "group",
    [
        changed_values("tokens", -1),
        changed_values("logprobs", math.nan),
        changed_values("logprobs", math.inf),
        changed_values("logprobs", -math.inf),
        changed_values("logprobs", 0.01),
        changed_values("versions", -1),
        replace(make_group("t1"), started=math.nan),
        replace(make_group("t1"), extra={"x": math.inf}),
        replace(make_group("t1"), ticket=Ticket("", 0, 0)),
        replace(make_group("t1"), ticket=Ticket("t", -1, 0)),
        replace(make_group("t1"), trajectories=[]),
        replace(make_group("t1"), trajectories=[replace(make_group("t1").trajectories[0], reward=math.nan)]),
    ],
)
def test_values_out_of_bounds_are_refused(group: TrajectoryGroup) -> None:
    with pytest.raises(DecodeError):
        decode_group(encode_group(group))


def test_a_logprob_above_zero_by_rounding_passes() -> None:
    decode_group(encode_group(changed_values("logprobs", 1e-6)))


def with_answer(**change: object) -> list[bytes]:
    group = make_group("t1", answers=1)
    header, payload = encode_group(group)
    decoded = msgspec.msgpack.decode(header, type=GroupHeader)
    answer = msgspec.structs.replace(decoded.answers[0], **change)
    return [msgspec.msgpack.encode(msgspec.structs.replace(decoded, answers=[answer])), bytes(payload)]


@pytest.mark.parametrize(
    "frames",
    [
        with_answer(length=41),
        with_answer(length=1 << 26),
        with_answer(length=0, prompt_len=0, runs=[]),
        with_answer(prompt_len=41),
        with_answer(prompt_len=-1),
        with_answer(runs=[(3, 29)]),
        with_answer(runs=[(3, 1 << 26)]),
        with_answer(runs=[(3, 31), (4, -1)]),
        with_answer(runs=[(1 << 31, 30)]),
        with_answer(finish_reason="bored"),
        with_answer()[:1],
        [*with_answer(), b""],
        [],
        [b"", b""],
        [b"\xdd\xff\xff\xff\xff", b""],
        [b"\x91" * 100_000, b""],
        [b"\x97\xa7group/1\x81\xa1x" + b"\x91" * 100_000, b""],
    ],
)
def test_headers_that_do_not_match_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(DecodeError):
        decode_group(frames)


@given(st.lists(st.binary(max_size=200), max_size=4))
@settings(max_examples=200, deadline=None)
def test_random_bytes_only_raise_decode_error(frames: list[bytes]) -> None:
    with pytest.raises(DecodeError):
        decode_group(frames)


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_mutated_groups_decode_or_raise_decode_error(data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in encode_group(make_group("t1", answers=2, length=12, prompt_len=4))]
    for _ in range(data.draw(st.integers(1, 6))):
        frame = data.draw(st.sampled_from(frames))
        position = data.draw(st.integers(0, max(0, len(frame) - 1)))
        match data.draw(st.sampled_from(["set", "delete", "insert", "cut"])):
            case "set" if frame:
                frame[position] = data.draw(st.integers(0, 255))
            case "delete" if frame:
                del frame[position]
            case "insert":
                frame[position:position] = data.draw(st.binary(min_size=1, max_size=4))
            case "cut":
                del frame[position:]
    try:
        group = decode_group([bytes(frame) for frame in frames])
    except DecodeError:
        return
    for trajectory in group.trajectories:  # a mutation that still decodes left a valid group
        assert len(trajectory.tokens) == trajectory.prompt_len + len(trajectory.logprobs)
        assert len(trajectory.versions) == len(trajectory.logprobs)
        assert trajectory.tokens.min() >= 0
        assert np.isfinite(trajectory.logprobs).all()
        assert (trajectory.versions >= 0).all()


@given(st.binary(max_size=100), st.sampled_from([TO_MASTER, TO_PULLER, TO_PUSHER, TO_WORKER]))
@settings(max_examples=200, deadline=None)
def test_random_headers_only_raise_decode_error(data: bytes, decoder: msgspec.msgpack.Decoder[object]) -> None:
    with pytest.raises(DecodeError, match="not a header"):
        decode_with(decoder, data, "header")


def test_messages_come_back_and_name_what_they_are_not() -> None:
    assert decode_message(encode_message(ClearRequest(["a"])), ClearRequest) == ClearRequest(["a"])
    with pytest.raises(DecodeError, match="not a SamplesArrived: "):
        decode_message(encode_message(ClearRequest(["a"])), SamplesArrived)
    with pytest.raises(DecodeError, match="not a ack"):
        decode_with(TO_PULLER, encode_message(PushAck([1])), "ack")


def test_the_header_of_an_answer_is_small() -> None:
    assert len(encode_message(AnswerHeader(32_768, 256, 1.0, "stop", [(7, 32_512)]))) < 40
