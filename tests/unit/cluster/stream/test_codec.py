"""Groups as bytes: the way there and back, and bytes that are no groups."""

import asyncio
import math
import subprocess
import sys
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.cluster.stream.codec import (
    TO_MASTER,
    TO_PULLER,
    TO_PUSHER,
    TO_WORKER,
    Ack,
    FailureReply,
    GroupHeader,
    PushAck,
    Slabs,
    decode_group,
    decode_message,
    decode_with,
    encode_group,
    encode_message,
)
from realsys.cluster.stream.master_stream import Acknowledgements, Message, Peer, name_workers, open_call
from realsys.errors import DecodeError, RemoteError, StreamError, WaitTimeout
from realsys.model_calls import ClearRequest, SamplesArrived, TransferReply
from realsys.types import Episode, Group, Row, Ticket
from tests.support.streams.stream_parts import BOUND_S, make_group
from tests.support.training.sample_records import make_mask, make_row

ARRAYS = ("tokens", "loss_mask", "logprobs", "versions")


@st.composite
def rows(draw):
    """A row with any number of turns: runs of context and of sampled tokens, the first one context."""
    runs = draw(st.lists(st.integers(1, 12), min_size=1, max_size=7))
    mask = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    loss_tokens = int(mask.sum())
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    positions = np.flatnonzero(mask)
    chosen = sorted(rng.choice(positions, min(2, loss_tokens), replace=False).tolist()) if loss_tokens else []
    versions = np.sort(rng.integers(0, 3, loss_tokens, dtype=np.int32))
    oldest = versions - rng.integers(0, 2, loss_tokens, dtype=np.int32).clip(max=versions)
    shape = loss_tokens, draw(st.integers(1, 3))
    teacher = rng.integers(0, 9, shape, dtype=np.int32), -rng.random(shape, np.float32)
    return Row(
        rng.integers(0, 2**31 - 1, len(mask), dtype=np.int32),
        mask,
        -np.abs(rng.normal(size=loss_tokens)).astype(np.float32),
        versions,
        draw(st.sampled_from(["stop", "length", "abort"])),
        draw(st.sampled_from([(), (("generation_server/1", loss_tokens),)])) if loss_tokens else (),
        tuple((position, 0.5) for position in chosen) if draw(st.booleans()) else (),
        oldest if draw(st.booleans()) and (oldest < versions).any() else None,
        teacher=teacher if draw(st.booleans()) else None,
    )


