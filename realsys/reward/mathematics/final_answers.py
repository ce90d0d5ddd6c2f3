"""Finds the final answer in a completion: behind the thinking part, in the last box or the last statement.

    completion ──after_thinking──> text ──┬─ has boxes ──> content of the last one
                                          └─ else ───────> what the last statement ends with
                                    either may offer alternatives ("6 or 7"): a hedged answer

Pure functions on text. Values are compared elsewhere (``equality.py``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from realsys.reward.mathematics.notation import mixed_numbers, rewrite
from realsys.reward.mathematics.units import split_unit

THINK, END_OF_THINK = "<think>", "</think>"
_TAIL = 400  # characters at the end that may hold the last statement

_TAG = re.compile(r"<answer>(?P<content>(?:(?!<answer>).)*?)</answer>", re.S | re.I)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_FINAL_ANSWER = re.compile(r"(?i)final answer\b.{0,100}?\bis\b", re.S)
_DELIMITERS = re.compile(r"\\[()\[\]]|(?<!\\)\$|\*\*|\\(?:quad|qquad|,|;)|\\!\s*|\\text\s*\{([^{}]*)\}")
_OR = (
    r"(?:(?:or|and/or|maybe|perhaps|possibly|alternatively)\b|but\s+(?:it\s+)?(?:could|might|may)\s+(?:also\s+)?be\b)"
    r"(?:[\s,]+(?:or|maybe|perhaps|possibly|even|also|it(?:'s|\s+is|\s+(?:could|might|may)\s+be)))*"
)
_BETWEEN = re.compile(rf"\W*{_OR}\W*", re.I)
#: a word with a digit; its parts are possessive, so that a long one takes no quadratic time
_TOKEN = r"(?<![\w.])(?:[A-Za-z]\s*=\s*)?(?=\S*\d)[\w\\{}^/.,:%+*()\[\]-]++"
_TWO = re.compile(
    rf"(?P<first>{_TOKEN})\s*[,;.?!(]*\s*(?:{_OR}|and|by)\s+(?P<second>{_TOKEN})"
    r"(?:\s+[A-Za-z]+(?:\^\d)?){0,3}[\s.!?)]*$",
    re.I,
)
_NEXT = re.compile(rf"^[\s.,;(\\$)\]*]*{_OR}[\s$\\(]+(?P<second>\\boxed\s*\{{[^{{}}]*\}}|{_TOKEN})", re.I)
_NOT = re.compile(rf",?\s+(?:and\s+|but\s+)?not\s+{_TOKEN}[\s.!]*$", re.I)
#: several numbers that are one value or several, but not the last of them
_COMPOSITE = re.compile(r"(?<![\w.,])[-+]?\d[\d.,]*(?:\s*(?:\\times|\\cdot|[*x:/^])\s*\d[\d.,]*)+$")
_QUANTITY = re.compile(r"(?<![\w./])[-+]?\d[\d.,]*(?:/\d+)?\s+[A-Za-z][A-Za-z^\d/]*(?:\s+per\s+[A-Za-z]+)?$")
_ANCHOR = re.compile(r"(?i)\banswers?\b(?:\s+(?:is|are)|\s*[:=])")
_VERB = re.compile(
    r"(?i).*\b(?:is|are|be|equals?|gives?|get|answers?\s*:|solutions?\s*:|answer\s*=)(?![A-Za-z])[\s:]*", re.S
)
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])|\n+")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_MATH_WORDS = re.compile(
    r"(?i)(?<![A-Za-z])(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|inf|infinity|oo|and|or|in|mod"
    r"|percent|pct|percentage)(?![A-Za-z])"
)
_WORD = re.compile(r"[A-Za-z]{2,}")
#: words whose letters are in the order of the alphabet, like those of a product of variables
_ORDERED_WORDS = frozenset(
    "all am an any as at be by do first for go how in is it its lost most my no not now or".split()  # noqa: SIM905
)
_LONGEST_BARE = 200  # characters of an answer without a box
_LONGEST = 2000  # characters of an answer that are rewritten; math-verify reads a longer one as it stands


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The final answer of a completion.

    text          behind the thinking part, in LaTeX notation
    answer        text of the answer alone, with its unit or percent sign; None if the words around it hide its end
    boxed         it is in a box
    alternatives  values that it offers by "or", "maybe" and the like; empty if it commits itself
    """

    text: str
    answer: str | None
    boxed: bool
    alternatives: list[str] = field(default_factory=list)


def after_thinking(completion: str) -> str | None:
    """Return what follows the thinking part; None if that has not ended. Without such a part, all of the completion."""
    if END_OF_THINK in completion:
        return completion.rpartition(END_OF_THINK)[2]
    return None if THINK in completion else completion


def has_format(completion: str) -> bool:
    """Return True for one thinking part at the start, then an answer in a box.

    A chat template may have opened the thinking part in the prompt.
    """
    thought, end, answer = completion.partition(END_OF_THINK)
    thought = thought.strip().removeprefix(THINK)
    tags = thought + answer
    return bool(end and thought.strip() and THINK not in tags and END_OF_THINK not in tags and boxes(answer))


def final_answer(completion: str) -> FinalAnswer | None:
    """Return the final answer; None if the completion has no final answer."""
    text = after_thinking(completion)
    if text is None or not text.strip():
        return None
    text = _without_tag(rewrite(text))
    found = boxes(text)
    if not found:
        return _unboxed(text)
    last = found[-1]
    if _FINAL_ANSWER.search(text, last.end):
        return FinalAnswer(text, None, boxed=False)
    answer = last.content.strip("* ") + _suffix(text[last.end :]) if len(last.content) <= _LONGEST else None
    return FinalAnswer(text, answer, True, _boxed_alternatives(text, found))


