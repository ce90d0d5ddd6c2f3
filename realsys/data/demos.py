"""Demonstrations for the supervised warm-up: JSONL with prompt and response."""

from __future__ import annotations

from pathlib import Path

from realsys.data.lines import Demonstration, RecordReader, index_file
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import DataError


class DemoDataset:
    """Demonstrations of one file. Opening checks every line; ``sequence`` tokenises one of them."""

    def __init__(self, path: Path, tokenizer: TextTokenizer, *, chat_template: bool = True) -> None:
        self._tokenizer = tokenizer
        self._chat = chat_template
        self._lines = index_file(path, RecordReader(Demonstration))
        if not len(self._lines):
            raise DataError(f"{path}: no demonstrations found: add lines")

    def __len__(self) -> int:
        return len(self._lines)

    def sequence(self, index: int) -> tuple[list[int], list[int]]:
        """Return (prompt ids, response ids with the end-of-text token). DataError names file and line."""
        return self._encode(index, self._lines[index])

    def check(self, max_prompt_tokens: int, max_new_tokens: int) -> None:
        """Tokenise everything once. Raises DataError for the first demonstration that is too long.

        ``max_prompt_tokens``: tokens of the agent's longest row before its last completion.
        """
        for indices, records in self._lines.chunks():
            try:
                tools = [r.tools for r in records]
                prompts = self._tokenizer.encode_prompts([r.prompt for r in records], chat=self._chat, tools=tools)
                responses = self._tokenizer.encode_texts([r.response for r in records])
            except DataError:
                # The batch does not tell which one failed; one by one, the error names the line.
                for index, record in zip(indices, records, strict=True):
                    self._encode(index, record)
                raise
            for index, prompt, response in zip(indices, prompts, responses, strict=True):
                self._check_length(index, "prompt", len(prompt), max_prompt_tokens, "data.max_prompt_tokens")
                limit = "generation.sampling.max_new_tokens"
                self._check_length(index, "response", len(response) + 1, max_new_tokens, limit)

    def _encode(self, index: int, record: Demonstration) -> tuple[list[int], list[int]]:
        try:
            prompt = self._tokenizer.encode_prompt(record.prompt, chat=self._chat, tools=record.tools)
            response = self._tokenizer.encode_text(record.response)
        except DataError as error:
            raise DataError(f"{self._lines.where(index)}: {error}") from None
        return prompt, [*response, self._tokenizer.eos_token_id]

    def _check_length(self, index: int, name: str, length: int, limit: int, field: str) -> None:
        if length > limit:
            problem = f"the {name} has {length} tokens, but {field} is {limit}: increase it or remove the line"
            raise DataError(f"{self._lines.where(index)}: {problem}")
