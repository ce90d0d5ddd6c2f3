"""Choice of the format of tool calls by the chat template. No import of ``renderers``, which takes half a second."""

from __future__ import annotations

AUTO, NONE = "auto", "none"
OPEN_END = "\ue000"  # a character for private use: the place of text that will follow
#: texts in a chat template -> format. The first one whose texts all occur is chosen.
_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|call|>"), "gpt-oss"),
    (("<|tool_calls_section_begin|>", "<think>"), "kimi-k2.5"),
    (("<|tool_calls_section_begin|>",), "kimi-k2"),
    (("｜DSML｜",), "deepseek-v4"),
    (("<｜tool▁calls▁begin｜>", "<think>"), "deepseek-r1"),
    (("<｜tool▁calls▁begin｜>",), "deepseek-v3"),
    (("<minimax:tool_call>",), "minimax-m2"),
    (("<|tool_call>", "<|channel>"), "gemma4"),
    (("hy_tool_call",), "hy3"),
    (("[gMASK]", "<arg_key>", "clear_thinking"), "glm-5"),
    (("[gMASK]", "<arg_key>"), "glm-4.5"),
    (("<tool_call>", "<function="), "qwen3.5"),
    (("<tool_call>", '"arguments"'), "qwen3"),
    (("<|start_header_id|>", '"parameters"'), "llama-3"),
)


def format_of(template: str) -> str:
    """Return the format that a chat template asks for; NONE if it has no known marks."""
    return next((name for marks, name in _MARKS if all(mark in template for mark in marks)), NONE)
