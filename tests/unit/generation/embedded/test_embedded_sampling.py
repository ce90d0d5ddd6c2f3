"""What the embedded engine samples and where a completion ends: penalties, stop tokens, stop strings."""

import pytest
import torch

from realsys.generation.embedded.sampler import RowParams, top_logprobs
from realsys.generation.protocol import SamplingParams
from realsys.generation.sampling_rules import read_tokenizer
from tests.support.serving.generation_models import (
    PROMPTS,
    VOCAB,
    check_logprobs,
    make_core,
    make_request,
    make_tokenizer,
    old_and_new,
    reference_logprobs,
    run,
)


@pytest.fixture(scope="module")
def two_models(tmp_path_factory):
    return old_and_new(tmp_path_factory.mktemp("models"))


def test_greedy_continues_as_transformers(two_models):
    model, path = two_models[0]
    requests = [make_request(str(i), p, temperature=0.0, max_new_tokens=20) for i, p in enumerate(PROMPTS)]
    for prompt, [result] in zip(PROMPTS, run(make_core(path), *requests), strict=True):
        tokens = result.tokens.tolist()
        assert tokens == reference_logprobs(model, prompt, tokens).argmax(-1).tolist()


def test_sampling_does_not_depend_on_the_batch(two_models):
    _, path = two_models[0]

    def request():
        return make_request("x", PROMPTS[3], seed=7, n=3, max_new_tokens=30, temperature=0.8, top_p=0.9, top_k=20)

    [alone] = run(make_core(path, max_running=1), request())
    crowd = [make_request(str(i), p, seed=i, n=2, max_new_tokens=9 + 7 * i) for i, p in enumerate(PROMPTS)]
    *_, together = run(make_core(path, max_running=6), *crowd, request())
    assert [r.tokens.tolist() for r in alone] == [r.tokens.tolist() for r in together]
    [other_seed] = run(make_core(path), make_request("x", PROMPTS[3], seed=8, n=3, max_new_tokens=30))
    assert [r.tokens.tolist() for r in alone] != [r.tokens.tolist() for r in other_seed]


def test_stop_token_ends_and_belongs_to_completion(two_models):
    _, path = two_models[0]
    [[free]] = run(make_core(path), make_request("a", PROMPTS[1], max_new_tokens=30))
    stop = int(free.tokens[10])
    first = free.tokens.tolist().index(stop)
    absent = next(token for token in range(VOCAB) if token not in free.tokens)
    [[stopped]] = run(make_core(path), make_request("a", PROMPTS[1], max_new_tokens=30, stops=(absent, stop)))
    assert stopped.tokens.tolist() == free.tokens.tolist()[: first + 1]
    assert stopped.finish_reason == "stop"


def test_min_new_tokens_bans_stops_keeps_logprobs(two_models):
    model, path = two_models[0]
    stops = tuple(range(60))
    [[early]] = run(make_core(path), make_request("a", PROMPTS[1], max_new_tokens=20, stops=stops))
    [[late]] = run(make_core(path), make_request("a", PROMPTS[1], max_new_tokens=20, min_new_tokens=12, stops=stops))
    assert len(early.tokens) < 12 < len(late.tokens) + 1
    assert not set(late.tokens[:12].tolist()) & set(stops)
    check_logprobs(model, PROMPTS[1], late)


def test_top_logprobs_are_of_unchanged_distribution(two_models):
    """Bans, penalties and filters do not change them; of a completion that asks for none, nothing is kept."""
    model, path = two_models[0]
    changes = {"temperature": 0.8, "top_k": 2, "min_new_tokens": 9, "repetition_penalty": 1.7}
    asking = make_request("a", PROMPTS[3], max_new_tokens=9, stops=tuple(range(60)), top_logprobs_num=4, **changes)
    plain = make_request("b", PROMPTS[1], max_new_tokens=9)
    [[result], [other]] = run(make_core(path), asking, plain)
    expected = reference_logprobs(model, PROMPTS[3], result.tokens.tolist(), temperature=0.8).topk(4)
    assert [[token for token, _ in best] for best in result.top] == expected.indices.tolist()
    assert torch.tensor([[value for _, value in best] for best in result.top]).allclose(expected.values, atol=1e-4)
    assert other.top is None


def test_more_top_logprobs_than_tokens_give_all():
    top = top_logprobs(torch.zeros(1, 3), RowParams.build([SamplingParams(top_logprobs_num=5)], torch.device("cpu")))
    assert sorted(token for token, _ in top[0]) == [0, 1, 2]


# ---- penalties and stop strings


