"""Conversion between text and token ids, with the tokenizer files of an HF model directory. No transformers, no torch.

The ids of a completion are never computed from its text: ``completion_text`` is for the reward only.
"""

from __future__ import annotations

import bisect
import itertools
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.decoders import DecodeStream

from realsys.data.chat import (
    NO_OPTIONS,
    ChatMessage,
    ChatTemplate,
    Tails,
    Tools,
    assistant_turns,
    find_chat_template,
    join,
    text_of,
)
from realsys.data.lines import Message, PromptText
from realsys.errors import DataError, ModelError
from realsys.model_files.config_json import read_end_of_text

#: tokens of the latest chats are kept: the episodes of a group begin with the same one
KEPT_CHATS = 256
KEPT_TOKENS = 8192  # a longer chat is not kept


class TextTokenizer:
    """Tokenizer of a model, with its special tokens and chat template. Raises ModelError."""

    def __init__(self, model_dir: Path) -> None:
        self.path = Path(model_dir)
        file = self.path / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the tokenizers package raises plain Exception
            raise ModelError(f"{file}: cannot be read as a tokenizer: {error}") from None
        # tokenizer.json may ask for both, but a prompt must not be cut or padded silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = read_json(self.path / "tokenizer_config.json")
        special = {name: _content(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        self._chat = find_chat_template(self.path, settings, {name: text for name, text in special.items() if text})
        self._tails = Tails(self._chat) if self._chat is not None else None
        self._kept: OrderedDict[tuple[bytes, tuple[str, ...]], array[int]] = OrderedDict()
        self._added = {number: token.content for number, token in self._tokenizer.get_added_tokens_decoder().items()}
        vocabulary = read_json(self.path / "config.json").get("vocab_size")
        tokens = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        self._limit = vocabulary if isinstance(vocabulary, int) and tokens >= vocabulary else None
        self.eos_token_ids = self._find_eos(special["eos_token"])
        self._ends = [self.decode([token]) for token in self.eos_token_ids]
        self._known: set[str] | None = None if _has_all_bytes(self._tokenizer) else set()

    @property
    def eos_token_id(self) -> int:
        """The token that ends a completion: that of the tokenizer, else the model's first."""
        return self.eos_token_ids[0]

    @property
    def eos_warning(self) -> str:
        """A line about an end of text that tokenizer and model do not share; "" if they agree."""
        own, model = self.eos_token_ids[0], read_end_of_text(self.path)
        if (mark := self._end_of_turn()) is not None and mark not in self.eos_token_ids:
            return (
                f"{self.path}: the chat template ends a turn with {self.token(mark)!r}, but completions end with "
                f"{self.token(own)!r} only: most will run on to their limit; set eos_token to what the model writes"
            )
        if not model or own in model:
            return ""
        ends = ", ".join(repr(self.decode([token])) for token in model)
        return (
            f"{self.path}: tokenizer_config.json ends a text with {self.decode([own])!r}, generation_config.json with "
            f"{ends}: completions end with any of them, demonstrations teach the first; set eos_token to what the "
            "model writes"
        )

    def _end_of_turn(self) -> int | None:
        """Return the special token that ends the turn of an assistant in the chat template, if one does."""
        if self._chat is None:
            return None
        try:
            turns = [Message("user", "a"), Message("assistant", "b")]
            behind = self._chat.render(turns, prompt=False).rpartition("b")[2].strip()
        except DataError:
            return None
        first = next((number for number, token in self._added.items() if token and behind.startswith(token)), None)
        # A template may close the text in a token of its own before it ends the turn.
        return next((number for number in self.eos_token_ids if self.decode([number]) in behind), first)

    @cached_property
    def _turn_ends(self) -> list[str]:
        """Texts of the tokens that end a turn of the assistant."""
        mark = self._end_of_turn()
        return list(dict.fromkeys([*self._ends, *([] if mark is None else [self._added[mark]])]))

    def template_mark(self, prompt: PromptText) -> str | None:
        """Return a special token of the chat template that a prompt of text has already; None if it has none."""
        if self._chat is None or not isinstance(prompt, str):
            return None
        return next((token for token in self._added.values() if token in prompt and token in self._chat.source), None)

    def left_out(self, prompt: PromptText, tools: Tools = ()) -> str | None:
        """Return the part of a prompt that the chat template does not print, "tools" or "system message"; "" if it
        prints all, None if the prompt has neither.
        """
        systems = [] if isinstance(prompt, str) else [m.content for m in prompt if m.role == "system" and m.content]
        if self._chat is None or not (tools or systems):
            return None
        shown = self._chat.render([Message("user", prompt)] if isinstance(prompt, str) else prompt, tools)
        names = [name for tool in tools if (name := (tool.get("function") or {}).get("name"))]
        if any(name not in shown for name in names):
            return "tools"
        return "system message" if any(text.strip() not in shown for text in systems) else ""

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def render(self, prompt: PromptText, *, chat: bool = True, tools: Tools = ()) -> str:
        """Return the text that is tokenised, without BOS if the tokenizer adds it. Raises DataError."""
        return self._prepare(prompt, chat, tools)[0]

    def encode_prompt(self, prompt: PromptText, *, chat: bool = True, tools: Tools = ()) -> list[int]:
        """Tokenise a prompt. Raises DataError.

        With ``chat`` and a model that has a chat template, the template wraps the prompt. Otherwise the
        tokenizer adds its special tokens (BOS).
        """
        text, special = self._prepare(prompt, chat, tools)
        return self._encode(text, special)

    def encode_prompts(
        self, prompts: Sequence[PromptText], *, chat: bool = True, tools: Sequence[Tools] = ()
    ) -> list[list[int]]:
        """Tokenise many, on all cores. ``tools``: one entry per prompt, or none for all.

        The DataError does not name the one that failed.
        """
        prepared = [
            self._prepare(prompt, chat, own)
            for prompt, own in zip(prompts, tools or itertools.repeat(()), strict=bool(tools))
        ]
        # Equal for all of them: either every prompt went through the template or none did.
        return self._encode_many([text for text, _ in prepared], any(special for _, special in prepared))

    def encode_text(self, text: str) -> list[int]:
        """Tokenise a text without any addition. Raises DataError."""
        return self._encode(text, False)

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise many, on all cores. The DataError does not name the one that failed."""
        return self._encode_many(texts, False)

    def encode_user_turn(self, text: str, *, chat: bool = True) -> list[int]:
        """Tokenise a user turn after a completion, to append it to a row. Earlier turns are not tokenised again.

        With ``chat`` and a model that has a template, the result is the end of the assistant's turn, the
        user's turn, and the start of the next assistant's turn; otherwise the text alone. Raises DataError.
        """
        return self._encode(self._tails.user_turn(text) if chat and self._tails is not None else text, False)

    def encode_two_turns(self, prompt: str | Sequence[Mapping[str, Any]], text: str, *, chat: bool = True) -> list[int]:
        """Tokenise a prompt and ``text`` as a further user turn; without a chat template, the text right after it.

        Raises DataError, also for a template that does not show two user turns one after the other.
        """
        if self._chat is None or not chat:
            return [*self.encode_prompt(str(prompt), chat=False), *self.encode_text(text)]
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        shown = self._chat.render([*turns, {"role": "user", "content": text}])
        before = text_of(turns[-1].get("content")) or ""
        if text.strip() not in shown or before.strip() not in shown:
            raise DataError(f"{self._chat.name}: it drops a user turn before or after another one")
        return self._encode(shown, False)

    def encode_chat(
        self, messages: Sequence[ChatMessage], tools: Tools = (), options: Mapping[str, Any] = NO_OPTIONS
    ) -> list[int]:
        """Tokenise a whole chat, up to the opening of the next completion. Raises DataError.

        Equal chats are rendered once.
        """
        template = self._template()
        chat = msgspec.json.encode((messages, tools, options))
        key = (chat, template.clock())
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key].tolist()
        text = template.render(messages, tools, options)
        self.check_text(text)
        ids = self._encode(text, False)
        if len(ids) <= KEPT_TOKENS:
            self._kept[chat, template.clock()] = array("i", ids)
        if len(self._kept) > KEPT_CHATS:
            self._kept.popitem(last=False)
        return ids

    def encode_turns(
        self, messages: Sequence[Message], tools: Tools = (), *, first: int = 0, chat: bool = True
    ) -> tuple[list[int], list[bool]]:
        """Tokenise a chat to learn from, up to the end of the assistant's last turn.

        Returns its tokens, and True for those of the assistant's turns among ``messages[first:]``, with the token that
        ends each of them. A token that begins in the opening of a turn has no loss. Raises DataError.
        """
        if self._chat is None or not chat:
            raise DataError(f"the row is a chat, but {self._no_template(chat)}: write prompt and response as texts")
        turns = assistant_turns(self._chat, messages, tools, self._turn_ends, first)
        try:
            # The whole text: cut in parts, it might have other tokens.
            encoding = self._tokenizer.encode_batch([turns.text], add_special_tokens=False)[0]
        except Exception as error:  # the tokenizers package raises plain Exception
            raise DataError(f"cannot be tokenised with {self.path}: {error}") from None
        (ids,) = self._within([list(encoding.ids)])
        starts = [start for start, _ in turns.spans]
        mask = []
        for at, _ in encoding.offsets:
            turn = bisect.bisect_right(starts, at) - 1
            mask.append(turn >= 0 and at < turns.spans[turn][1])
        return (ids, mask) if turns.closed else ([*ids, self.eos_token_id], [*mask, True])

    def encode_tail(
        self,
        before: Sequence[ChatMessage],
        reply: Mapping[str, Any],
        after: Sequence[ChatMessage],
        last_token: int | None,
        tools: Tools = (),
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> tuple[list[int], bool]:
        """Tokenise what follows the sampled tokens of ``reply``, up to the opening of the next completion.

        ``last_token`` is the last token that was sampled for the reply. Returns the tokens, and True if the reply ended
        with the stop token of the template; otherwise the tokens begin with the end of its turn. Raises DataError.
        """
        self._template()
        assert self._tails is not None
        tail = self._tails.tail(before, reply, after, tools, options)
        self.check_text(tail.text)
        place = join(tail, self._stop_text(last_token), self._ends)
        ids = self._encode(tail.text[place.start :], False)
        # Tokenised with the stop token and cut behind it, because some tokenizers strip the space after one.
        if place.overlaps and ids and ids[0] == last_token:
            return ids[1:], place.clean
        if place.overlaps:
            ids = self._encode(tail.text[place.start + len(self._stop_text(last_token) or "") :], False)
        return ids, place.clean

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of all tokens, special ones included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds to those before it; together the text of all tokens.

        A character of several tokens goes to the one that completes it.
        """
        return _token_texts(self._tokenizer, ids, self.decode(ids))

    def completion_text(self, ids: Sequence[int]) -> str:
        """Return the text of a completion, without the end-of-text token at its end.

        Other special tokens stay in the text, so that the verifier sees everything in a completion.
        """
        if len(ids) and int(ids[-1]) in self.eos_token_ids:
            ids = ids[:-1]
        return self.decode([int(token) for token in ids])

    def unknown(self, characters: Iterable[str]) -> list[str]:
        """Return the characters that the tokenizer drops, or replaces by its token for unknown ones; sorted."""
        unk = getattr(self._tokenizer.model, "unk_token", None)

        def is_lost(character: str) -> bool:
            tokens = self._tokenizer.encode(character, add_special_tokens=False).tokens
            return not tokens or unk in tokens

        return [character for character in sorted(characters) if not character.isspace() and is_lost(character)]

    def check_text(self, text: str) -> None:
        """Raise DataError if the tokenizer loses a character of ``text``: the model would see another text."""
        if self._known is None:
            return
        for token in self._added.values():
            text = text.replace(token, "")  # a token of several characters may have one that is no token itself
        if not (fresh := set(text) - self._known):
            return
        two = self._tokenizer.encode("aa", add_special_tokens=False).ids
        blank = [c for c in fresh if c.isspace()]
        blank = [c for c in blank if self._tokenizer.encode(f"a{c}a", add_special_tokens=False).ids == two]
        if lost := sorted(blank) + self.unknown(fresh):
            shown = " ".join(map(repr, lost[:10]))
            raise DataError(f"{self.path}: the tokenizer loses {len(lost)} characters of the text: {shown}: use others")
        self._known |= fresh

    @property
    def chat_source(self) -> str:
        """Text of the chat template; "" if the model has none."""
        return self._chat.source if self._chat is not None else ""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary, such as a marker of tool calls."""
        number = self._tokenizer.token_to_id(token)
        return None if number is None else int(number)

    def token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary writes it, which is not always its text."""
        token = self._tokenizer.id_to_token(token_id)
        return None if token is None else str(token)

    def _template(self) -> ChatTemplate:
        if self._chat is None:
            raise DataError(f"{self.path}: the model has no chat template, so it cannot take messages: send text")
        return self._chat

    def _stop_text(self, token: int | None) -> str | None:
        """Return the text of a token that may end a completion; None for any other."""
        if token is None:
            return None
        return self._added.get(token) or (self.decode([token]) if token in self.eos_token_ids else None)

    def _prepare(self, prompt: PromptText, chat: bool, tools: Tools) -> tuple[str, bool]:
        """Return the text, and True if the tokenizer must add its special tokens: a chat template includes them."""
        if chat and self._chat is not None:
            messages = [Message("user", prompt)] if isinstance(prompt, str) else prompt
            return self._chat.render(messages, tools), False
        reason = self._no_template(chat)
        if tools:
            raise DataError(f"the row has tools, but {reason}: only a chat template can describe them to the model")
        if isinstance(prompt, str):
            return prompt, True
        raise DataError(f"the prompt is a list of messages, but {reason}: write it as one text")

    @staticmethod
    def _no_template(chat: bool) -> str:
        return "the model has no chat template" if chat else "data.chat_template is false"

    def _encode(self, text: str, special: bool) -> list[int]:
        try:
            # encode() would hold the interpreter's lock, and so stop every other thread of this process.
            ids = list(self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)
        except Exception as error:  # the tokenizers package raises plain Exception
            raise DataError(f"cannot be tokenised with {self.path}: {error}") from None
        return self._within([ids])[0]

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token; a text has at most as many for each of its tokens."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, without the interpreter's lock: other threads run on."""
        return len(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])

    def _within(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the tokens; DataError for one beyond the vocabulary of the model."""
        if self._limit is not None:
            for token in (max(ids, default=0) for ids in prompts):
                if token >= self._limit:
                    raise DataError(
                        f"token {token} ({self.token(token)!r}) is beyond the vocabulary of the model ({self._limit}): "
                        f"remove it from the text, or enlarge the embedding of {self.path}"
                    )
        return prompts

    def _encode_many(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
        except Exception as error:  # the tokenizers package raises plain Exception
            raise DataError(f"cannot be tokenised with {self.path}: {error}") from None
        return self._within([list(encoding.ids) for encoding in encodings])

    def _find_eos(self, eos_token: str | None) -> tuple[int, ...]:
        """Return the ids that end a completion, the tokenizer's own first."""
        ids: list[int] = []
        if eos_token is not None:
            token_id = self._tokenizer.token_to_id(eos_token)
            if token_id is None:
                problem = f"eos_token {eos_token!r} not found in tokenizer.json"
                raise ModelError(f"{self.path / 'tokenizer_config.json'}: {problem}")
            ids.append(token_id)
        ids += read_end_of_text(self.path)
        if not ids:
            raise ModelError(f"{self.path}: no end-of-text token in tokenizer_config.json or generation_config.json")
        return tuple(dict.fromkeys(ids))


def _has_all_bytes(tokenizer: Tokenizer) -> bool:
    """Return True if every byte has a token, so that no text is lost."""
    alphabets = (pre_tokenizers.ByteLevel.alphabet(), [f"<0x{byte:02X}>" for byte in range(256)])
    return any(all(tokenizer.token_to_id(token) is not None for token in tokens) for tokens in alphabets)


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file of a model directory; empty if the file does not exist. Raises ModelError."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must contain a JSON object")
    return value


def _content(token: Any) -> str | None:
    """Return the text of a special token, which is written as text or as an object with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _token_texts(tokenizer: Tokenizer, ids: Sequence[int], whole: str) -> list[str]:
    """Return the text that each token adds. ``whole``: the text of all of them."""
    stream = DecodeStream(skip_special_tokens=False)
    texts = [stream.step(tokenizer, int(token)) or "" for token in ids]
    joined = "".join(texts)
    if texts and whole.startswith(joined):  # more of it: the last character is not complete
        texts[-1] += whole[len(joined) :]
    return texts
