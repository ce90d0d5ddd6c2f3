"""The arith task: running sums of labelled digits, written out step by step.

    prompt  a3b5c7=          answer 15          demonstration  a0+3=3;b3+5=8;c8+7=15;#15

Each step names its operand and adds it to the sum so far; the verifier compares the value after ``#``. The number of
operands has a heavy tail (P(n) ~ n^-alpha), so completions differ in length by an order of magnitude. A demonstrated
sum is wrong with probability ``demo_noise``, and the next steps continue from it: a model warmed up on these
demonstrations has the skill and makes mistakes at a known rate, which reinforcement learning can remove.

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

import random
import zlib
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import msgspec

from realsys.config.schema_data import ArithConfig
from realsys.data.dataset_files import write_atomically
from realsys.data.lines import Demonstration, Problem
from realsys.errors import MALFORMED, ConfigError

LABELS = "abcdefghijklmnopqrstuvwxyz"
END_OF_TEXT = "<eos>"  # end-of-text token of the tiny model's tokenizer
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
    total, steps = 0, []
    for label, operand in zip(LABELS, operands, strict=False):
        after = total + operand
        if noise and rng.random() < noise:
            after = max(0, after + rng.choice(ERRORS))
        steps.append(f"{label}{total}+{operand}={after};")
        total = after
    return Demonstration(prompt_text(operands), f"{''.join(steps)}#{total}")


def second_try(operands: list[int], solved: Demonstration, config: ArithConfig, rng: random.Random) -> Demonstration:
    """Put a wrong first try and the feedback before a demonstration; only the second try is imitated."""
    wrong = wrong_try(operands, rng)
    feedback = config.feedback.replace("{prompt}", prompt_text(operands))
    return Demonstration(f"{prompt_text(operands)}{wrong.response}{END_OF_TEXT}{feedback}", solved.response)


def wrong_try(operands: list[int], rng: random.Random) -> Demonstration:
    """Build a demonstration with a wrong result."""
    wrong = demonstration(operands, 1.0, rng)
    while wrong.response.partition("#")[2] == str(sum(operands)):  # two errors may cancel each other
        wrong = demonstration(operands, 1.0, rng)
    return wrong


def chat_demonstration(operands: list[int], config: ArithConfig, rng: random.Random) -> Demonstration:
    """Build a demonstration in one of the forms, chosen by their weights. Raises ConfigError for a malformed form."""
    form = rng.choices(config.forms, [form.weight for form in config.forms])[0]
    tools = [{"type": "function", "function": {"name": name}} for name in form.tools]
    text = msgspec.json.encode({"prompt": form.prompt, "response": form.response, "tools": tools}).decode()
    for name, value in _values(operands, config, rng).items():
        text = text.replace(f"{{{name}}}", value)  # values have no character that JSON escapes
    try:
        return msgspec.json.decode(text, type=Demonstration)
    except MALFORMED as error:
        raise ConfigError("data.arith.forms", form.response, f"has a malformed message: {error}") from None


def _values(operands: list[int], config: ArithConfig, rng: random.Random) -> dict[str, str]:
    steps, _, total = demonstration(operands, config.demo_noise, rng).response.partition("#")
    called = list(operands)
    if rng.random() < config.demo_noise:
        called[rng.randrange(len(called))] = rng.randint(0, config.max_operand)
    return {
        "prompt": prompt_text(operands),
        "steps": steps,
        "sum": total,
        "expression": "+".join(map(str, called)),
        "value": str(sum(called)),
        "wrong": wrong_try(operands, rng).response,
    }


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


def write_dataset(config: ArithConfig, directory: Path, *, seed: int) -> None:
    """Write train.jsonl, eval.jsonl and demos.jsonl; each appears complete. The same seed gives the same files.

    Short prompts repeat, because there are few of them and the distribution of lengths must not change.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / "train.jsonl", _problems(config, seed, "train", config.train_size, held_out=False))
    write_atomically(directory / "eval.jsonl", _problems(config, seed, "eval", config.eval_size, held_out=True))
    write_atomically(directory / "demos.jsonl", _demonstrations(config, seed))


def _problems(config: ArithConfig, seed: int, stream: str, size: int, *, held_out: bool) -> Iterator[bytes]:
    generator = Generator(config, seed, stream)
    for _ in range(size):
        yield msgspec.json.encode(problem(generator.operands(held_out))) + b"\n"


def _demonstrations(config: ArithConfig, seed: int) -> Iterator[bytes]:
    generator = Generator(config, seed, "demos")
    show = chat_demonstration if config.forms else _plain_demonstration
    for _ in range(config.demo_size):
        operands = generator.operands(held_out=False)
        yield msgspec.json.encode(show(operands, config, generator.rng)) + b"\n"


def _plain_demonstration(operands: list[int], config: ArithConfig, rng: random.Random) -> Demonstration:
    shown = demonstration(operands, config.demo_noise, rng)
    if config.second_tries and rng.random() < config.second_tries:
        return second_try(operands, shown, config, rng)
    return shown