def penalised_greedy(model, prompt, count, prefix=0, **penalties):
    """The definition, token by token: what the completion holds changes the logits of the next token."""
    completion = prompt[len(prompt) - prefix :]
    tokens: list[int] = []
    for _ in range(count):
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].detach().numpy().copy()
        for token in {*completion, *tokens}:
            times = [*completion, *tokens].count(token)
            rate = penalties.get("repetition_penalty", 1.0)
            logits[token] = logits[token] / rate if logits[token] > 0 else logits[token] * rate
            logits[token] -= penalties.get("presence_penalty", 0.0) + times * penalties.get("frequency_penalty", 0.0)
        tokens.append(int(logits.argmax()))
    return tokens


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.8},
        {"repetition_penalty": 0.6, "presence_penalty": -0.5, "frequency_penalty": 0.4},
    ],
)
def test_penalties_read_completion_and_keep_logprobs(two_models, penalties):
    model, path = two_models[0]
    greedy = {"temperature": 0.0, "max_new_tokens": 30}
    plain = make_request("plain", PROMPTS[1], **greedy)
    request = make_request("a", PROMPTS[3], **greedy, **penalties)
    [free], [result] = run(make_core(path), plain, request)
    assert result.tokens.tolist() == penalised_greedy(model, PROMPTS[3], 30, **penalties)
    check_logprobs(model, PROMPTS[3], result)
    assert free.tokens.tolist() == penalised_greedy(model, PROMPTS[1], 30)  # the neighbour in the batch


def test_continued_completion_is_penalised_for_earlier_tokens(two_models):
    model, path = two_models[0]
    params = {"temperature": 0.0, "frequency_penalty": 0.8}
    [[whole]] = run(make_core(path), make_request("a", PROMPTS[3], max_new_tokens=24, **params))
    begun = PROMPTS[3] + whole.tokens[:11].tolist()
    rest = make_request("b", begun, max_new_tokens=13, answer_prefix=11, **params)
    [[continued]] = run(make_core(path), rest)
    assert continued.tokens.tolist() == whole.tokens[11:].tolist()
    assert continued.tokens.tolist() == penalised_greedy(model, begun, 13, prefix=11, frequency_penalty=0.8)


def letters(ids):
    """The text of tokens under the tokenizer of ``make_tokenizer``: one letter each."""
    return "".join(chr(ord("0") + token) for token in ids)


@pytest.fixture
def tokenizer(tmp_path):
    make_tokenizer(tmp_path)
    return read_tokenizer(tmp_path)


def test_stop_string_ends_completion_with_its_last_token(two_models, tokenizer):
    model, path = two_models[0]
    [[free]] = run(make_core(path), make_request("a", PROMPTS[1], max_new_tokens=40))
    text = letters(free.tokens)
    stop = text[12:15]
    end = text.index(stop) + 3
    core = make_core(path, tokenizer=tokenizer)
    other = make_request("b", PROMPTS[3], max_new_tokens=40)
    [result], [neighbour] = run(core, make_request("a", PROMPTS[1], max_new_tokens=40, stop=("never!", stop)), other)
    assert result.tokens.tolist() == free.tokens[:end].tolist()
    assert (result.finish_reason, result.matched) == ("stop", stop)
    assert (neighbour.finish_reason, neighbour.matched, len(neighbour.tokens)) == ("length", None, 40)
    check_logprobs(model, PROMPTS[1], result)


def test_stop_string_counts_only_inside_the_completion(two_models, tokenizer):
    """A match before `min_new_tokens` tokens does not count."""
    _, path = two_models[0]
    params = {"max_new_tokens": 20, "temperature": 0.0}
    [[free]] = run(make_core(path), make_request("a", PROMPTS[1], **params))
    across = letters([PROMPTS[1][-1], free.tokens[0]])  # the end of the prompt and the first token
    early = letters(free.tokens[:2])
    core = make_core(path, tokenizer=tokenizer)
    [whole], [late], [continued] = run(
        core,
        make_request("a", PROMPTS[1], stop=(across,), **params),
        make_request("b", PROMPTS[1], stop=(early,), min_new_tokens=3, **params),
        make_request("c", [*PROMPTS[1], int(free.tokens[0])], stop=(early,), answer_prefix=1, **params),
    )
    assert across not in letters(free.tokens) and len(whole.tokens) == 20
    assert len(late.tokens) > 2  # two tokens completed the string, but three were asked for
    # A string may begin in the part of the completion that an earlier request brought.
    assert (len(continued.tokens), continued.matched) == (1, early)
