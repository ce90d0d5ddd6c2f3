"""Cost of joining the turns of a conversation: rendering the chat template and tokenising, per turn.

    python -m benchmarks.retokenise [--turns 128] [--tokens 32768] [--rate 1000]

An agent with tools talks for ``--turns`` turns until the conversation has ``--tokens`` tokens, half of them sampled.
No engine runs: the shares are those of a generation at ``--rate`` tokens/s. Times are CPU time of the one thread.

    first_us       plan, record and deliver of a first turn whose chat is kept from another episode of the group
    turn_us        the same for a later turn, mean over the conversation; last_us: mean over its last 8 turns
    whole_us       rendering and tokenising the whole conversation in the last turn: the cost of a turn without records
    rows_ms        building the row at the end
    share_percent  all turns and the row, as a share of the generation, mean of --repeats conversations
    share_first    the same of the first conversation with a template: windows are compared with whole conversations
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks._table import report
from realsys.data.tokenizer import TextTokenizer
from realsys.generation.completion import Completion
from realsys.rollout.conversation import Conversation
from tests.support.conversations.play import TOOLS
from tests.support.conversations.template_models import TEMPLATES, model_with, published_templates

PUBLISHED = ("qwen3", "qwen3_6", "llama3_2", "gptoss", "glm4moe", "deepseekv3", "nemotron_3_ultra", "gemma4_v5")
OWN = ("chatml", "strips_thinking", "merges_tools", "numbers_turns")
FIRST_TURNS = 200


def completion(tokenizer: TextTokenizer, text: str) -> Completion:
    tokens = np.array([*tokenizer.encode_text(text), tokenizer.eos_token_id], np.int32)
    return Completion(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop")


def words(tokenizer: TextTokenizer, tokens: int) -> str:
    """Return a text of about ``tokens`` tokens."""
    text = "the quick brown fox jumps over the lazy dog and counts from one to ten. "
    return text * max(1, round(tokens / len(tokenizer.encode_text(text))))


def first_turns(tokenizer: TextTokenizer) -> float:
    """Return the median seconds of a first turn in episodes of one group."""
    messages = [{"role": "user", "content": words(tokenizer, 100)}]
    sampled, times = completion(tokenizer, "one two"), []
    for _ in range(FIRST_TURNS):
        begin = time.thread_time()
        conversation = Conversation(tokenizer)
        plan = conversation.plan(messages, TOOLS)
        conversation.deliver(conversation.record(plan, sampled, {"role": "assistant", "content": "one two"}))
        times.append(time.thread_time() - begin)
    return statistics.median(times)


def talk(tokenizer: TextTokenizer, turns: int, tokens: int) -> dict[str, Any]:
    """Play one conversation and time every turn."""
    per_part = tokens // turns // 2
    sampled, result = completion(tokenizer, words(tokenizer, per_part)), words(tokenizer, per_part)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "count"}]
    conversation, times = Conversation(tokenizer), []
    for turn in range(turns):
        call = {"id": f"call_{turn}", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        reply = {"role": "assistant", "content": None, "tool_calls": [call]}
        begin = time.thread_time()
        plan = conversation.plan(messages, TOOLS)
        conversation.deliver(conversation.record(plan, sampled, reply))
        times.append(time.thread_time() - begin)
        messages += [reply, {"role": "tool", "tool_call_id": f"call_{turn}", "content": result}]
    begin = time.thread_time()
    (row,) = conversation.rows()
    rows_s = time.thread_time() - begin
    begin = time.thread_time()
    tokenizer.encode_chat(messages, TOOLS)
    whole_s = time.thread_time() - begin
    return {
        "tokens": len(row.tokens),
        "sampled": row.loss_tokens,
        "first_us": first_turns(tokenizer) * 1e6,
        "turn_us": statistics.mean(times[1:]) * 1e6,
        "last_us": statistics.mean(times[-8:]) * 1e6,
        "whole_us": whole_s * 1e6,
        "rows_ms": rows_s * 1e3,
        "total_s": sum(times) + rows_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rate", type=float, default=1000.0)
    arguments = parser.parse_args()
    sources = {name: TEMPLATES[name] for name in OWN}
    published = published_templates()
    sources |= {name: published[name] for name in PUBLISHED if name in published}
    rows = []
    with TemporaryDirectory() as folder:
        for name, source in sources.items():
            tokenizer = model_with(Path(folder) / name, source)
            played = [talk(tokenizer, arguments.turns, arguments.tokens) for _ in range(1 + arguments.repeats)]
            shares = [one["total_s"] / (one["sampled"] / arguments.rate) * 100 for one in played]
            figures = {key: statistics.mean(one[key] for one in played[1:]) for key in played[0] if key != "total_s"}
            share = {"share_percent": statistics.mean(shares[1:]), "share_first": shares[0]}
            rows.append({"template": name, **figures, **share})
    report("retokenise", rows, {"turns": arguments.turns, "tokens": arguments.tokens, "tokens_per_s": arguments.rate})


if __name__ == "__main__":
    main()