def _without_tag(text: str) -> str:
    """Return the content of the last ``<answer>`` tag, in a box if it is an answer alone; else the text as it is."""
    tags = list(_TAG.finditer(text))
    if not tags or _BOX.search(text, tags[-1].end()):
        return text
    content = tags[-1]["content"].strip()
    return rf"\boxed{{{content}}}" if not boxes(content) and _is_bare(split_unit(content.strip("$"))[0]) else content


@dataclass(frozen=True, slots=True)
class Box:
    """A ``\\boxed{...}`` in a text."""

    start: int
    end: int
    content: str


def boxes(text: str) -> list[Box]:
    """Return the boxes that are closed, in their order; one inside of another is part of its content."""
    found: list[Box] = []
    at = 0
    while match := _BOX.search(text, at):
        end = _closing_brace(text, match.end())
        if end is None:
            break
        found.append(Box(match.start(), end + 1, text[match.end() : end]))
        at = end + 1
    return found


def _plain(match: re.Match[str]) -> str:
    """Return what a delimiter or a space of LaTeX is in plain text; ``1,\\!000`` is one number."""
    return "" if match[0].startswith("\\!") else match[1] or " "


def _closing_brace(text: str, at: int) -> int | None:
    depth = 1
    for match in re.compile(r"\\[{}]|[{}]").finditer(text, at):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if not depth:
            return match.start()
    return None


def _suffix(rest: str) -> str:
    """Return the percent sign or unit that follows a box."""
    rest = _DELIMITERS.sub(_plain, rest[:40]).strip()
    if match := re.match(r"(?:\\?%|(?:percent|percentage|pct)\b)", rest):
        return r"\%" if match else ""
    words = re.match(r"[A-Za-z][A-Za-z/^\d ]*", rest)
    for count in range(min(4, len(words[0].split())) if words else 0, 0, -1):
        assert words is not None
        phrase = " ".join(words[0].split()[:count])
        if split_unit(f"1 {phrase}")[1] is not None:
            return rf"\text{{ {phrase}}}"
    return ""


def _boxed_alternatives(text: str, found: list[Box]) -> list[str]:
    last = found[-1]
    alternatives = [last.content]
    for before, after in zip(reversed(found[:-1]), reversed(found[1:]), strict=True):
        between = _DELIMITERS.sub(_plain, text[before.end : after.start])
        if not _BETWEEN.fullmatch(between):
            break
        alternatives.append(before.content)
    rest = _DELIMITERS.sub(_plain, text[last.end :])
    if match := _NEXT.match(rest):
        alternatives.append(_trimmed(match["second"]))
    return alternatives if len(alternatives) > 1 else []


def _unboxed(text: str) -> FinalAnswer:
    text = mixed_numbers(text)
    tail = _DELIMITERS.sub(_plain, text[-_TAIL:].strip())
    sentences = [sentence for sentence in _SENTENCE.split(tail) if sentence.strip()]
    if not sentences:
        return FinalAnswer(text, None, boxed=False)
    last = _NOT.sub("", sentences[-1])
    if last != sentences[-1]:
        text = text[:-_TAIL] + tail.removesuffix(sentences[-1]) + last
    if re.match(rf"\W*{_OR}", last, re.I) and len(sentences) > 1:
        last = f"{sentences[-2]} {last}"
    return FinalAnswer(text, _bare(last), False, _alternatives(last))


def _alternatives(sentence: str) -> list[str]:
    match = _TWO.search(sentence)
    if match is None:
        return []
    anchors = list(_ANCHOR.finditer(sentence, 0, match.start()))
    # "The answer is 7, as it is not 2 or 3": another answer precedes the two.
    if anchors and re.search(r"\d", sentence[anchors[-1].end() : match.start()]):
        return []
    return [_trimmed(match["second"]), _trimmed(match["first"])]


def _trimmed(token: str) -> str:
    """Return a word without the punctuation of its sentence."""
    token = token.rstrip(".,;:")
    return token[:-1] if token.count(")") > len(re.findall(r"[(\[]", token)) else token


def _bare(sentence: str) -> str | None:
    """Return the mathematical text that is the whole sentence, or that follows its last verb; None if it has other
    words. A number with a known unit at the end counts, too.
    """
    for text in (sentence, _VERB.sub("", sentence, count=1)):
        answer = text.strip().rstrip(".!").strip()
        if answer and _is_bare(split_unit(answer)[0]):
            return answer
    sentence = sentence.strip().rstrip(".!").strip()
    if composite := _COMPOSITE.search(sentence):
        return composite[0]
    quantity = _QUANTITY.search(sentence)
    return quantity[0] if quantity and split_unit(quantity[0])[1] is not None else None


def math_letters(text: str) -> str:
    """Return the text without the names of commands and functions. Its other letters are variables or words."""
    return _MATH_WORDS.sub(" ", _COMMAND.sub(" ", text))


def prose_words(text: str) -> list[str]:
    """Return the words of a text; ``xy`` and ``abc`` are products of variables."""
    return [w for w in _WORD.findall(text) if w.lower() in _ORDERED_WORDS or list(w) != sorted(w)]


def _is_bare(text: str) -> bool:
    if not text or len(text) > _LONGEST_BARE:
        return False
    rest = math_letters(text)
    if re.fullmatch(r"\W*[A-Za-z]\W*", rest):
        return True
    return not prose_words(rest) or (" " not in text and re.search(r"[\d+*/^=-]", text) is not None)
