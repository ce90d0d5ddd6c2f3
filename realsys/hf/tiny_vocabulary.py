"""Tokens of the tiny model, whose tokenizer and weights ``realsys.data.char_model`` writes.

plain form   one token per character of ``ALPHABET``; other characters are lost
chat form    one token per byte, so no text is lost; single tokens for the marks of a chat
"""

from __future__ import annotations

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
SPECIAL = (PAD, EOS, BOS)
PAD_ID, EOS_ID, BOS_ID = range(len(SPECIAL))
ALPHABET = "0123456789+=;#abcdefghijklmnopqrstuvwxyz "
END_OF_TURN = "<|im_end|>"
END_OF_TURN_ID = 4
CHAT_SPECIAL = (*SPECIAL, "<|im_start|>", END_OF_TURN, "<|endoftext|>")
# Single tokens, but part of the text, as in Qwen's tokenizers.
CHAT_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_BYTES = 256
_SHARDS = 4  # tensor parallel 2 and 4 must divide the vocabulary


def vocabulary_size(*, chat: bool) -> int:
    """Return the number of rows of the embedding: all tokens, rounded up."""
    tokens = _BYTES + len(CHAT_SPECIAL) + len(CHAT_MARKS) if chat else len(ALPHABET) + len(SPECIAL)
    return -(-tokens // _SHARDS) * _SHARDS
