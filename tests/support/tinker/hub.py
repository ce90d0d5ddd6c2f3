"""A hub cache on the disk with all that the cookbook's loops load by name, and the model that the service has.

The tokenizer knows the words of the loops' prompts, so that these are short. The model has learned to answer with a
boxed digit, and not which one: some completions of a prompt are right, so there is something to learn.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import datasets
import torch
from datasets.arrow_writer import ArrowWriter
from tinker_cookbook.renderers import Message, get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

#: name by which the cookbook knows tokenizer and renderer
NAME = "Qwen/Qwen3-4B-Instruct-2507"
RENDERER = "qwen3_instruct"
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
_SHOWN = (
    "How many r's are in strawberry?Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b "
    "7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}"
)
_REVISION = "0" * 40


def write(home: Path, model: Path) -> None:
    """Write the cache under ``home``, which is HF_HOME, and the model."""
    write_hub(home)
    write_model(model)


def question(rng: random.Random) -> tuple[str, int]:
    """Return a sum with a result of one digit."""
    first = rng.randrange(5)
    second = rng.randrange(5)
    return f"{first}+{second}=", first + second


def write_hub(home: Path, sums: Sequence[tuple[str, int]] | None = None) -> None:
    """Write the tokenizer and the data sets under HF_HOME. ``sums``: questions with their values; None: digits."""
    repository = home / "hub" / f"models--{NAME.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(_REVISION)
    _write_tokenizer(repository / "snapshots" / _REVISION)
    if sums is None:
        rng = random.Random(1)
        sums = [question(rng) for _ in range(64)]
    rows = [{"question": text, "answer": f"{text}{value}\n#### {value}"} for text, value in sums]
    _write_data(home / "datasets", "openai___gsm8k", "main", {"train": rows, "test": rows[:8]})
    chats = [
        {"prompt": text, "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": str(value)}]}
        for text, value in sums
    ]
    _write_data(home / "datasets", "HuggingFaceH4___no_robots", "default", {"train": chats, "test": chats[:8]})


def _write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE that has the words of the prompts whole."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=_SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([_SHOWN, _SUFFIX, "user\nassistant\nsystem\n\n\nUser:"] * 100, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_SPECIAL[2], pad_token=_SPECIAL[0])
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))


def _write_data(cache: Path, name: str, config: str, splits: dict[str, list[dict[str, object]]]) -> None:
    """Write a data set as the package ``datasets`` keeps one that it has loaded before."""
    folder = cache / name / config / "0.0.0" / _REVISION
    folder.mkdir(parents=True)
    info = datasets.DatasetInfo(config_name=config, dataset_name=name.partition("___")[2], version="0.0.0", splits={})
    for split, rows in splits.items():
        info.features = datasets.Dataset.from_list(rows).features
        with ArrowWriter(features=info.features, path=str(folder / f"{info.dataset_name}-{split}.arrow")) as writer:
            for row in rows:
                writer.write(row)
            examples, size = writer.finalize()
        info.splits[split] = datasets.SplitInfo(split, size, examples, dataset_name=info.dataset_name)
    info.write_to_directory(str(folder))


@functools.cache
def rl_prompt(text: str) -> tuple[int, ...]:
    """Return the tokens of the prompt that rl_loop makes of a question. Needs ``write_hub``."""
    asked, shown = _SHOWN.split("?")
    turns = (("user", f"{asked}?{_SUFFIX}"), ("assistant", shown), ("user", f"{text}{_SUFFIX}"))
    chat = [Message(role=role, content=content) for role, content in turns]
    return tuple(get_renderer(RENDERER, get_tokenizer(NAME)).build_generation_prompt(chat).to_ints())


def write_model(folder: Path, steps: int = 120, hidden: int = 64) -> None:
    """Train a small model to answer with a boxed digit, and write it with its tokenizer. Needs ``write_hub``."""
    tokenizer = get_tokenizer(NAME)
    renderer = get_renderer(RENDERER, tokenizer)
    torch.manual_seed(1)
    rng = random.Random(2)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        rows = []
        for _ in range(8):
            answer = f"\\boxed{{{rng.randrange(10)}}}"
            chat = [Message(role="user", content=question(rng)[0]), Message(role="assistant", content=answer)]
            tokens, _ = renderer.build_supervised_example(chat)
            rows.append(torch.tensor(tokens.to_ints()))
        batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
        model(batch.clamp(min=0), labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