@st.composite
def groups(draw):
    episodes = [
        Episode(
            draw(st.lists(rows(), min_size=1, max_size=3)),
            draw(st.floats(-10, 10)),
            draw(st.sampled_from([None, True, False])),
            draw(st.dictionaries(st.text("xyz", max_size=3), st.floats(-5, 5), max_size=2)),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]
    ticket = Ticket(draw(st.text("abc", min_size=1, max_size=5)), draw(st.integers(0, 5)), draw(st.integers(0, 100)))
    errors = draw(st.lists(st.text(max_size=10), max_size=2))
    return Group(ticket, episodes, "rollout_worker/1", 1.5, 2.5, {"turns": 2.0}, errors)


def assert_same(a, b):
    assert replace(a, episodes=[]) == replace(b, episodes=[])
    assert len(a.episodes) == len(b.episodes)
    for x, y in zip(a.episodes, b.episodes, strict=True):
        assert replace(x, rows=[]) == replace(y, rows=[])
        for ours, theirs in zip(x.rows, y.rows, strict=True):
            for name in ARRAYS:
                assert getattr(ours, name).dtype == getattr(theirs, name).dtype
                np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
            np.testing.assert_array_equal(ours.kv_versions, theirs.kv_versions)
            assert (ours.teacher is None) == (theirs.teacher is None)
            for one, other in zip(ours.teacher or (), theirs.teacher or (), strict=True):
                assert (one.dtype, one.shape) == (other.dtype, other.shape)
                np.testing.assert_array_equal(one, other)
            for name in ("finish_reason", "route", "rewards", "temperatures"):
                assert getattr(ours, name) == getattr(theirs, name)


@given(groups(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_group_comes_back_as_it_was(group, with_slabs):
    assert_same(decode_group(encode_group(group, Slabs(2) if with_slabs else None)), group)


def test_decoded_arrays_are_views_that_cannot_be_written():
    frames = encode_group(make_group("t1"))
    first = decode_group(frames).episodes[0].rows[0]
    assert np.shares_memory(first.tokens, np.frombuffer(frames[1], dtype=np.uint8))
    for name in ARRAYS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(first, name)[0] = 0


def test_an_unaligned_payload_is_copied_into_place():
    group = make_group("t1")
    header, payload = encode_group(group)
    shifted = memoryview(b"x" + payload)[1:]
    decoded = decode_group([header, shifted])
    assert decoded.episodes[0].rows[0].tokens.flags.aligned
    assert_same(decoded, group)


def test_versions_that_change_at_every_token_survive():
    group = make_group("t1", episodes=1)
    row = group.episodes[0].rows[0]
    row.versions = np.arange(row.loss_tokens, dtype=np.int32)
    assert_same(decode_group(encode_group(group)), group)


def test_versions_of_keys_cost_bytes_where_they_differ():
    """A group without kept keys has the bytes that it had before there were any."""
    plain, equal, kept = (make_group("t1", episodes=1) for _ in range(3))
    row = equal.episodes[0].rows[0]
    row.kv_versions = row.versions.copy()
    row = kept.episodes[0].rows[0]
    row.versions = np.full(row.loss_tokens, 5, np.int32)
    row.kv_versions = np.where(np.arange(row.loss_tokens) < 3, 5, 4).astype(np.int32)
    headers = [msgspec.msgpack.decode(encode_group(group)[0]) for group in (plain, equal, kept)]
    assert headers[0] == headers[1]
    assert all(len(run) == 2 for run in headers[0][-1][0][0][0][2])
    assert headers[2][-1][0][0][0][2] == [[5, 3], [5, row.loss_tokens - 3, 4]]
    assert decode_group(encode_group(equal)).episodes[0].rows[0].kv_versions is None
    assert_same(decode_group(encode_group(kept)), kept)


def test_temperatures_cost_bytes_where_they_are_known():
    plain, own = (make_group("t1", episodes=2) for _ in range(2))
    row = own.episodes[1].rows[0]
    row.temperatures = ((0.5, 1), (0.0, row.loss_tokens - 1))
    headers = [msgspec.msgpack.decode(encode_group(group)[0]) for group in (plain, own)]
    assert [len(episode[0][0]) for header in headers for episode in header[-1]] == [5, 5, 5, 7]
    assert_same(decode_group(encode_group(own)), own)


def test_a_mask_that_changes_at_every_token_survives():
    group = make_group("t1", episodes=1, length=40, prompt=20)
    group.episodes[0].rows[0].loss_mask = np.arange(40) % 2 == 1
    assert_same(decode_group(encode_group(group)), group)


def test_strided_arrays_are_encoded():
    group = make_group("t1", episodes=1)
    row = group.episodes[0].rows[0]
    row.tokens = np.repeat(row.tokens, 2)[::2]
    assert_same(decode_group(encode_group(group)), group)


def test_slabs_are_used_again_and_kept_few():
    slabs = Slabs(keep=2)
    taken = [slabs.take(size) for size in (10, 20, 30)]
    for slab in taken:
        slabs.release(slab)
    assert slabs.take(5).obj is taken[2].obj  # the one given back last
    slabs.release(taken[2])
    assert slabs.take(25).obj is taken[2].obj
    assert slabs.take(5).obj is taken[1].obj  # the smallest of the three was let go
    assert len(slabs.take(5).obj) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.zeros(40, np.int64)}, r"t1: episode 0, row 0: tokens is int64\[40\], must be int32\[40\]"),
        ({"logprobs": np.zeros(30)}, r"logprobs is float64\[30\], must be float32\[30\]"),
        ({"versions": np.zeros(29, np.int32)}, r"versions is int32\[29\], must be int32\[30\]"),
        ({"loss_mask": np.arange(40)}, r"loss_mask is int64\[40\], must be bool\[40\]"),
        ({"loss_mask": make_mask(40, 11)}, r"loss_mask marks 29 tokens, but there are 30 logprobs"),
        ({"loss_mask": make_mask(40, 10)[::-1].copy()}, r"a row must begin with a token outside the loss"),
        ({"rewards": ((3, 1.0),)}, r"a reward is at position 3, which is not in the loss"),
        ({"rewards": ((40, 1.0),)}, r"a reward is at position 40, which is not in the loss"),
    ],
)
def test_a_wrong_array_is_named_by_the_encoder(change, message):
    group = make_group("t1")
    group.episodes[0].rows[0] = replace(group.episodes[0].rows[0], **change)
    with pytest.raises(StreamError, match=message):
        encode_group(group)


