"""The arith task and the tiny model that learns it.

The task is running sums of labelled digits, written out step by step:

    prompt  a3b5c7=          answer 15          demonstration  a0+3=3;b3+5=8;c8+7=15;#15

Each step names its operand and adds it to the sum so far; the verifier compares the value after ``#``. The number of
operands has a heavy tail (P(n) ~ n^-alpha), so completions differ in length by an order of magnitude. A demonstrated
sum is wrong with probability ``demo_noise``, and the next steps continue from it: a model warmed up on these
demonstrations has the skill and makes mistakes at a known rate, which reinforcement learning can remove.

A preference has the right steps, and steps with one error from which the next ones continue:

    chosen  a0+3=3;b3+5=8;c8+7=15;#15        rejected       a0+3=3;b3+5=9;c9+7=16;#16

For agents of OpenAI endpoints, demonstrations are chats in the forms of ``data.arith.forms``. A form has places
for the values of a problem:

    {prompt}      a3b5c7=
    {steps}       a0+3=3;b3+5=8;c8+7=15;     with noise, as above
    {sum}         15                         the sum at the end of these steps
    {expression}  3+5+7                      one operand is wrong with probability demo_noise
    {value}       15                         the value of this expression
    {wrong}       a0+3=3;b3+5=9;c9+7=16;#16  a wrong first try

Problems are held out by a hash of the prompt alone: no prompt of eval.jsonl is in train.jsonl or demos.jsonl.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from realsys.config.schema import TinyModelConfig
from realsys.config.schema_data import ArithConfig, ArithForm
from realsys.data.lines import Demonstration, Preference, Problem
from realsys.data.prompts import write_atomically
from realsys.errors import MALFORMED, ConfigError, ModelError
from realsys.model_files.architecture import (
    ALPHABET,
    BOS,
    BOS_ID,
    CHAT_MARKS,
    CHAT_SPECIAL,
    END_OF_TURN,
    END_OF_TURN_ID,
    EOS,
    EOS_ID,
    PAD,
    PAD_ID,
    SPECIAL,
    vocabulary_size,
)
from realsys.types import F32

LABELS = "abcdefghijklmnopqrstuvwxyz"
HELD_OUT_OF = 8  # one prompt in eight is held out
ERRORS = (-10, -2, -1, 1, 2, 10)
MAX_DRAWS = 100_000  # a draw lands in a split with probability >= 1/8, unless the task has hardly any prompts


def is_held_out(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % HELD_OUT_OF == 0


def prompt_text(operands: list[int]) -> str:
    return "".join(f"{label}{operand}" for label, operand in zip(LABELS, operands, strict=False)) + "="


def problem(operands: list[int]) -> Problem:
    return Problem(prompt_text(operands), str(sum(operands)))


def demonstration(operands: list[int], noise: float, rng: random.Random) -> Demonstration:
    """Build a demonstration. Each step's sum is wrong with probability ``noise``; the next steps continue from it."""
    total, sums = 0, []
    for operand in operands:
        total += operand
        if noise and rng.random() < noise:
            total = max(0, total + rng.choice(ERRORS))
        sums.append(total)
    return _worked_out(operands, sums)


def _worked_out(operands: list[int], sums: list[int]) -> Demonstration:
    rows = zip(LABELS, operands, [0, *sums], sums, strict=False)
    steps = "".join(f"{label}{total}+{operand}={after};" for label, operand, total, after in rows)
    return Demonstration(prompt_text(operands), f"{steps}#{sums[-1]}")


def wrong_try(operands: list[int], rng: random.Random) -> Demonstration:
    """Build a demonstration with a wrong result."""
    wrong = demonstration(operands, 1.0, rng)
    while wrong.response.partition("#")[2] == str(sum(operands)):  # two errors may cancel each other
        wrong = demonstration(operands, 1.0, rng)
    return wrong


