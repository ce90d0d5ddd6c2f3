"""Parts of the embedded engine that need no model: layout of rows, random numbers, sampling, model directories."""

from concurrent.futures import Future

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.config.schema import PenaltyConfig, SamplingConfig
from realsys.generation.client import SamplingSpec
from realsys.generation.completion import EMPTY
from realsys.generation.embedded.prefix_cache import PrefixIndex, plan_pass
from realsys.generation.embedded.sampler import RowParams, sample
from realsys.generation.embedded.scheduler import LayoutPlanner, LiveCompletion, Request, Scheduler
from realsys.generation.protocol import CONTINUES, SamplingParams
from realsys.generation.sampling_rules import uniforms
from realsys.rollout.group_player import sampling_spec

CPU = torch.device("cpu")


# ---- rows


@st.composite
def rows_in_use(draw):
    """Some rows of a cache with holes in it, and some completions that are not cached yet."""
    used = draw(st.lists(st.integers(0, 40), unique=True, max_size=30))
    current = np.asarray(used + [-1] * draw(st.integers(0, 10)), np.int64)
    lengths = draw(st.lists(st.integers(1, 500), min_size=len(current), max_size=len(current)))
    return current, np.asarray(lengths, np.int64), draw(st.integers(0, 2000))


@settings(max_examples=150, deadline=None)
@given(rows_in_use())
def test_dense_layout_groups_cover_every_row_and_length(case):
    current, lengths, overhead = case
    layout = LayoutPlanner(overhead).plan(current, lengths)
    assert sorted(layout.rows) == list(range(len(current)))
    # A move is exactly a cached row that changes its place; carried out at once, moves lead to `rows`.
    moved = {int(a): int(b) for a, b in zip(layout.sources, layout.targets, strict=True)}
    assert moved == {int(a): int(b) for a, b in zip(current, layout.rows, strict=True) if a >= 0 and a != b}
    by_row = np.empty(len(current), np.int64)
    by_row[layout.rows] = lengths
    edge = 0
    for group in layout.groups:
        assert group.start == edge < group.stop
        part = by_row[group.start : group.stop]
        assert group.length == part.max()
        assert group.equal == (part.min() == part.max())
        edge = group.stop
    assert edge == len(current)
    if moved:
        assert layout.moved_length == max(lengths[current == source].item() for source in moved)


def test_long_completion_does_not_slow_short_ones():
    lengths = np.asarray([20, 21, 900, 22, 20, 23], np.int64)
    layout = LayoutPlanner(50).plan(np.arange(6), lengths)
    read = sum((g.stop - g.start) * g.length for g in layout.groups)
    assert read <= 900 + 5 * 23
    assert len(LayoutPlanner(10_000).plan(np.arange(6), lengths).groups) == 1  # not worth a second group


def test_nobody_moves_without_a_gain():
    lengths = np.asarray([30, 31, 30, 32], np.int64)
    layout = LayoutPlanner(100).plan(np.arange(4), lengths)
    assert layout.rows.tolist() == [0, 1, 2, 3]
    assert len(layout.sources) == 0


# ---- prefill


def completion(prompt, generated=0, cached=0):
    params = SamplingParams(max_new_tokens=64)
    request = Request("r", np.asarray(prompt, np.int32), params, 0, (), Future())
    return LiveCompletion(request, 0, 0, len(prompt) + generated, cached=cached)


def test_continuations_get_a_slot_before_new_prompts():
    """Those of one kind stay in the order in which they came, also behind a request that is partly admitted."""
    scheduler = Scheduler(1, 20, LayoutPlanner(0))

    def submit(rid, priority=0, n=1):
        params = SamplingParams(n=n, priority=priority)
        scheduler.submit(Request(rid, np.asarray([1], np.int32), params, (), 0, Future()))

    submit("new", n=2)
    (running,) = scheduler.admit()
    for rid, priority in (("newer", 0), ("turn", CONTINUES), ("newest", 0), ("later turn", CONTINUES)):
        submit(rid, priority)
    order = []
    while running:
        order.append(running.request.rid)
        scheduler.finish([(running, EMPTY)])
        running = next(iter(scheduler.admit()), None)
    assert order == ["new", "turn", "later turn", "new", "newer", "newest"]


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