def changed_values(name, value):
    group = make_group("t1")
    getattr(group.episodes[1].rows[0], name)[3] = value
    return group


def changed_episode(**change):
    group = make_group("t1")
    return replace(group, episodes=[replace(group.episodes[0], **change)])


def test_a_logprob_above_zero_by_rounding_passes():
    decode_group(encode_group(changed_values("logprobs", 1e-6)))


def with_row(**change):
    """A group of one row, 10 tokens of context and 30 of the loss, whose header says something else."""
    header, payload = encode_group(make_group("t1", episodes=1))
    decoded = msgspec.msgpack.decode(header, type=GroupHeader)
    row = msgspec.structs.replace(decoded.episodes[0].rows[0], **change)
    episode = msgspec.structs.replace(decoded.episodes[0], rows=[row])
    return [msgspec.msgpack.encode(msgspec.structs.replace(decoded, episodes=[episode])), bytes(payload)]


def with_temperatures(*runs):
    group = make_group("t1", episodes=1)
    group.episodes[0].rows[0].temperatures = runs
    return encode_group(group)


def with_teacher(token, logprob):
    group = make_group("t1", episodes=1)
    row = group.episodes[0].rows[0]
    shape = row.loss_tokens, 2
    row.teacher = np.full(shape, token, np.int32), np.full(shape, logprob, np.float32)
    return encode_group(group)


def with_runs(*runs):
    header, payload = encode_group(make_group("t1", episodes=1))
    fields = msgspec.msgpack.decode(header)
    fields[-1][0][0][0][2] = runs
    return [msgspec.msgpack.encode(fields), payload]


def of(**change):
    return encode_group(replace(make_group("t1"), **change))


REWARDS = "rewards must be at rising positions of tokens in the loss"
SPAN = "logprobs span .*must be finite and at most 0"
BAD = [
    (with_temperatures((0.5, 1)), "1 tokens have a temperature"),
    (with_temperatures((-0.5, 4)), "must be 0 or"),
    (with_temperatures((math.nan, 4)), "must be 0 or"),
    (with_teacher(-1, -1.0), "token -1 < 0"),
    (with_teacher(1, math.nan), SPAN),
    (
        [with_teacher(1, -1.0)[0], encode_group(make_group("t1", episodes=1))[1]],
        "bytes of arrays, but the header claims",
    ),
    (with_runs([3, 30, 4]), "keys of a later version than its own"),
    (with_runs([3, 30], [4, 0]), "a run of versions must have 1 to"),
    (with_runs([3]), "length >= 2"),
    (with_runs([3, 30, 2, 1]), "length <= 3"),
    (encode_group(changed_values("tokens", -1)), "token -1 < 0"),
    *[(encode_group(changed_values("logprobs", value)), SPAN) for value in (math.nan, math.inf, -math.inf, 0.01)],
    (encode_group(changed_values("versions", -1)), r"`int` >= 0 - at `\$\[8\]\[1\]\[0\]\[0\]\[2\]"),
    (of(started=math.nan), "started, finished or extra is not finite"),
    (of(extra={"x": math.inf}), "started, finished or extra is not finite"),
    (of(ticket=Ticket("", 0, 0)), "ticket_id=''"),
    (of(ticket=Ticket("t", -1, 0)), "attempt=-1"),
    (of(episodes=[]), r"length >= 1 - at `\$\[8\]`"),
    (encode_group(changed_episode(reward=math.nan)), "episode 0: reward=nan is not finite"),
    (encode_group(changed_episode(metrics={"x": math.nan})), "episode 0: a metric is not finite"),
    (encode_group(changed_episode(rows=[])), r"length >= 1 - at `\$\[8\]\[0\]\[0\]`"),
    # headers that do not match the arrays
    (with_row(mask=[10, 31]), "30 tokens have a version, but 31 are in the loss"),
    (with_row(mask=[1 << 26, 30]), "280 bytes of arrays, but the header claims 268435696"),
    (with_row(mask=[]), "length >= 1"),
    (with_row(mask=[0, 30]), "`int` >= 1"),
    (with_row(mask=[41]), "30 tokens have a version, but 0 are in the loss"),
    (with_row(mask=[11, 30]), "280 bytes of arrays, but the header claims 284"),
    (with_row(mask=[10, -1]), "`int` >= 1"),
    (with_row(versions=[(3, 29)]), "29 tokens have a version, but 30 are in the loss"),
    (with_row(versions=[(3, 1 << 26)]), "67108864 tokens have a version, but 30 are in the loss"),
    (with_row(versions=[(3, 31), (4, -1)]), "`int` >= 0"),
    (with_row(versions=[(1 << 31, 30)]), "`int` <= 2147483647"),
    (with_row(finish=3), "`int` <= 2 "),
    (with_row(finish=-1), "`int` >= 0"),
    (with_row(route=[(0, 30)]), "a route names a server beyond the 0 of the group"),
    (with_row(rewards=[(9, 1.0)]), REWARDS),
    (with_row(rewards=[(40, 1.0)]), REWARDS),
    (with_row(rewards=[(12, 1.0), (11, 1.0)]), REWARDS),
    (with_row(rewards=[(12, math.nan)]), "a reward of a token is not finite"),
    (with_row()[:1], "a group of 1 frames: must be 2"),
    ([*with_row(), b""], "a group of 3 frames: must be 2"),
    ([], "a group of 0 frames: must be 2"),
    ([b"", b""], "truncated"),
    ([b"\xdd\xff\xff\xff\xff", b""], "truncated"),
    ([b"\x91" * 100_000, b""], "`array` of at least length 9"),
    ([b"\x99\xa2g2\x81\xa1x" + b"\x91" * 100_000, b""], "recursion"),
]