def wrong_step(operands: list[int], rng: random.Random) -> Demonstration:
    """Build a demonstration whose first error is in a random step; the next steps continue from it without another."""
    sums, step = list(accumulate(operands)), rng.randrange(len(operands))
    errors = [error for error in ERRORS if sums[step] + error >= 0]
    error = rng.choice(errors)
    return _worked_out(operands, [total + error * (i >= step) for i, total in enumerate(sums)])


def chat_demonstration(operands: list[int], config: ArithConfig, rng: random.Random) -> Demonstration:
    """Build a demonstration in one of the forms, chosen by their weights. Raises ConfigError for a malformed form."""
    form = _chosen_form(config, rng)
    shown = demonstration(operands, config.demo_noise, rng)
    called = list(operands)
    if rng.random() < config.demo_noise:
        called[rng.randrange(len(called))] = rng.randint(0, config.max_operand)
    return _filled(form, shown, called, wrong_try(operands, rng))


def preference(operands: list[int], config: ArithConfig, rng: random.Random) -> Preference:
    """Build a pair: the right steps, and steps of which one is wrong. Raises ConfigError for a form without either."""
    right, wrong = demonstration(operands, 0.0, rng), wrong_step(operands, rng)
    if not config.forms:
        return Preference(right.response, wrong.response, right.prompt)
    form, first, called = _chosen_form(config, rng), wrong_try(operands, rng), list(operands)
    called[rng.randrange(len(called))] += 1
    chosen, rejected = _filled(form, right, operands, first), _filled(form, wrong, called, first)
    if chosen.response == rejected.response:
        problem = "is the same for right and wrong steps: use {steps}, {sum}, {expression} or {value}"
        raise ConfigError("data.arith.forms", form.response, problem)
    return Preference(chosen.response, rejected.response, chosen.prompt, chosen.tools)


def _chosen_form(config: ArithConfig, rng: random.Random) -> ArithForm:
    return rng.choices(config.forms, [form.weight for form in config.forms])[0]


def _filled(form: ArithForm, shown: Demonstration, called: list[int], wrong: Demonstration) -> Demonstration:
    """Fill a form with the steps of ``shown``, the operands ``called`` and the first try ``wrong``."""
    tools = [{"type": "function", "function": {"name": name}} for name in form.tools]
    text = msgspec.json.encode({"prompt": form.prompt, "response": form.response, "tools": tools}).decode()
    steps, _, total = shown.response.partition("#")
    for name, value in {
        "prompt": str(shown.prompt),
        "steps": steps,
        "sum": total,
        "expression": "+".join(map(str, called)),
        "value": str(sum(called)),
        "wrong": wrong.response,
    }.items():
        text = text.replace(f"{{{name}}}", value)  # values have no character that JSON escapes
    try:
        return msgspec.json.decode(text, type=Demonstration)
    except MALFORMED as error:
        raise ConfigError("data.arith.forms", form.response, f"has a malformed message: {error}") from None


class Generator:
    """Random source of operands; ``stream`` separates the files of one seed."""

    def __init__(self, config: ArithConfig, seed: int, stream: str) -> None:
        self._config = config
        self.rng = random.Random(f"realsys/arith/{seed}/{stream}")
        self._counts = range(config.min_operands, config.max_operands + 1)
        self._weights = list(accumulate(n**-config.alpha for n in self._counts))

    def operands(self, held_out: bool) -> list[int]:
        """Draw the operands of a prompt, held out or not. Raises ConfigError if no draw gives one."""
        for _ in range(MAX_DRAWS):
            count = self.rng.choices(self._counts, cum_weights=self._weights)[0]
            operands = [self.rng.randint(0, self._config.max_operand) for _ in range(count)]
            if is_held_out(prompt_text(operands)) == held_out:
                return operands
        which = "to hold out" if held_out else "to train on"
        reason = f"the task has too few prompts: none {which} in {MAX_DRAWS} draws; increase it, or max_operand"
        raise ConfigError("data.arith.max_operands", self._config.max_operands, reason)


