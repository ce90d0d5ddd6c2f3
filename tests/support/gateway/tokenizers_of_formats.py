"""Tokenizers for the formats of tool calls: every byte is a token, and some markers are, if wanted."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from realsys.data.tokenizer import TextTokenizer

EOS = "<|im_end|>"
#: a completion with reasoning (if the format has any), text, and a call of add(a=1), by format
COMPLETIONS = {
    "qwen3": '<think>\nhm\n</think>\n\nhello <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "qwen3.5": "<think>\nhm\n</think>\n\nhello <tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm-4.5": "<think>hm</think>\nhello <tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "deepseek-r1": "<think>hm</think>hello<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
    '```json\n{"a":1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi-k2.5": "<think>hm</think>hello<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    '<|tool_call_argument_begin|>{"a":1}<|tool_call_end|><|tool_calls_section_end|>',
    "minimax-m2": '<think>hm</think>hello <minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
}
_NO_MARKERS = ("<parameter", "</parameter", "<function", "</function", "<invoke", "</invoke")


def markers_of(completion: str) -> list[str]:
    """Return the markers that are single tokens in models of this format."""
    texts = dict.fromkeys(re.findall(r"<[^<>\s]*>", completion))
    return [text for text in texts if not text.startswith(_NO_MARKERS)]


def byte_tokenizer(folder: Path, markers: list[str], template: str = "") -> TextTokenizer:
    """Write a tokenizer whose only tokens of more than one byte are the end of text and ``markers``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (EOS, *markers)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "chat_template": template}))
    return TextTokenizer(folder)