@pytest.mark.parametrize(("frames", "message"), BAD)
def test_bad_group_is_refused_with_its_problem(frames, message):
    with pytest.raises(DecodeError, match=message):
        decode_group(frames)


@given(st.lists(st.binary(max_size=200), max_size=4))
@settings(max_examples=200, deadline=None)
def test_random_bytes_only_raise_decode_error(frames):
    with pytest.raises(DecodeError):
        decode_group(frames)


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_mutated_groups_decode_or_raise_decode_error(data):
    frames = [bytearray(frame) for frame in encode_group(make_group("t1", episodes=2, length=12, prompt=4))]
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
    for row in (row for episode in group.episodes for row in episode.rows):  # a mutation left a valid group
        assert len(row.tokens) == len(row.loss_mask) and row.loss_mask.sum() == len(row.logprobs)
        assert len(row.versions) == len(row.logprobs)
        assert row.tokens.min() >= 0 and not row.loss_mask[0]
        assert np.isfinite(row.logprobs).all()
        assert (row.versions >= 0).all()
        assert all(row.loss_mask[position] for position, _ in row.rewards)


@given(st.binary(max_size=100), st.sampled_from([TO_MASTER, TO_PULLER, TO_PUSHER, TO_WORKER]))
@settings(max_examples=200, deadline=None)
def test_random_headers_only_raise_decode_error(data, decoder):
    with pytest.raises(DecodeError, match="not a header"):
        decode_with(decoder, data, "header")


def test_messages_round_trip_and_name_type_errors():
    assert decode_message(encode_message(ClearRequest(["a"])), ClearRequest) == ClearRequest(["a"])
    with pytest.raises(DecodeError, match="not a SamplesArrived: "):
        decode_message(encode_message(ClearRequest(["a"])), SamplesArrived)
    with pytest.raises(DecodeError, match="not a ack"):
        decode_with(TO_PULLER, encode_message(PushAck([1])), "ack")


@pytest.mark.parametrize(("episodes", "before"), [(1, 240), (2, 284), (8, 548), (16, 902)])
def test_single_turn_header_is_not_larger_than_before(episodes, before):
    """``before``: bytes of the header when a sample could only be one prompt and one completion."""
    row = make_row(
        np.zeros(120, np.int32),
        np.zeros(100, np.float32),
        np.full(100, 7, np.int32),
        route=(("generation_server/0", 100),),
    )
    ticket = Ticket("00000123", 0, 4567, n=episodes, seed=123456789, version=7, trainer_incarnation="a1b2c3d4e5f6")
    made = [Episode([row], 1.0, correct=True) for _ in range(episodes)]
    group = Group(ticket, made, "rollout_worker/0", 1.7e9, 1.7e9, {"generate_s": 0.5, "reward_s": 0.1})
    size = len(encode_group(group)[0])
    assert size <= before, f"{size} bytes"


