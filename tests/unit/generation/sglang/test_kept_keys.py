"""Which cached keys a request may use, and the stamps of its tokens: pure bookkeeping."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from realsys.generation.child.requests import KeptKeys, KeyNamespace, SplitRequest
from realsys.generation.protocol import UNSYNCED, SamplingParams
from realsys.generation.sglang.api import Reply


def names(keys: KeptKeys, *versions: int, same: bool = False) -> list[str | None]:
    """Load versions one after another. Return the namespace that requests get after each."""
    found, before = [], UNSYNCED
    for version in versions:
        keys.loaded(before, version, same=same)
        found.append(keys.current.name)
        before = version
    return found


def test_recompute_has_one_namespace_without_name():
    keys = KeptKeys()
    assert names(keys, 0, 1, 2) == [None] * 3
    assert all(keys.drops(before, before + 1) for before in (UNSYNCED, 0, 5))
    assert keys.current.oldest == 2


@pytest.mark.parametrize(("reuse", "shared"), [(0, 1), (1, 2), (4, 5)])
def test_namespace_holds_no_more_versions_than_the_bound(reuse, shared):
    found = names(KeptKeys(keep=True, reuse=reuse), *range(20))
    assert [len(list(run)) for _, run in itertools.groupby(found)] == [shared] * (20 // shared)
    assert len(set(found)) == 20 // shared, "a name is never used again"


def test_same_weights_do_not_age_their_keys():
    keys = KeptKeys(keep=True, reuse=1)
    first = names(keys, 0)[0]
    for version in range(1, 6):
        keys.loaded(version - 1, version, same=True)
    assert keys.current == KeyNamespace(first, 5)
    keys.loaded(5, 6, same=False)
    keys.loaded(6, 7, same=True)  # now version 5 is too old, whatever the weights of 7
    assert keys.current.oldest == 7 and keys.current.name != first


def test_same_weights_under_lower_number_begin_namespace():
    """Its requests in progress keep theirs, with stamps that are not above their versions."""
    keys = KeptKeys(keep=True, reuse=9)
    name = names(keys, 3, 4)[-1]
    keys.loaded(4, 2, same=True)
    assert keys.current.oldest == 2 and keys.current.name != name
    assert stamped(3, 4, 1, (4, 3), (2, 2)) == [(3, 3), (2, 2)]


@pytest.mark.parametrize("before", [UNSYNCED, 7, 8])
def test_keys_that_no_stamp_can_name_are_dropped(before):
    keys = KeptKeys(keep=True, reuse=100)
    assert keys.drops(before, 7) and not keys.drops(6, 7)
    name = keys.current.name
    keys.loaded(before, 7, same=False)
    assert keys.current.oldest == 7 and keys.current.name != name


def stamped(oldest: int, sent_at: int, cached: int, *spans: tuple[int, int]) -> list[tuple[int, int]] | None:
    """Return the stamps of a piece whose tokens were sampled in (version, tokens) ``spans``."""
    params = SamplingParams(max_new_tokens=50)
    request = SplitRequest.of("r", np.array([1, 2], np.int32), params, (), 1)
    request.keys, request.sent_at = KeyNamespace("0", oldest), sent_at
    count, start, versions = sum(tokens for _, tokens in spans), 0, []
    for version, tokens in spans:
        versions.append({"version": str(version), "start": start, "end": start + tokens})
        start += tokens
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [(-0.5, 9, None)] * count,
        "weight_versions": versions,
        "cached_tokens": cached,
    }
    reply = msgspec.json.decode(msgspec.json.encode({"output_ids": [9] * count, "meta_info": meta}), type=Reply)
    assert request.pieces(itertools.count())[0].namespace == "0"
    request.take([reply], None)
    return request.results()[0].kv_segments


def test_tokens_are_stamped_with_the_oldest_keys_they_may_have():
    assert stamped(3, 5, 0, (5, 4)) is None
    assert stamped(3, 5, 0, (5, 4), (6, 2)) == [(5, 6)]
    assert stamped(3, 5, 1, (5, 4), (6, 2)) == [(3, 6)]
    assert stamped(5, 5, 1, (5, 4)) is None
    assert stamped(3, 4, 0, (6, 2)) == [(4, 2)], "its prompt may have been computed before the first token"
