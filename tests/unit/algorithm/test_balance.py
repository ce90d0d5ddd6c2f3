"""What a sequence costs: sizes of a model, the formula by hand and as torch counts it, and plans that use it."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from realsys.algorithm.balance import cost_function, model_flops, training_flops
from realsys.algorithm.minibatches import plan_minibatches
from realsys.config.schema import Config
from realsys.model_files.architecture import ModelSizes
from realsys.types import SequenceRef
from tests.support.training.sample_records import make_ref

SIZES = ModelSizes(hidden=8, layers=2, heads=4, kv_heads=2, head_dim=2, ffn=12, outputs=20)
HF = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "vocab_size": 20,
}
BY_TOKENS, BY_FLOPS = (Config.model_validate({"train": {"balance": kind}}) for kind in ("tokens", "flops"))


def make_refs(lengths: list[int]) -> list[SequenceRef]:
    return [make_ref(f"{i:04d}/0", length, 1, 1.0, False, i) for i, length in enumerate(lengths)]


def lengths_of(plan: list[list[list[SequenceRef]]]) -> list[list[list[int]]]:
    return [[sorted(ref.length for ref in part) for part in minibatch] for minibatch in plan]


def test_flops_of_a_small_model_by_hand() -> None:
    # A layer: q and o 8x8, k and v 8x4, three of 8x12: 64 + 64 + 32 + 32 + 288 = 480 weights. Head: 8x20 = 160.
    # Two layers and the head: 1120 weights, 2 FLOPs each forwards and 4 backwards.
    # A pair of tokens: (2 * 2 + 2 * 2) FLOPs in each of 4 heads of 2 layers = 64; times 3; half the pairs are met.
    assert training_flops(SIZES) == (6720.0, 96.0)


def test_model_flops_have_the_head_for_scored_tokens_only() -> None:
    # The head takes 6 * 160 = 960 FLOPs per token; 13 - 4 tokens skip it.
    assert model_flops(SIZES, [10, 3], scored=4) == 6720 * 13 + 96 * (100 + 9) - 960 * 9


def test_recomputed_layers_add_a_forward_pass() -> None:
    """Without the head, whose 4 tokens take 960 FLOPs each."""
    layers = model_flops(SIZES, [10, 3], scored=4) - 960 * 4
    assert model_flops(SIZES, [10, 3], scored=4, recomputed=0.5) == layers * (1 + 0.5 / 3) + 960 * 4


def test_flops_are_those_that_torch_counts() -> None:
    model = Qwen2ForCausalLM(
        Qwen2Config(**HF, attn_implementation="eager", tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)
    )
    linear, quadratic = training_flops(SIZES)
    for tokens in (7, 32):
        with FlopCounterMode(display=False) as counter:
            model(torch.ones(1, tokens, dtype=torch.int64)).logits.sum().backward()
        angles = 2 * tokens  # positions x frequencies as a product of matrices, head_dim / 2 wide, forwards only
        # Eager attention computes all pairs, not only the causal half.
        assert counter.get_total_flops() - angles == linear * tokens + 2 * quadratic * tokens**2


def test_a_value_head_has_one_output() -> None:
    # As above, with a head of 8x1 weights: 960 + 8 = 968.
    value = ModelSizes(hidden=8, layers=2, heads=4, kv_heads=2, head_dim=2, ffn=12, outputs=1)
    assert training_flops(value) == (5808.0, 96.0)


def test_cost_is_what_the_configuration_balances() -> None:
    refs = [10, 100]
    assert cost_function(BY_TOKENS, SIZES)(refs) == [10.0, 100.0]
    assert cost_function(BY_FLOPS, SIZES)(refs) == [67_200.0 + 9_600.0, 672_000.0 + 960_000.0]
    assert cost_function(BY_FLOPS, SIZES)([]) == []


def test_long_sequence_costs_more_than_its_tokens() -> None:
    """One long sequence is as much work as many short ones with more tokens together."""
    # One of 100 tokens: 1,632,000 FLOPs. One of 20: 134,400 + 38,400 = 172,800, so ten of them: 1,728,000.
    refs = make_refs([20] * 10 + [100])
    by_flops = plan_minibatches(refs, 1, 2, cost_function(BY_FLOPS, SIZES))
    assert sorted(lengths_of(by_flops)[0]) == [[20] * 10, [100]]
    by_tokens = plan_minibatches(refs, 1, 2, cost_function(BY_TOKENS, SIZES))
    assert sorted(sum(part) for part in lengths_of(by_tokens)[0]) == [140, 160]
    # The split into minibatches balances the same.
    assert sorted(part for [part] in lengths_of(plan_minibatches(refs, 2, 1, cost_function(BY_FLOPS, SIZES)))) == [
        [20] * 10,
        [100],
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 2000), min_size=1, max_size=40), st.integers(1, 5))
def test_composition_balanced_by_flops_ignores_layout(lengths: list[int], n: int) -> None:
    refs, cost = make_refs(lengths), cost_function(BY_FLOPS, SIZES)
    composed = {
        dp: [sorted(r.sample_id for rank in ranks for r in rank) for ranks in plan_minibatches(refs, n, dp, cost)]
        for dp in (1, 2, 3, 8)
    }
    assert composed[1] == composed[2] == composed[3] == composed[8]
    assert sorted(name for minibatch in composed[1] for name in minibatch) == [ref.sample_id for ref in refs]