RACE = """
import sys, threading, msgspec
from realsys.cluster.stream.codec import decode_message
sys.setswitchinterval(1e-6)
for i in range(60):
    inner = msgspec.defstruct(f"Inner{i}", [(f"f{k}", int) for k in range(8)], array_like=True)
    outer = msgspec.defstruct(f"Outer{i}", [("many", list[inner]), ("one", inner)])
    data = msgspec.msgpack.encode(outer([inner(*range(8))] * 3, inner(*range(8))))
    begin = threading.Barrier(16)
    def decode():
        begin.wait()
        decode_message(data, outer)
    threads = [threading.Thread(target=decode) for _ in range(16)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


@pytest.mark.processes
def test_threads_may_decode_a_type_first_together():
    """msgspec ends the process if two threads make decoders of one Struct at the same time."""
    assert subprocess.run([sys.executable, "-c", RACE], timeout=120, check=False).returncode == 0


# ---- Calls to several workers: what completes one, what fails it, and which requests may be sent again


def with_call(body, workers=3):
    """Run ``body`` with a call to some workers whose requests are on their way."""

    async def run():
        peers = [Peer(worker, f"model_worker/{worker}", "1", b"") for worker in range(workers)]
        call = open_call("transfer", TransferReply, range(workers), BOUND_S)
        for peer in peers:
            call.add_request(peer, b"payload")
        body(call, peers)
        call.result.cancel()
        await asyncio.sleep(0)
        assert not any(peer.requests for peer in peers), "a request of a call that has ended would be sent again"

    asyncio.run(run())


def reply(received):
    return zmq.Frame(encode_message(TransferReply(received)))


def test_replies_keep_the_order_of_workers():
    def body(call, peers):
        for worker in (2, 0, 1):
            assert not call.result.done()
            call.take_reply(peers[worker], None, reply(worker))
        assert [each.received for each in call.result.result()] == [0, 1, 2]
        assert not any(peer.requests for peer in peers)

    with_call(body)


@pytest.mark.parametrize(
    ("failure", "payload", "error"),
    [
        (FailureReply("ValueError", "no such key", "trace"), reply(0), RemoteError),
        (None, zmq.Frame(b"\xc1"), DecodeError),
    ],
)
def test_first_failure_ends_the_call(failure, payload, error):
    def body(call, peers):
        call.take_reply(peers[1], failure, payload)
        with pytest.raises(error, match="model_worker/1"):
            call.result.result()
        call.fail(ValueError("follows from the first"))

    with_call(body)


def test_discarded_request_leaves_those_of_successor():
    """A new incarnation counts its requests from 1 again."""

    def body(call, peers):
        successor = Peer(0, "model_worker/0", "2", b"")
        open_call("clear", TransferReply, [0], BOUND_S).add_request(successor, b"payload")
        call.discard()
        assert list(successor.requests) == [1]

    with_call(body)


def test_timeout_names_some_of_many_workers():
    def body(call, peers):
        call.take_reply(peers[0], None, reply(0))
        call.expire(2.0)
        with pytest.raises(WaitTimeout, match="model_worker/1, .*, model_worker/8 and 11 others: no reply to transfer"):
            call.result.result()

    with_call(body, 20)


def test_few_workers_are_all_named():
    assert name_workers(["a", "b"]) == "a, b"


def test_one_ack_for_each_peer_without_later_request():
    async def run():
        sent: list[Message] = []
        acks = Acknowledgements(sent.extend)
        peers = [Peer(worker, f"model_worker/{worker}", "1", bytes([worker])) for worker in range(3)]
        for number in (1, 2):
            for peer in peers:
                peer.last_message = number
                acks.add(peer)
        acks.discard(peers[1:2])
        acks.send()
        acks.send()
        assert sent == [(bytes([worker]), [encode_message(Ack(2))]) for worker in (0, 2)]

    asyncio.run(run())
