"""Small random HF models with their directories, and engines over them, for the tests of generation."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from realsys.generation.completion import Completion
from realsys.generation.embedded.core import CoreSizes, EngineCore
from realsys.generation.embedded.decoder import ModelWeights, fuse, read_tensors
from realsys.generation.embedded.prefix_cache import KvPolicy
from realsys.generation.embedded.scheduler import Request
from realsys.generation.protocol import SamplingParams
from realsys.model_files.config_json import read_model

VOCAB = 97
CPU = torch.device("cpu")
PROMPTS = [[5], [1, 2, 3], list(range(40)), [9, 9, 8, 1, 30, 44, 61]]

transformers_logging.disable_progress_bar()  # its monitor thread would outlive the test


def make_model(
    kind: str, path: Path, *, tied: bool = False, seed: int = 0, eos: int | None = None, **others: int
) -> PreTrainedModel:
    """A two-layer float32 model with large random weights, norms and biases, saved to ``path``."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "eos_token_id": eos,
        "bos_token_id": None,
        "initializer_range": 0.2,
        **others,
    }
    torch.manual_seed(seed)
    model: PreTrainedModel
    if kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=16, **sizes))  # heads * head_dim is not the hidden size
    elif kind == "llama-linear":
        rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
        model = LlamaForCausalLM(LlamaConfig(rope_parameters=rope, **sizes))
    else:
        rope = {
            "rope_type": "llama3",
            "rope_theta": 50000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        model = LlamaForCausalLM(LlamaConfig(rope_parameters=rope, **sizes))
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            parameter.data += torch.randn_like(parameter) * 0.2
    model.eval().save_pretrained(path)
    return model


def old_and_new(root: Path) -> list[tuple[PreTrainedModel, Path]]:
    """The same architecture with two sets of weights, and their folders."""
    return [(make_model("qwen2", root / name, seed=seed), root / name) for seed, name in enumerate(("old", "new"))]


def read_weights(path: Path) -> ModelWeights:
    return fuse(read_model(path), read_tensors(path), dtype=torch.float32, device=CPU)


def make_core(
    path: Path,
    *,
    max_running: int = 8,
    max_queued: int = 64,
    context: int = 128,
    tokenizer: Tokenizer | None = None,
    kv: KvPolicy | None = None,
    **sizes: int,
) -> EngineCore:
    arch, weights = read_model(path), read_weights(path)
    return EngineCore(arch, weights, CoreSizes(max_running, max_queued, context, **sizes), tokenizer, kv)


def make_tokenizer(path: Path) -> None:
    """A tokenizer.json whose token i is the character "0" + i."""
    tokenizer = Tokenizer(models.BPE({chr(ord("0") + token): token for token in range(VOCAB)}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path / "tokenizer.json"))


def make_request(
    rid: str, prompt: list[int], *, seed: int = 0, stops: tuple[int, ...] = (), **params: object
) -> Request:
    done: Future[list[Completion]] = Future()
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return Request(rid, np.asarray(prompt, np.int32), sampling, seed, stops, done)


def run(core: EngineCore, *requests: Request) -> list[list[Completion]]:
    """Submit and step until nothing is left."""
    for request in requests:
        core.submit(request)
    finish(core)
    return [request.done.result(timeout=0) for request in requests]


def finish(core: EngineCore) -> None:
    for _ in range(10_000):
        if core.idle:
            return
        core.step()
    raise AssertionError("the engine did not come to rest within 10,000 steps")


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel, prompt: list[int], tokens: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of transformers for every token of the vocabulary at each completion position: [len(tokens), vocab]."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1)


def chosen(logprobs: torch.Tensor, tokens: list[int]) -> np.ndarray:
    return logprobs[torch.arange(len(tokens)), torch.tensor(tokens)].numpy()


def check_logprobs(
    model: PreTrainedModel, prompt: list[int], result: Completion, temperature: float = 1.0, tolerance: float = 1e-4
) -> None:
    """Those of a completion are those of transformers."""
    tokens = result.tokens.tolist()
    expected = chosen(reference_logprobs(model, prompt, tokens, temperature), tokens)
    assert np.abs(expected - result.logprobs).max() <= tolerance


@dataclass
class Weights:
    """Loaded weights, as a loader returns them."""

    tensors: dict[str, torch.Tensor]
    timings: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    unchanged: bool = False
    release: Callable[[], None] = lambda: None
