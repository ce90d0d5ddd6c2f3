"""Lines before a reply: the writer's part and the reader's part together give what was sampled."""

import msgspec
import numpy as np
import pytest

from realsys.generation.backend import RequestSnapshot
from realsys.generation.client import Received
from realsys.generation.completion import Completion
from realsys.generation.server import Delta

TOKENS = np.arange(10, 20, dtype=np.int32)
LOGPROBS = -np.arange(10, dtype=np.float32) / 8


def completion(segments, reason="abort", **more):
    count = sum(tokens for _, tokens in segments)
    return Completion.of(TOKENS[:count], LOGPROBS[:count], segments, reason, **more)


def snapshot(*completions, moved=0):
    running = frozenset(k for k, one in enumerate(completions) if one.finish_reason == "abort")
    return RequestSnapshot(list(completions), running, moved)


def encode(progress):
    return msgspec.json.encode(progress)


def test_lines_add_up_to_the_snapshot():
    delta, received = Delta(), Received(2)
    for state in (
        snapshot(completion([(1, 3)]), completion([])),
        snapshot(completion([(1, 4), (2, 2)]), completion([(2, 1)])),
        snapshot(completion([(1, 4), (2, 4)], "stop"), completion([(2, 1)])),
    ):
        received.take(encode(delta.next(state)))
    first, second = received.completions
    assert (first.tokens.tolist(), first.logprobs.tolist()) == (TOKENS[:8].tolist(), LOGPROBS[:8].tolist())
    assert (first.segments, first.finish_reason) == ([(1, 4), (2, 4)], "stop")
    assert (second.tokens.tolist(), second.segments, second.finish_reason) == ([10], [(2, 1)], "abort")


def test_lines_carry_versions_of_keys_and_top_logprobs():
    """A line without versions of keys says that they are those of its tokens."""
    delta, received = Delta(), Received(1)
    top = [[(token, -0.5), (token + 1, -1.5)] for token in range(5)]
    for count, kv_segments in ((2, None), (4, [(1, 3), (0, 1)]), (5, [(1, 3), (0, 2)])):
        one = completion([(1, count)], kv_versions=kv_segments, top=top[:count])
        received.take(encode(delta.next(snapshot(one))))
    [result] = received.completions
    assert result.kv_versions.tolist() == [1, 1, 1, 0, 0]
    assert [list(map(tuple, best)) for best in result.top] == top
    plain = Received(1)
    plain.take(encode(Delta().next(snapshot(completion([(1, 3)])))))
    [result] = plain.completions
    assert result.kv_versions is None and result.top is None


def test_line_without_tokens_tells_that_the_queue_moves():
    delta = Delta()
    assert delta.next(snapshot(completion([]), moved=5)).parts == []
    assert delta.next(snapshot(completion([]), moved=5)) is None
    assert delta.next(snapshot(completion([]), moved=6)).parts == []


def test_ended_completion_is_sent_once():
    delta, ended = Delta(), snapshot(completion([(1, 3)], "length"), completion([]))
    assert len(delta.next(ended).parts) == 1
    assert delta.next(ended) is None


def test_lines_of_a_repeated_request_count_once():
    """A request that a proxy repeats sends its lines twice."""
    received = Received(1)
    for _ in range(2):
        received.take(encode(Delta().next(snapshot(completion([(1, 3)])))))
    assert received.completions[0].tokens.tolist() == TOKENS[:3].tolist()


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b'{"parts": [[1, 0, [5], [0.0], [["1", 1]]]]}',  # no such completion
        b'{"parts": [[0, 0, [5], [0.0], [["1", 2]]]]}',
        b'{"parts": [[0, 1, [5], [0.0], [["1", 1]]]]}',  # a gap
        b'{"parts": [[0, 0, [5], [0.0], [["x", 1]]]]}',
        b'{"parts": [[0, 0, [5], [0.0], [["1", 1]], null, [["0", 2]]]]}',
        b'{"parts": [[0, 0, [5], [0.0], [["1", 1]], null, null, [[], []]]]}',
    ],
)
def test_line_that_does_not_fit_changes_nothing(line):
    received = Received(1)
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        received.take(line)
    assert not len(received.completions[0].tokens)


def test_error_instead_of_the_reply_is_kept():
    received = Received(1)
    received.take(b'{"status": 503, "message": "the engine failed"}')
    assert received.error == (503, "the engine failed")
