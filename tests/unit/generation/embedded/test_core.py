"""The embedded engine, step by step, against transformers: batches, prompts in parts, weight updates, aborts."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from realsys.errors import GenerationError
from realsys.generation.embedded.core import CoreSizes, EngineCore
from realsys.generation.embedded.decoder import fuse, read_tensors
from realsys.model_files.config_json import read_model
from tests.support.serving.generation_models import (
    PROMPTS,
    check_logprobs,
    chosen,
    finish,
    make_core,
    make_model,
    make_request,
    old_and_new,
    read_weights,
    reference_logprobs,
    run,
)
from tests.support.timelines.made_up import recording


@pytest.fixture(scope="module")
def two_models(tmp_path_factory):
    return old_and_new(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "llama-linear"])
@pytest.mark.parametrize("tied", [False, True])
def test_logprobs_equal_transformers(tmp_path, kind, tied):
    model = make_model(kind, tmp_path, tied=tied)
    # Three rows for seven completions of unequal length: admission, copies between rows and compaction all happen.
    core = make_core(tmp_path, max_running=3)
    requests = [
        make_request(str(i), prompt, seed=i, n=1 + i % 2, max_new_tokens=8 + 15 * i, temperature=(1.0, 0.6)[i % 2])
        for i, prompt in enumerate(PROMPTS)
    ]
    for request, results in zip(requests, run(core, *requests), strict=True):
        for result in results:
            assert len(result.tokens) == request.params.max_new_tokens
            assert result.finish_reason == "length"
            check_logprobs(model, request.prompt.tolist(), result, request.params.temperature)


def test_bfloat16_stays_close_to_transformers(tmp_path):
    model = make_model("qwen3", tmp_path)
    arch = read_model(tmp_path)
    weights = fuse(arch, read_tensors(tmp_path), dtype=torch.bfloat16, device=torch.device("cpu"))
    core = EngineCore(arch, weights, CoreSizes(max_running=4, max_queued=4, context=128))
    # Two lengths, so that attention needs its mask.
    prompts = PROMPTS[1:3]
    results = run(core, *[make_request(str(i), prompt, max_new_tokens=30) for i, prompt in enumerate(prompts)])
    model = model.to(torch.bfloat16)
    for prompt, [result] in zip(prompts, results, strict=True):
        expected = chosen(reference_logprobs(model, prompt, result.tokens.tolist()), result.tokens)
        assert np.abs(expected - result.logprobs).mean() < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_was_released_is_taken_again(two_models, dtype):
    _, path = two_models[0]
    arch = read_model(path)

    def weights():
        return fuse(arch, read_tensors(path), dtype=dtype, device=torch.device("cpu"))

    core = EngineCore(arch, weights(), CoreSizes(max_running=2, max_queued=4, context=128))
    [[before]] = run(core, make_request("a", PROMPTS[1], seed=1, max_new_tokens=20))
    core.release()
    held = [*core._model.weights.tensors(), core._cache.keys, core._cache.values]
    assert not any(tensor.untyped_storage().nbytes() for tensor in held)
    core.allocate()
    core.swap(weights(), 0)
    [[after]] = run(core, make_request("b", PROMPTS[1], seed=1, max_new_tokens=20))
    assert after.tokens.tolist() == before.tokens.tolist() and np.array_equal(after.logprobs, before.logprobs)


def test_completions_of_one_request_share_one_prefill(two_models):
    model, path = two_models[0]
    core = make_core(path, max_running=8)
    [results] = run(core, make_request("a", PROMPTS[2], n=6, max_new_tokens=5))
    assert core.counters.prefilled == len(PROMPTS[2]) - 1
    assert len({tuple(r.tokens.tolist()) for r in results}) == 6
    for result in results:
        check_logprobs(model, PROMPTS[2], result)


def test_later_completion_copies_prompt_of_running_sibling(two_models):
    model, path = two_models[0]
    core = make_core(path, max_running=3)
    # The short request leaves one row after two steps, then the others: completions of "b" join one by one.
    short = make_request("a", PROMPTS[1], n=2, max_new_tokens=2)
    long = make_request("b", PROMPTS[3], n=5, max_new_tokens=12)
    _, results = run(core, short, long)
    assert core.counters.prefilled == len(PROMPTS[1]) - 1 + len(PROMPTS[3]) - 1
    for result in results:
        check_logprobs(model, PROMPTS[3], result)


# ---- chunked prefill and shared prefixes


def test_long_prompt_prefills_in_chunks_while_others_decode(two_models):
    model, path = two_models[0]
    core = make_core(path, prefill_tokens=64, context=512)
    short = make_request("short", PROMPTS[1], max_new_tokens=60)
    core.submit(short)
    core.step()
    prompt = np.random.default_rng(0).integers(0, 97, 300).tolist()
    long = make_request("long", prompt, n=2, max_new_tokens=6)
    core.submit(long)
    lengths = []
    while len(core.scheduler.running) < 3:
        core.step()
        lengths.append(core.counters.tokens)
    # 299 tokens to compute, 64 a step: the fifth completes it, and each brings a token of the short one.
    assert lengths == [2, 3, 4, 5, 8]
    assert core.counters.prefilled == 2 + 299
    finish(core)
    for request in (short, long):
        for result in request.done.result(0):
            check_logprobs(model, request.prompt.tolist(), result)


def test_prompts_of_all_lengths_arrive_while_others_end(two_models):
    model, path = two_models[0]
    core = make_core(path, max_running=5, prefill_tokens=64, context=256)
    rng = np.random.default_rng(1)
    requests = [
        make_request(
            str(i), rng.integers(0, 97, int(rng.integers(1, 200))).tolist(), seed=i, n=1 + i % 3, max_new_tokens=3 + i
        )
        for i in range(14)
    ]
    for request, results in zip(requests, run(core, *requests), strict=True):
        for result in results:
            check_logprobs(model, request.prompt.tolist(), result)


def test_update_during_long_prefill_restarts_it(two_models):
    (_, old_path), (new, new_path) = two_models
    core = make_core(old_path, prefill_tokens=64, context=512)
    prompt = np.random.default_rng(0).integers(0, 97, 200).tolist()
    request = make_request("a", prompt, max_new_tokens=5)
    core.submit(request)
    core.step()
    assert core.cached_tokens == 64
    core.swap(read_weights(new_path), 1)
    assert core.cached_tokens == 0
    finish(core)
    [result] = request.done.result(0)
    assert result.segments == [(1, 5)]
    check_logprobs(new, prompt, result)


def test_update_recomputes_prompt_of_group_once(two_models):
    (_, old_path), (new, new_path) = two_models
    core = make_core(old_path)
    request = make_request("a", PROMPTS[2], n=6, max_new_tokens=20)
    core.submit(request)
    for _ in range(9):
        core.step()
    before = core.counters.prefilled
    assert before == 39
    core.swap(read_weights(new_path), 1)
    finish(core)
    # Nine tokens each, of which the last is fed by decoding; one prompt of 40.
    assert core.counters.prefilled - before == 40 + 6 * 8
    for result in request.done.result(0):
        assert result.segments == [(-1, 9), (1, 11)]
        expected = chosen(reference_logprobs(new, PROMPTS[2], result.tokens.tolist()), result.tokens)
        assert np.abs(expected - result.logprobs)[9:].max() <= 1e-4


def test_continued_completions_of_a_group_share_its_prompt(two_models):
    model, path = two_models[0]
    core = make_core(path)
    begun = [[*PROMPTS[2], 90 - i, i, 3, 2] for i in range(5)]
    requests = [make_request(str(i), prompt, seed=i, max_new_tokens=8) for i, prompt in enumerate(begun)]
    for prompt, [result] in zip(begun, run(core, *requests), strict=True):
        check_logprobs(model, prompt, result)
    assert core.counters.prefilled == 40 + 5 * 3  # the last token of each is fed by decoding


# ---- weight updates in the middle of completions


def test_update_in_the_middle_of_completions(two_models):
    (old, old_path), (new, new_path) = two_models
    core = make_core(old_path, max_running=4)
    requests = [make_request(str(i), p, seed=i, max_new_tokens=20 + i) for i, p in enumerate(PROMPTS)]
    for request in requests:
        core.submit(request)
    core.version = 3
    for _ in range(9):
        core.step()
    core.swap(read_weights(new_path), 4)
    finish(core)
    for request in requests:
        [result] = request.done.result(0)
        prompt, tokens = request.prompt.tolist(), result.tokens.tolist()
        assert result.segments == [(3, 9), (4, len(tokens) - 9)]
        before = chosen(reference_logprobs(old, prompt, tokens), tokens)
        after = chosen(reference_logprobs(new, prompt, tokens), tokens)
        assert np.abs(before[:9] - result.logprobs[:9]).max() <= 1e-4
        assert np.abs(after[9:] - result.logprobs[9:]).max() <= 1e-4
        assert np.abs(before[9:] - after[9:]).max() > 0.1  # the two models do differ


def test_continuation_after_update_equals_fresh_prefill(two_models):
    (_, old_path), (_, new_path) = two_models
    core = make_core(old_path)
    request = make_request("a", PROMPTS[3], temperature=0.0, max_new_tokens=24)
    core.submit(request)
    for _ in range(10):
        core.step()
    core.swap(read_weights(new_path), 1)
    finish(core)
    [result] = request.done.result(0)
    prefix = PROMPTS[3] + result.tokens[:10].tolist()
    [[fresh]] = run(make_core(new_path), make_request("b", prefix, temperature=0.0, max_new_tokens=14))
    assert fresh.tokens.tolist() == result.tokens[10:].tolist()
    assert np.abs(fresh.logprobs - result.logprobs[10:]).max() <= 1e-4


def test_dropped_cache_is_recomputed_without_a_trace(two_models):
    _, path = two_models[0]

    def request():
        return make_request("a", PROMPTS[2], n=3, max_new_tokens=20)

    [undisturbed] = run(make_core(path), request())
    core, again = make_core(path), request()
    core.submit(again)
    for _ in range(7):
        core.step()
    core.drop_cache()
    finish(core)
    for mine, theirs in zip(again.done.result(0), undisturbed, strict=True):
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        assert np.abs(mine.logprobs - theirs.logprobs).max() <= 1e-5


# ---- aborts, limits, bad weights


def test_abort_returns_what_there_is(two_models):
    _, path = two_models[0]
    core = make_core(path, max_running=2)
    running, waiting = (make_request(rid, PROMPTS[1], n=3, max_new_tokens=50) for rid in "ab")
    core.submit(running)
    core.submit(waiting)
    for _ in range(4):
        core.step()
    core.abort(running)
    results = running.done.result(0)
    assert [len(r.tokens) for r in results] == [4, 4, 0]  # two ran, the third never had a row
    assert {r.finish_reason for r in results} == {"abort"}
    core.abort(waiting)
    assert [len(r.tokens) for r in waiting.done.result(0)] == [0, 0, 0]
    assert core.idle
    [[after]] = run(core, make_request("c", PROMPTS[0], max_new_tokens=5))
    assert len(after.tokens) == 5


def test_full_queue_refuses_and_recovers(two_models):
    _, path = two_models[0]
    core = make_core(path, max_running=2, max_queued=3)
    accepted = [make_request(str(i), [1], max_new_tokens=2) for i in range(5)]
    for request in accepted:
        core.submit(request)
    with pytest.raises(GenerationError, match="queue full: 5 completions wait.*max_queued=3") as refused:
        core.submit(make_request("late", [1], max_new_tokens=2))
    assert refused.value.retryable
    finish(core)
    assert all(len(request.done.result(0)[0].tokens) == 2 for request in accepted)
    run(core, make_request("late", [1], max_new_tokens=2))


def test_id_in_use_is_refused(two_models):
    _, path = two_models[0]
    core = make_core(path)
    core.submit(make_request("a", [1], max_new_tokens=2))
    with pytest.raises(GenerationError, match="rid='a'") as refused:
        core.submit(make_request("a", [1], max_new_tokens=2))
    assert not refused.value.retryable


def overflowing(path):
    broken = read_weights(path)
    broken.layers[0].down.fill_(float("nan"))
    return broken


def test_overflow_fails_its_request_with_the_version(two_models):
    """The engine serves later requests with a good version."""
    _, path = two_models[0]
    core = make_core(path, max_running=2)
    core.swap(overflowing(path), 12)
    with pytest.raises(GenerationError, match="version 12 .*not finite") as caught:
        run(core, make_request("a", PROMPTS[1], n=3, max_new_tokens=3))
    assert not caught.value.retryable and core.idle
    core.swap(read_weights(path), 13)
    [[good]] = run(core, make_request("b", PROMPTS[1], max_new_tokens=3))
    assert good.segments == [(13, 3)]


def test_overflow_is_found_before_the_end(two_models):
    """A client that wants progress does not wait for thousands of tokens that cannot be trained."""
    _, path = two_models[0]
    core = make_core(path)
    core.swap(overflowing(path), 12)
    request = make_request("a", PROMPTS[1], n=2, max_new_tokens=50)
    core.submit(request)
    core.step()
    assert core.snapshot(request) is None and core.idle
    with pytest.raises(GenerationError, match="version 12 .*not finite"):
        request.done.result(0)


def test_snapshot_is_the_beginning_of_the_result(two_models):
    _, path = two_models[0]
    core = make_core(path, max_running=2)
    request = make_request("a", PROMPTS[1], n=3, max_new_tokens=8)
    core.submit(request)
    for _ in range(4):
        core.step()
    first = core.snapshot(request)
    core.swap(read_weights(path), 7)
    core.step()
    second = core.snapshot(request)
    assert [one.segments for one in first.completions] == [[(-1, 4)], [(-1, 4)], []]
    assert [one.segments for one in second.completions] == [[(-1, 4), (7, 1)], [(-1, 4), (7, 1)], []]
    assert first.running == second.running == {0, 1, 2} and second.moved > first.moved
    finish(core)
    for early, late in zip(second.completions, request.done.result(0), strict=True):
        count = len(early.tokens)
        assert early.tokens.tolist() == late.tokens[:count].tolist()
        assert early.logprobs.tolist() == late.logprobs[:count].tolist()


def test_completion_leaves_its_spans(two_models, tmp_path):
    """One decode span for each version that samples, and between them the prefill after the update; no gaps."""
    (_, old_path), (_, new_path) = two_models
    core = make_core(old_path, max_running=1)
    first, second = (make_request(rid, PROMPTS[0], seed=1, max_new_tokens=6) for rid in ("first", "second"))
    with recording(tmp_path) as spans:
        core.submit(first)
        core.submit(second)
        core.version = 3
        for _ in range(2):
            core.step()
        core.swap(read_weights(new_path), 4)
        finish(core)
    own = [span for span in spans() if span.unit == "first#0"]
    assert [span.name for span in own] == ["queue", "prefill", "decode", "prefill", "decode"]
    assert [(s.facts["version"], s.facts["tokens"]) for s in own if s.name == "decode"] == [(3, 2), (4, 4)]
    assert all(one.end == other.begin for one, other in pairwise(own))
    (queued,) = [span for span in spans() if span.unit == "second#0" and span.name == "queue"]
    assert queued.end >= own[-1].end  # the only place was taken until then


def test_aborted_completion_ends_its_span(two_models, tmp_path):
    core = make_core(two_models[0][1], max_running=1)
    request = make_request("cut", PROMPTS[0], seed=1, max_new_tokens=6)
    with recording(tmp_path) as spans:
        core.submit(request)
        core.step()
        core.abort(request)
    assert [(span.name, span.facts.get("end")) for span in spans()][-1] == ("decode", "abort")