few_tokens = st.lists(st.sampled_from([0, 1, 256, 70000]), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.lists(few_tokens, min_size=1, max_size=12), few_tokens, st.integers(0, 5))
def test_index_neighbour_shares_the_longest_prefix(prompts, prompt, generated):
    others = [completion(other, generated=20) for other in prompts]
    index = PrefixIndex(others[: len(others) // 2])
    for other in others[len(others) // 2 :]:
        index.add(other)
    best, shared = index.longest(completion(prompt, generated))
    longest = max(min(common(prompt, other), len(prompt) + generated - 1) for other in prompts)
    assert shared == longest
    if best is not None:
        assert common(prompt, best.request.prompt.tolist()) >= shared


def spans(parts):
    return [(part.start, part.stop) for part in parts]


def test_a_pass_takes_from_the_front_what_fits():
    waiting = [completion([i] * length) for i, length in enumerate([31, 41, 301, 11])]
    assert spans(plan_pass(waiting, [], 100)) == [(0, 30), (0, 40)]  # the third does not fit: it waits to be first
    long = waiting[2:]
    assert spans(plan_pass(long, [], 100)) == [(0, 100)]
    long[0].cached = 200
    parts = plan_pass(long, [], 105)
    assert spans(parts) == [(200, 300)]
    assert parts[0].completes


def test_sharers_wait_for_first_and_then_copy():
    prompt = list(range(40))
    group = [completion(prompt, generated) for generated in (3, 5, 9)]
    stranger = completion([7] * 20)
    assert [part.completion for part in plan_pass([*group, stranger], [], 500)] == [group[0], stranger]
    parts = plan_pass(group[1:], [group[0], stranger], 500)
    assert spans(parts) == [(40, 44), (40, 48)]
    assert {id(part.donor) for part in parts} == {id(group[0])}


def test_short_common_prefix_does_not_delay():
    waiting = [completion([1, 2, 3, *([i] * 30)]) for i in range(3)]
    assert spans(plan_pass(waiting, [], 500)) == [(0, 32)] * 3


def test_everything_shared_leaves_nothing_to_compute():
    prompt = [4, 5, 6]
    [first] = plan_pass([completion(prompt), completion(prompt)], [], 500)
    assert spans([first]) == [(0, 2)]
    assert spans(plan_pass([completion(prompt)], [first.completion], 500)) == [(2, 2)]


# ---- what a client sends


def test_what_is_off_is_not_sent():
    assert SamplingSpec(max_new_tokens=5).params(3) == {"max_new_tokens": 5, "sampling_seed": 3}
    spec = SamplingSpec(max_new_tokens=5, stop=("x",), min_p=0.1, answer_prefix=2, new_tokens_per_chunk=4)
    sent = spec.params(3)
    assert sent == {"max_new_tokens": 5, "sampling_seed": 3, "stop": ("x",), "min_p": 0.1, "answer_prefix": 2}
    msgspec.convert(sent, SamplingParams)  # every name is known, and no field of the chunking is sent


PENALTIES = {f"{name}_penalty": name for name in PenaltyConfig.model_fields}
#: of one request, not of a trial
PER_REQUEST = {"n", "sampling_seed", "answer_prefix", "top_logprobs_num", "structural_tag", "priority"}


def test_config_offers_every_sampling_parameter():
    """generation.sampling is the user's page of SamplingParams: same names, same defaults."""
    server, settings = msgspec.structs.fields(SamplingParams), sampling_spec(SamplingConfig(), ())
    offered = {*SamplingConfig.model_fields} - {"penalties", "new_tokens_per_chunk"} | {*PENALTIES}
    assert {f.name for f in server} - PER_REQUEST == offered
    for field in server:
        if field.name not in PER_REQUEST | {"max_new_tokens"}:
            assert getattr(settings, field.name) == field.default, field.name


@pytest.mark.parametrize(
    "name", sorted({*SamplingConfig.model_fields, *PENALTIES} - {"stop", "stop_token_ids", "penalties"})
)
def test_config_accepts_only_what_a_server_does(name):
    for value in (-10, -3, -2, -1, -1e-9, 0, 1e-7, 1e-6, 1e-3, 0.5, 1, 1.5, 2, 3, 1e9, float("inf"), float("nan")):
        try:
            own = {"penalties": {PENALTIES[name]: value}} if name in PENALTIES else {name: value}
            given = SamplingConfig(**{"max_new_tokens": 10**10, **own})
        except ValueError:
            continue
        assert sampling_spec(given, ()).problem() is None, value


# ---- random numbers


def test_uniforms_differ_by_seed_completion_and_position():
    """The numbers are uniform in [0, 1)."""
    numbers = np.concatenate([uniforms(seed, completion, 500) for seed in range(20) for completion in range(4)])
    assert numbers.min() >= 0 and numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    expected = len(numbers) / 20
    assert ((counts - expected) ** 2 / expected).sum() < 43.8  # chi square, 19 degrees of freedom, p = 0.001
    # 24 random bits: about 48 chance repetitions among 40,000; two streams that coincide would give 500 more.
    assert len(np.unique(numbers)) > len(numbers) - 150
    assert np.abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


def test_uniforms_prefix_does_not_depend_on_length():
    assert uniforms(3, 1, 10).tolist() == uniforms(3, 1, 100)[:10].tolist()
    uniforms(-1, 0, 1), uniforms(2**64 - 1, 0, 1)  # any integer is a seed


# ---- sampling


def draw(logits, uniform, **params):
    rows = [SamplingParams(**params)] * len(uniform)
    batch = torch.as_tensor(logits, dtype=torch.float32).repeat(len(uniform), 1)
    return sample(batch, RowParams.build(rows, CPU), torch.as_tensor(uniform, dtype=torch.float32))


@pytest.mark.parametrize("temperature", [1.0, 0.05, 1e-6])
@pytest.mark.parametrize("how", ["banned", "penalised"])
def test_logprob_of_very_unlikely_token_is_finite(temperature, how):
    """A stop token is banned, or a token has been penalised, and at a low temperature the rest had none to speak of: as
    a float 0, whose logarithm would look like a model that has diverged, and end the server.
    """
    logits = torch.tensor([[10.0, 0.0, -1.0]])
    params = RowParams.build([SamplingParams(temperature=temperature, repetition_penalty=2.0)], CPU)
    banned = torch.tensor([[0, 0]]) if how == "banned" else None
    counts = torch.tensor([[100.0, 0.0, 0.0]])
    if how == "penalised":
        params = RowParams.build([SamplingParams(temperature=temperature, frequency_penalty=2.0)], CPU)
    expected = (logits / temperature).log_softmax(-1)[0, 1]
    tokens, logprobs = sample(logits.clone(), params, torch.tensor([0.0]), banned, counts)
    assert tokens.tolist() == [1]
    assert torch.isfinite(expected) and torch.allclose(logprobs, expected)


def test_frequencies_are_the_probabilities_and_logprobs_are_theirs():
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0])
    temperature = 0.7
    expected = (logits / temperature).softmax(-1)
    grid = (torch.arange(20_000) + 0.5) / 20_000
    tokens, logprobs = draw(logits, grid, temperature=temperature)
    frequencies = torch.bincount(tokens, minlength=4) / len(tokens)
    assert (frequencies - expected).abs().max() < 1e-3
    assert (logprobs - expected.log()[tokens]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, {0, 2}),
        ({"top_p": 0.6}, {0}),
        ({"top_p": 0.85}, {0, 2}),
        ({"top_k": 1}, {0}),
        ({"min_p": 0.13}, {0, 1, 2}),  # 0.087 / 0.644 = 0.135
        ({"min_p": 0.14}, {0, 2}),
        ({"min_p": 1.0}, {0}),
        ({"min_p": 0.14, "top_k": 1}, {0}),
    ],
)
def test_filters_cut_tokens_but_not_the_logprobs(params, allowed):
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0])  # 0.644 0.087 0.237 0.032
    tokens, logprobs = draw(logits, torch.linspace(0, 0.9999999, 101), **params)
    assert set(tokens.tolist()) == allowed
    assert torch.allclose(logprobs, logits.log_softmax(-1)[tokens], atol=1e-6)


