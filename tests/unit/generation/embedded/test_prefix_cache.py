"""Keys of ended completions in the next turns: tokens that are computed, equal results, and versions."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from realsys.generation.embedded.backend import EmbeddedBackend
from realsys.generation.embedded.prefix_cache import KvPolicy
from realsys.generation.embedded.scheduler import Request
from tests.support.processes.config_trees import changed
from tests.support.serving.generation_models import (
    VOCAB,
    check_logprobs,
    chosen,
    finish,
    make_core,
    make_request,
    old_and_new,
    read_weights,
    reference_logprobs,
    run,
)

PROMPT = list(range(40))
TAIL = [7, 3, 9]
KEEP = KvPolicy(keep=True)


@pytest.fixture(scope="module")
def two_models(tmp_path_factory):
    return old_and_new(tmp_path_factory.mktemp("models"))


def turn(core, prompt, *, seed=0, count=10, **params):
    """Sample ``count`` tokens. Returns them, the result, and the number of tokens that were prefilled."""
    before = core.counters.prefilled
    [[result]] = run(core, make_request(f"t{seed}", prompt, seed=seed, max_new_tokens=count, **params))
    return result.tokens.tolist(), result, core.counters.prefilled - before


# ---- tokens that are computed


def test_next_turn_computes_new_tokens_only(two_models):
    model, path = two_models[0]
    core = make_core(path, context=512, max_running=2)
    conversation = list(PROMPT)
    for number in range(8):
        tokens, result, prefilled = turn(core, conversation, seed=number)
        # The last token of a completion was never fed, and that of the prompt is fed by decoding.
        assert prefilled == (len(PROMPT) - 1 if number == 0 else len(TAIL))
        check_logprobs(model, conversation, result)
        conversation += tokens + TAIL
    assert core.counters.reused == sum(len(PROMPT) + 9 + 13 * number for number in range(7))


def test_conversations_keep_their_rows_side_by_side(two_models):
    """Turns of several conversations alternate; each finds its own keys, whichever rows have moved."""
    model, path = two_models[0]
    core = make_core(path, context=256, max_running=4)
    conversations = [[10 * number] * 40 for number in range(4)]
    for number in range(12):
        talk = conversations[number % 4]
        tokens, result, prefilled = turn(core, talk, seed=number, count=5 + number)
        assert prefilled == (39 if number < 4 else len(TAIL))
        check_logprobs(model, talk, result)
        talk += tokens + TAIL


def test_branch_leaves_the_other_branch_cached(two_models):
    model, path = two_models[0]
    core = make_core(path)
    tokens, _, _ = turn(core, PROMPT)
    branch = [*PROMPT, *tokens[:4], 90, 91, 92]
    _, result, prefilled = turn(core, branch, seed=1)
    assert prefilled == 2
    check_logprobs(model, branch, result)
    _, _, prefilled = turn(core, [*PROMPT, *tokens, *TAIL], seed=2)
    assert prefilled == len(TAIL)


def test_running_completions_evict_the_row_used_longest_ago(two_models):
    _, path = two_models[0]
    core = make_core(path, max_running=3)
    talks = [[number] * 30 for number in range(3)]
    ends = [talk + turn(core, talk, seed=number)[0] + TAIL for number, talk in enumerate(talks)]
    turn(core, [50] * 30, seed=3)  # takes the row of the first
    assert [turn(core, ends[number], seed=4 + number, count=1)[2] for number in (2, 1)] == [len(TAIL)] * 2
    assert turn(core, ends[0], seed=6, count=1)[2] == len(ends[0]) - 1


@pytest.mark.parametrize(("talks", "warnings"), [(4, 0), (5, 1)])
def test_server_warns_if_conversations_outnumber_rows(two_models, caplog, talks, warnings):
    core = make_core(two_models[0][1], context=512, max_running=4)
    conversations = [[10 * number] * 40 for number in range(talks)]
    for number in range(14 * talks):
        talk = conversations[number % talks]
        talk += turn(core, talk, seed=number, count=5)[0] + TAIL
    assert bool(core.counters.reused) != bool(warnings) and bool(core.rows.evicted.tokens) == bool(warnings)
    assert core.rows.evicted.tokens <= core.counters.prefilled
    assert [record.getMessage().count("generation.embedded.cache_rows") for record in caplog.records] == [1] * warnings


def test_keys_that_no_request_follows_are_no_loss(two_models):
    """Ended conversations leave their rows to new ones; keys of older weights are not missed either."""
    _, path = two_models[0]
    core = make_core(path, max_running=1)
    ends = [[number] * 30 + turn(core, [number] * 30, seed=number)[0] for number in range(40)]
    assert core.rows.evicted.tokens == 0
    core.swap(read_weights(path), 0)
    turn(core, ends[0] + TAIL, seed=40)
    assert core.rows.evicted.tokens == 0


def test_further_rows_hold_keys_while_all_slots_run(two_models):
    _, path = two_models[0]
    core = make_core(path, max_running=1, cache_rows=1)
    first = PROMPT + turn(core, PROMPT)[0] + TAIL
    second = [60] * 30 + turn(core, [60] * 30, seed=1)[0] + TAIL
    assert [turn(core, talk, seed=2 + i, count=3)[2] for i, talk in enumerate([first, second])] == [len(TAIL)] * 2


def test_long_tail_in_chunks_continues_in_its_row(two_models):
    """A tail above the budget is computed in parts while another completion decodes and joins it."""
    model, path = two_models[0]
    core = make_core(path, context=512, max_running=3, prefill_tokens=64)
    tokens, _, _ = turn(core, PROMPT)
    others = [make_request(f"o{i}", [i] * 20, seed=i, max_new_tokens=30) for i in range(2)]
    tail = np.random.default_rng(0).integers(0, VOCAB, 200).tolist()
    late = make_request("late", PROMPT + tokens + tail, max_new_tokens=5)
    core.submit(others[0])
    core.step()
    before = core.counters.prefilled
    core.submit(late)
    core.step()
    core.submit(others[1])
    finish(core)
    assert core.counters.prefilled - before == 200 + 19
    for request in (*others, late):
        check_logprobs(model, request.prompt.tolist(), request.done.result(0)[0])


def test_abort_in_the_middle_leaves_its_keys(two_models):
    """A client that retries, and a completion that continues after an interruption, compute nothing again."""
    _, path = two_models[0]
    core = make_core(path)
    request = make_request("a", PROMPT, max_new_tokens=30)
    core.submit(request)
    for _ in range(6):
        core.step()
    core.abort(request)
    tokens = request.done.result(0)[0].tokens.tolist()
    assert turn(core, PROMPT + tokens, seed=1, answer_prefix=len(tokens))[2] == 0
    assert turn(core, PROMPT, seed=2)[2] == 0


@pytest.mark.parametrize(
    ("settings", "retains"),
    [
        (["rollout.agent=single_turn"], False),
        (["rollout.agent=single_turn", "generation.sampling.new_tokens_per_chunk=16"], True),
        (["rollout.agent=multi_turn"], True),
        (["rollout.agent=not_importable_here:run", "rollout.agent_python=/usr/bin/python3"], True),
    ],
)
def test_keys_stay_only_if_a_request_may_follow(two_models, settings, retains):
    """One turn per episode pays nothing for keys that no request would use."""
    assert EmbeddedBackend(changed(*settings)).retains() == retains
    core = make_core(two_models[0][1], kv=KvPolicy(retain=retains))
    turn(core, PROMPT)
    assert bool(core.rows.tokens) == retains


def test_keys_that_are_not_finite_are_not_retained(two_models):
    _, path = two_models[0]
    core = make_core(path, kv=KEEP)
    broken = read_weights(path)
    broken.layers[0].down.fill_(float("nan"))
    core.swap(broken, 1)
    request = make_request("a", PROMPT, max_new_tokens=3)
    core.submit(request)
    finish(core)
    assert request.done.exception(0) is not None and core.rows.tokens == 0


# ---- nothing changes


@dataclass
class Talk:
    """A conversation with turns of random length, and its request in progress."""

    number: int
    random: random.Random
    history: list[int] = field(default_factory=list)
    turns: list[Request] = field(default_factory=list)

    def next_turn(self):
        rng = self.random
        if self.turns:
            [last] = self.turns[-1].done.result(0)
            self.history = [*self.turns[-1].prompt.tolist(), *last.tokens.tolist()]
            if rng.random() < 0.2:  # rewritten history
                self.history = self.history[: rng.randint(1, len(self.history))]
        tail = rng.randint(1, 30) if not self.turns else rng.randint(1, 90) if rng.random() < 0.2 else rng.randint(1, 6)
        common = rng.random() < 0.5 and not self.turns
        self.history += [5] * 25 if common else []
        self.history += [rng.randrange(VOCAB) for _ in range(tail)]
        self.history = self.history[-200:]
        params = {"repetition_penalty": 1.3} if rng.random() < 0.2 else {}
        if self.turns and rng.random() < 0.2:
            params["answer_prefix"] = 1
        request = make_request(
            f"{self.number}.{len(self.turns)}",
            self.history,
            seed=rng.getrandbits(30),
            max_new_tokens=rng.choice([1, 3, 8, 20]),
            **params,
        )
        self.turns.append(request)
        return request


def converse(core, seed, between, *, aborts=True):
    """Hold random conversations at the same time; ``between(rng)`` runs before each step. Returns all requests."""
    rng = random.Random(seed)
    talks = [Talk(number, random.Random(seed * 100 + number)) for number in range(6)]
    left = 24
    while left or not core.idle:
        for talk in talks:
            if left and (not talk.turns or talk.turns[-1].done.done()) and rng.random() < 0.4:
                core.submit(talk.next_turn())
                left -= 1
        between(rng)
        core.step()
        open_turns = [talk.turns[-1] for talk in talks if talk.turns and not talk.turns[-1].done.done()]
        if aborts and open_turns and rng.random() < 0.03:
            core.abort(rng.choice(open_turns))
    return [request for talk in talks for request in talk.turns]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([2, 3, 8]), st.sampled_from([0, 2]))
def test_conversations_equal_those_without_retention(two_models, seed, running, rows):
    """The same tokens, and log-probs within the noise of other batch shapes.

    A draw may lie within this noise of the boundary between two neighbouring tokens. Then these two may be exchanged.
    """
    _, path = two_models[0]

    def talks(forget):
        core = make_core(path, context=256, max_running=running, prefill_tokens=64, cache_rows=rows)
        # No aborts: they come earlier or later in a conversation, if its prompts take fewer steps.
        requests = converse(core, seed, lambda _: core.rows.forget() if forget else None, aborts=False)
        return core, {request.rid: request for request in requests}

    with_cache, mine = talks(False)
    without, theirs = talks(True)
    compared, exchanged = 0, 0
    for rid in mine.keys() & theirs.keys():
        [one], [other] = mine[rid].done.result(0), theirs[rid].done.result(0)
        if mine[rid].prompt.tolist() == theirs[rid].prompt.tolist():
            compared += 1
            pairs = list(zip(one.tokens.tolist(), other.tokens.tolist(), strict=False))
            equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
            if equal < len(pairs):
                exchanged += 1
                assert abs(pairs[equal][0] - pairs[equal][1]) == 1
            else:
                assert len(one.tokens) == len(other.tokens)
            assert np.abs(one.logprobs[:equal] - other.logprobs[:equal]).max(initial=0.0) <= 2e-5
            assert one.kv_segments is None
    assert compared >= (12 if exchanged else 18) and exchanged <= 1
    if running + rows >= 6:  # fewer rows for six conversations may leave none until the next turn
        assert with_cache.counters.prefilled < without.counters.prefilled


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([2, 3, 8]), st.sampled_from([0, 2]))
def test_every_token_belongs_to_its_version(two_models, seed, running, rows):
    """With updates, aborts and evictions at any time, log-probs are those of the weights of their version."""
    models = [two_models[0][0], two_models[1][0]]
    paths = [two_models[0][1], two_models[1][1]]
    core = make_core(paths[0], context=256, max_running=running, prefill_tokens=64, cache_rows=rows)
    core.swap(read_weights(paths[0]), 0)

    def update(rng):
        if rng.random() < 0.05:
            version = core.version + 1
            core.swap(read_weights(paths[version % 2]), version)

    for request in converse(core, seed, update):
        [result] = request.done.result(0)
        tokens, prompt = result.tokens.tolist(), request.prompt.tolist()
        if not tokens:
            continue
        expected = [chosen(reference_logprobs(model, prompt, tokens), tokens) for model in models]
        versions = np.repeat(*map(np.asarray, zip(*result.segments, strict=True)))
        by_version = np.where(versions % 2 == 0, *expected)
        assert np.abs(by_version - result.logprobs).max() <= 1e-4
        assert result.kv_segments is None
    assert core.counters.reused > 0 or running + rows < 6


# ---- versions


@torch.no_grad()
def on_kept_keys(parts, tokens, count):
    """Log-probs of the last ``count`` tokens if each (model, tokens) part has computed the keys of its tokens."""
    cache, position, logits = DynamicCache(), 0, []
    for model, length in parts:
        ids = torch.tensor([tokens[position : position + length]])
        logits.append(model(ids, past_key_values=cache, use_cache=True).logits[0])
        position += length
    logprobs = torch.cat(logits).float().log_softmax(-1)[-count - 1 : -1]
    return chosen(logprobs, tokens[-count:])


def turn_before_update(models, versions, kv=None):
    """Sample a turn at the first of ``versions`` (None: of none), then load the other model as the second of them.

    Returns the core, and the prompt of the next turn.
    """
    (_, old_path), (_, new_path) = models
    core, (before, after) = make_core(old_path, kv=kv), versions
    if before is not None:
        core.swap(read_weights(old_path), before)
    first, _, _ = turn(core, PROMPT)
    core.swap(read_weights(new_path), after)
    return core, PROMPT + first + TAIL


def test_kept_keys_serve_the_running_completion(two_models):
    (old, old_path), (new, new_path) = two_models
    core = make_core(old_path, kv=KEEP)
    core.swap(read_weights(old_path), 3)
    request = make_request("a", PROMPT, max_new_tokens=20)
    core.submit(request)
    for _ in range(9):
        core.step()
    before = core.counters.prefilled
    core.swap(read_weights(new_path), 4)
    finish(core)
    [result] = request.done.result(0)
    assert core.counters.prefilled == before
    assert result.segments == [(3, 9), (4, 11)] and result.kv_segments == [(3, 20)]
    tokens = PROMPT + result.tokens.tolist()
    # The ninth token was sampled by the old weights, and is fed to the new ones.
    expected = on_kept_keys([(old, len(PROMPT) + 8), (new, 12)], tokens, 20)
    assert np.abs(expected - result.logprobs).max() <= 1e-4
    recomputed = chosen(reference_logprobs(new, PROMPT, result.tokens.tolist()), result.tokens.tolist())
    assert np.abs(recomputed - result.logprobs)[9:].max() > 0.1  # the old keys do make a difference


def test_next_turn_after_update_within_the_bound_uses_old_keys(two_models):
    (old, _), (new, _) = two_models
    core, prompt = turn_before_update(two_models, (3, 5), KvPolicy(keep=True, reuse_versions=2))
    _, result, prefilled = turn(core, prompt, seed=1)
    assert prefilled == len(TAIL)
    assert result.segments == [(5, 10)] and result.kv_segments == [(3, 10)]
    expected = on_kept_keys([(old, 49), (new, len(prompt) - 49 + 10)], prompt + result.tokens.tolist(), 10)
    assert np.abs(expected - result.logprobs).max() <= 1e-4


@pytest.mark.parametrize(
    ("kv", "version"), [(KvPolicy(), 4), (KEEP, 4), (KvPolicy(keep=True, reuse_versions=2), 6)], ids=str
)
def test_keys_beyond_the_bound_are_never_used(two_models, kv, version):
    new, new_path = two_models[1]
    core, prompt = turn_before_update(two_models, (3, version), kv)
    assert core.rows.tokens == 0
    _, result, prefilled = turn(core, prompt, seed=1)
    assert prefilled == len(prompt) - 1 and result.kv_segments is None
    check_logprobs(new, prompt, result)
    [[fresh]] = run(make_core(new_path), make_request("b", prompt, seed=1, max_new_tokens=10))
    assert fresh.tokens.tolist() == result.tokens.tolist()


def test_running_donor_beyond_the_bound_is_not_copied(two_models):
    (_, old_path), (new, new_path) = two_models
    core = make_core(old_path, kv=KEEP)
    core.swap(read_weights(old_path), 0)
    running = make_request("a", PROMPT, max_new_tokens=20)
    core.submit(running)
    core.step()
    core.swap(read_weights(new_path), 1)
    late = make_request("b", PROMPT, seed=1, max_new_tokens=5)
    before = core.counters.prefilled
    core.submit(late)
    core.step()
    assert core.counters.prefilled - before == len(PROMPT) - 1
    finish(core)
    check_logprobs(new, PROMPT, late.done.result(0)[0])


def test_keys_of_weights_without_version_are_dropped(two_models):
    """A row cannot carry their stamp."""
    core, prompt = turn_before_update(two_models, (None, 0), KvPolicy(keep=True, reuse_versions=9))
    _, result, _ = turn(core, prompt, seed=1)
    assert result.kv_segments is None
    check_logprobs(two_models[1][0], prompt, result)


def test_earlier_version_number_drops_all_keys(two_models):
    """After a crash a trainer may publish other weights under a number that this server has passed."""
    core, prompt = turn_before_update(two_models, (7, 7), KvPolicy(keep=True, reuse_versions=9))
    _, result, _ = turn(core, prompt, seed=1)
    check_logprobs(two_models[1][0], prompt, result)


def test_same_weights_under_a_new_version_keep_their_keys(two_models):
    _, path = two_models[0]
    core = make_core(path)
    core.swap(read_weights(path), 0)
    first, _, _ = turn(core, PROMPT)
    core.relabel(1)
    _, result, prefilled = turn(core, PROMPT + first + TAIL, seed=1)
    assert prefilled == len(TAIL) and result.segments == [(1, 10)] and result.kv_segments is None


def test_same_weights_under_lower_number_drop_keys(two_models):
    """A sequence on keys of older weights would else carry stamps above its version, which the stream refuses."""
    (_, old_path), (new, new_path) = two_models
    core = make_core(old_path, kv=KvPolicy(keep=True, reuse_versions=9))
    core.swap(read_weights(old_path), 3)
    first, _, _ = turn(core, PROMPT)
    running = make_request("a", [60, *PROMPT], seed=1, max_new_tokens=20)
    core.submit(running)
    for _ in range(5):
        core.step()
    core.swap(read_weights(new_path), 4)
    core.step()
    core.relabel(2)
    finish(core)
    [result] = running.done.result(0)
    assert result.segments == [(3, 5), (4, 1), (2, 14)] and result.kv_segments == [(3, 6), (2, 14)]
    prompt = PROMPT + first + TAIL
    _, result, _ = turn(core, prompt, seed=2)
    assert result.segments == [(2, 10)] and result.kv_segments is None
    check_logprobs(new, prompt, result)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([2, 8]), st.sampled_from([0, 1, 3]))
def test_no_completion_begins_on_keys_beyond_the_bound(two_models, seed, running, reuse):
    paths = [two_models[0][1], two_models[1][1]]
    core = make_core(paths[0], context=256, max_running=running, cache_rows=2, kv=KvPolicy(True, reuse))
    core.swap(read_weights(paths[0]), 0)

    def update(rng):
        if rng.random() < 0.1:
            version = core.version + rng.randint(1, 2)
            if rng.random() < 0.2:
                core.relabel(version)
            else:
                core.swap(read_weights(paths[version % 2]), version)

    older = 0
    for request in converse(core, seed, update):
        [result] = request.done.result(0)
        keys = result.kv_segments or result.segments
        assert sum(count for _, count in keys) == len(result.tokens)
        if keys:
            assert result.segments[0][0] - reuse <= keys[0][0] <= result.segments[0][0]
            older += keys[0][0] < result.segments[0][0]
    assert reuse or not older
