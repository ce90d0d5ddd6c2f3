"""Tokenizers in model directories, one per chat template: byte-level BPE with the template's special tokens."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from realsys.data.tokenizer import TextTokenizer

BOS, EOS = "<s>", "</s>"
#: texts of a template that are single tokens in the vocabulary of its model
_SPECIAL = re.compile(
    r"<\|\"\|>|<\|[A-Za-z_]+\|?>|<[A-Za-z_]+\|>|<｜[^>｜]+｜>|</?(?:s|think|tool_call|tool_response|image|arg_key|arg_value)>"
    r"|<(?:start_of_turn|end_of_turn|end_of_utterance|start_of_image|sop)>|\[gMASK\]|\[/?INST\]"
)
#: tokens that end a completion, in models whose templates print them
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|return|>", "<|call|>", "<|eot|>"),
    *("<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<|tool_response>"),
)
_ROLES_AS_ENDS = ("<|user|>", "<|observation|>")  # where the next role is what ends a turn
_CORPUS = (
    "the quick brown fox jumps over the lazy dog and counts from one to ten before the sun goes down",
    '{"name": "add", "arguments": {"a": 1, "b": 2}}',
    "user\nassistant\nsystem\ntool\n\nYou are a helpful assistant. Think step by step and answer with a number.",
)

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>\\n' + c.function|tojson + '\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
#: templates for tests without the trl package, each with a habit that is hard to continue
TEMPLATES = {
    "chatml": CHATML,
    "begins_with_bos": "{{ bos_token }}" + CHATML,
    # thinking of earlier turns is not shown
    "strips_thinking": CHATML.replace("(m.content or '')", "(m.content or '').split('</think>')[-1]").replace(
        "assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}"
    ),
    # users and assistants alternate; contents are trimmed
    "alternates": (
        "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' + m.content|trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>' }}{% endif %}"
    ),
    # results of neighbouring tools are one user turn; a call hides the content
    "merges_tools": (
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user\\n' }}{% endif %}"
        "{{ '<tool_response>' + m.content + '</tool_response>' }}"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
        "{% elif m.tool_calls %}{{ '<|im_start|>assistant\\n' }}{% for c in m.tool_calls %}"
        "{{ '<tool_call>' + c.function.name + ' ' + c.function.arguments|tojson + '</tool_call>' }}{% endfor %}"
        "{{ '<|im_end|>\\n' }}{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    # every turn has its number, so the tail depends on the whole conversation
    "numbers_turns": CHATML.replace("m.role + '\\n'", "m.role + ' ' ~ loop.index ~ '\\n'"),
    # no end of turn: the next role ends it
    "next_role_ends": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + (m.content or '') }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{# <|user|> <|system|> #}"
    ),
    # an answer is closed by a token of its own before the turn ends
    "closes_answers": CHATML.replace(
        "(m.content or '')", "(m.content or '') + ('<|END_RESPONSE|>' if m.role == 'assistant' else '')"
    ),
    # only lists of parts are shown
    "wants_parts": (
        "{% for m in messages %}{{ m.role|capitalize + ': ' }}{% for p in m.content %}{% if p.type == 'text' %}"
        "{{ p.text }}{% endif %}{% endfor %}{{ '<end_of_utterance>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
}


def published_templates() -> dict[str, str]:
    """Return the templates in the trl package, without importing it; none if it is not installed."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        return {}
    folder = Path(spec.origin).with_name("chat_templates")
    return {file.stem: file.read_text("utf-8") for file in sorted(folder.glob("*.jinja"))}


def model_with(folder: Path, template: str) -> TextTokenizer:
    """Write a tokenizer for ``template`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    special = [BOS, EOS, *dict.fromkeys(found for found in _SPECIAL.findall(template) if found not in (BOS, EOS))]
    tokenizer = Tokenizer.from_str(_bare())
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = [text for text in _ENDS if text in special] or [text for text in _ROLES_AS_ENDS if text in special] or [EOS]
    settings = {"bos_token": BOS, "eos_token": ends[0], "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = [tokenizer.token_to_id(text) for text in [*ends, EOS]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return TextTokenizer(folder)


@functools.cache
def _bare() -> str:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    return tokenizer.to_str()