def test_a_filtered_row_leaves_the_others_alone():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    uniform = torch.tensor([0.9, 0.5, 0.99])
    plain = SamplingParams()
    free = sample(logits.clone(), RowParams.build([plain] * 3, CPU), uniform)[0]
    mixed = [plain, SamplingParams(top_p=0.3), SamplingParams(temperature=0.0)]
    tokens = sample(logits.clone(), RowParams.build(mixed, CPU), uniform)[0]
    assert tokens[0] == free[0]
    assert tokens[2] == logits[2].argmax()


def test_extreme_uniforms_draw_allowed_tokens():
    logits = torch.full((1, 6), float("-inf"))
    logits[0, 2] = logits[0, 4] = 0.0
    tokens, logprobs = draw(logits[0], [0.0, 1 - 2**-24])
    assert tokens.tolist() == [2, 4]
    assert torch.isfinite(logprobs).all()


def test_banned_tokens_are_not_drawn():
    logits = torch.tensor([[9.0, 0.0, 0.0]]).repeat(2, 1)
    params = RowParams.build([SamplingParams()] * 2, CPU)
    tokens, logprobs = sample(logits, params, torch.tensor([0.2, 0.2]), torch.tensor([[0, 0], [0, 1]]))
    assert tokens.tolist() == [2, 0]
    assert logprobs[0] < -8.9


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 1e-38}, "temperature=1e-38"),  # logits / temperature would be infinite
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"min_new_tokens": 200}, "min_new_tokens"),
        ({"n": 0}, "n=0"),
        ({"min_p": 1.1}, "min_p=1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"stop": ("ok", "")}, "stop"),
        ({"answer_prefix": -1}, "answer_prefix"),
    ],
)
def test_bad_sampling_parameters_are_named(params, name):
    problem = SamplingParams(**params).problem()
    assert problem is not None and name in problem
    assert SamplingParams().problem() is SamplingParams(temperature=0).problem() is None