def write_dataset(config: ArithConfig, directory: Path, *, seed: int, preferences: bool = False) -> None:
    """Write train.jsonl, eval.jsonl and demos.jsonl; each appears complete. The same seed gives the same files.

    With ``preferences`` the lines of demos.jsonl are pairs of a right and a wrong response. Short prompts repeat,
    because there are few of them and the distribution of lengths must not change.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / "train.jsonl", _problems(config, seed, "train", config.train_size, held_out=False))
    write_atomically(directory / "eval.jsonl", _problems(config, seed, "eval", config.eval_size, held_out=True))
    write_atomically(directory / "demos.jsonl", _demonstrations(config, seed, preferences))


def _problems(config: ArithConfig, seed: int, stream: str, size: int, *, held_out: bool) -> Iterator[bytes]:
    generator = Generator(config, seed, stream)
    for _ in range(size):
        yield msgspec.json.encode(problem(generator.operands(held_out))) + b"\n"


def _demonstrations(config: ArithConfig, seed: int, preferences: bool) -> Iterator[bytes]:
    generator = Generator(config, seed, "demos")
    shown: Callable[[list[int], ArithConfig, random.Random], Demonstration | Preference]
    shown = preference if preferences else chat_demonstration if config.forms else _plain_demonstration
    for _ in range(config.demo_size):
        operands = generator.operands(held_out=False)
        yield msgspec.json.encode(shown(operands, config, generator.rng)) + b"\n"


def _plain_demonstration(operands: list[int], config: ArithConfig, rng: random.Random) -> Demonstration:
    shown = demonstration(operands, config.demo_noise, rng)
    if config.second_tries and rng.random() < config.second_tries:
        # only the second try is imitated
        wrong = wrong_try(operands, rng)
        feedback = config.feedback.replace("{prompt}", prompt_text(operands))
        return Demonstration(f"{prompt_text(operands)}{wrong.response}{EOS}{feedback}", shown.response)
    return shown


# ---- tiny model: a random Qwen2 with a character tokenizer, as an HF directory, for runs without a downloaded model
#
# It needs numpy only. Every program that reads HF directories can read it, for example transformers and SGLang.
# Its tokens are those of ``realsys.model_files.architecture``. The chat form has a chat template.

# The layout of Qwen's templates. Of a tool it shows the name only: each character is a token.
CHAT_TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == "system" %}{{ messages[0].content }}
{% endif %}tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == "tool" -%}
<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% elif not (tools and loop.first and message.role == "system") -%}
<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] -%}
{%- set arguments = call.function.arguments -%}
<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ "" -}}
{{ arguments if arguments is string else arguments | tojson }}}</tool_call>
{%- endfor -%}
<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
EMBEDDING_STD = 0.02
RESIDUAL_SCALE = 0.5  # layers start with a smaller contribution to the residual stream


def _characters(chat: bool) -> list[str]:
    """Return the characters with a token, as byte-level tokenizers write them."""
    return sorted(pre_tokenizers.ByteLevel.alphabet()) if chat else list(ALPHABET.replace(" ", "Ġ"))


def write_char_tokenizer(directory: Path, *, chat: bool = False) -> None:
    """Write a tokenizer with one token per character (``chat``: per byte), and BOS before a prompt that is no chat.

    Creates the directory if it does not exist.
    """
    directory.mkdir(parents=True, exist_ok=True)
    special, marks = (CHAT_SPECIAL, CHAT_MARKS) if chat else (SPECIAL, ())
    # BPE without merges over byte-level characters, like Qwen2's tokenizer. For a model of type qwen2,
    # transformers builds that class for any tokenizer.json, and drops the blanks of other character models.
    names = [*special, *marks, *_characters(chat)]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in marks])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END_OF_TURN if chat else EOS,
        "pad_token": PAD,
        "unk_token": None,  # otherwise transformers adds one, whose id is outside the embedding
        "clean_up_tokenization_spaces": False,
    }
    write_atomically(directory / "tokenizer.json", [tokenizer.to_str(pretty=True).encode()])
    if chat:
        settings["chat_template"] = CHAT_TEMPLATE
    _write_json(directory / "tokenizer_config.json", settings)


def make_tiny_model(tiny: TinyModelConfig, directory: Path, *, seed: int) -> None:
    """Write config.json, generation_config.json and model.safetensors of a random model. Raises ModelError.

    The same seed gives the same weights. Matrices have standard deviation fan_in^-0.5, or half of it if they write
    into the residual stream; embeddings and head have 0.02.
    """
    if tiny.num_attention_heads % tiny.num_key_value_heads or tiny.head_dim % 2:
        problem = "num_attention_heads must be a multiple of num_key_value_heads, and head_dim even"
        raise ModelError(f"model.tiny: {problem}: {tiny.model_dump()}")
    directory.mkdir(parents=True, exist_ok=True)
    tensors = dict(_tensors(tiny, np.random.default_rng(seed)))
    write_atomically(directory / "model.safetensors", [save(tensors, metadata={"format": "pt"})])
    _write_json(directory / "generation_config.json", _token_ids(tiny.chat))
    _write_json(directory / "config.json", _model_config(tiny))


def _model_config(tiny: TinyModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocabulary_size(chat=tiny.chat),
        **tiny.model_dump(exclude={"chat"}),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "initializer_range": EMBEDDING_STD,
        "use_sliding_window": False,
        "use_cache": True,
        "torch_dtype": "float32",
        **_token_ids(tiny.chat),
    }


def _token_ids(chat: bool) -> dict[str, int]:
    return {"bos_token_id": BOS_ID, "eos_token_id": END_OF_TURN_ID if chat else EOS_ID, "pad_token_id": PAD_ID}


def _tensors(tiny: TinyModelConfig, rng: np.random.Generator) -> Iterator[tuple[str, F32]]:
    """Yield HF names and values, in a fixed order: the random values depend on it."""
    hidden, inner, vocabulary = tiny.hidden_size, tiny.intermediate_size, vocabulary_size(chat=tiny.chat)
    query, key_value = tiny.num_attention_heads * tiny.head_dim, tiny.num_key_value_heads * tiny.head_dim

    def normal(rows: int, columns: int, std: float) -> F32:
        return (rng.standard_normal((rows, columns)) * std).astype(np.float32)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> F32:
        return normal(rows, columns, scale * columns**-0.5)

    def bias(size: int) -> F32:
        return rng.uniform(-(hidden**-0.5), hidden**-0.5, size).astype(np.float32)

    yield "model.embed_tokens.weight", normal(vocabulary, hidden, EMBEDDING_STD)
    for layer in range(tiny.num_hidden_layers):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", np.ones(hidden, np.float32)
        for part, rows in (("q", query), ("k", key_value), ("v", key_value)):
            yield f"{name}.self_attn.{part}_proj.weight", matrix(rows, hidden)
            yield f"{name}.self_attn.{part}_proj.bias", bias(rows)
        yield f"{name}.self_attn.o_proj.weight", matrix(hidden, query, RESIDUAL_SCALE)
        yield f"{name}.post_attention_layernorm.weight", np.ones(hidden, np.float32)
        yield f"{name}.mlp.gate_proj.weight", matrix(inner, hidden)
        yield f"{name}.mlp.up_proj.weight", matrix(inner, hidden)
        yield f"{name}.mlp.down_proj.weight", matrix(hidden, inner, RESIDUAL_SCALE)
    yield "model.norm.weight", np.ones(hidden, np.float32)
    if not tiny.tie_word_embeddings:
        yield "lm_head.weight", normal(vocabulary, hidden, EMBEDDING_STD)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomically(path, [json.dumps(value, indent=2).encode() + b"\n"])
