"""TRL's GRPO on rows of ours, for benchmarks/peer_trl.py. Runs in an environment apart: it imports nothing of realsys.

It prints a line ``{"seconds": ..., "tokens": ...}`` after each batch of completions that was trained: the wall time
since the last one, and its completion tokens.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

TOKENS: list[int] = []  # of each completion, in the order of arrival


def exact(completions: list[Any], answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """1 for a completion that ends with the reference."""
    TOKENS.extend(map(len, completion_ids))
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [float(text.strip().endswith(right)) for text, right in zip(texts, answer, strict=True)]


class Clock(TrainerCallback):
    """A line for each batch of completions."""

    def __init__(self, updates: int) -> None:
        self._updates = updates
        self._last = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._updates:
            return
        now = time.perf_counter()
        print(json.dumps({"seconds": now - self._last, "tokens": sum(TOKENS)}), flush=True)
        self._last = now
        TOKENS.clear()


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    rows = [json.loads(line) for line in Path(settings["data"]).read_text("utf-8").splitlines()]
    completions, updates = settings["completions"], settings["minibatches"]
    config = GRPOConfig(
        output_dir=settings["out"],
        per_device_train_batch_size=min(settings["microbatch"], completions // updates),
        gradient_accumulation_steps=max(1, completions // updates // settings["microbatch"]),
        generation_batch_size=completions,
        num_generations=settings["group_size"],
        max_completion_length=settings["max_new_tokens"],
        max_steps=settings["steps"] * updates,
        learning_rate=settings["lr"],
        temperature=1.0,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": settings["dtype"]},
    )
    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=exact,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock(updates)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
