"""Common parts of benchmarks of generation and training: random models, and the one core of the measurement."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from realsys.model_files.architecture import ModelSizes


def random_qwen2(
    sizes: ModelSizes,
    directory: Path,
    *,
    positions: int,
    end_of_text: int | None = None,
    dtype: str = "float32",
    tied: bool = False,
) -> Qwen2ForCausalLM:
    """Save a random model as an HF directory. Without ``end_of_text`` every completion has its full length."""
    torch.manual_seed(1)
    transformers_logging.disable_progress_bar()
    config = Qwen2Config(
        vocab_size=sizes.outputs,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=end_of_text,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).to(getattr(torch, dtype)).eval()
    model.save_pretrained(directory)
    return model


def on_one_core() -> None:
    """This process and its threads run on the last core it may use, torch in one thread."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
