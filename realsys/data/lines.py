"""Records of JSONL files: their types, checks, and random access without the whole file in memory.

Every problem is a DataError that starts with ``file:line:`` and ends with an example of a valid line.
"""

from __future__ import annotations

import contextlib
import re
from array import array
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from realsys.errors import MALFORMED, DataError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ORIGIN = "data_origin"  # key of a converted row: file and row that it was read from


class Message(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One message of a chat, in the form of OpenAI's API.

    content       None only for an assistant that calls tools
    tool_calls    calls of an assistant; ``function.arguments`` is an object
    tool_call_id  the call that a message of role tool answers
    name          the tool, or the speaker
    other         further keys, such as reasoning_content: the chat template gets them as keys of the message
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None
    tool_calls: list[dict[str, Any]] = []
    tool_call_id: str = ""
    name: str = ""
    other: dict[str, Any] = {}

    @classmethod
    def read(cls, value: dict[str, Any]) -> Message:
        """Return a message of a data set. A key with null counts as absent. Raises msgspec.ValidationError."""
        given = {key: entry for key, entry in value.items() if entry is not None}
        own = {key: given.pop(key) for key in cls.__struct_fields__ if key in given}
        if isinstance(other := own.pop("other", {}), dict):  # a trial's own copy of the row has it so
            given = other | given
        else:
            given["other"] = other
        return msgspec.convert({"content": None, **own, "other": given}, cls)

    def as_object(self) -> dict[str, Any]:
        """Return the message as an API and a chat template have it."""
        value: dict[str, Any] = msgspec.to_builtins(self)
        return {**value.pop("other", {}), **value}


def without_nulls(value: Any, keep: Collection[str] = ("default", "const")) -> Any:
    """Copy a value without the null entries that a table adds to give every object the same keys.

    In a JSON schema null means something as value of the keys ``keep``, or in a list.
    """
    if isinstance(value, dict):
        return {k: without_nulls(entry, keep) for k, entry in value.items() if entry is not None or k in keep}
    return [without_nulls(entry, keep) for entry in value] if isinstance(value, list) else value


PromptText = str | list[Message]


#: keys of a row that the reader checks, and agent and verifier get, too
_SHARED = ("tools", "code_tests")


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt with the reference answer, which a verifier compares with the completion.

    tools       descriptions of the tools for the chat template, as JSON objects in the form of OpenAI's API
    code_tests  tests of a program; then ``answer`` may be empty

    The line may have other keys. ``Lines.read_whole`` returns them; opening a file skips them, which is faster.
    """

    prompt: str | list[Message]
    answer: str
    tools: list[dict[str, Any]] = []
    code_tests: CodeTests | None = None

    EXAMPLE = '{"prompt": "text, or a list of {role, content}", "answer": "text"}'


class Demonstration(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt with the response to imitate, or a chat, whose assistant is imitated. Other keys are ignored.

    ``tools``: as of a problem. A row with ``messages`` may have a ``prompt``, too, which is not read.
    """

    prompt: str | list[Message] = ""
    response: str = ""
    messages: list[Message] = []
    tools: list[dict[str, Any]] = []

    EXAMPLE = (
        '{"prompt": "text, or a list of {role, content}", "response": "text"} or {"messages": [{role, content}, ...]}'
    )

    def parts(self) -> tuple[PromptText, list[str | list[Message]]]:
        """Return the prompt and the response, which begins with the first turn of the assistant."""
        if not self.messages:
            return self.prompt, [self.response]
        first = next((i for i, message in enumerate(self.messages) if message.role == "assistant"), len(self.messages))
        return self.messages[:first], [self.messages[first:]]


class Preference(msgspec.Struct, frozen=True, omit_defaults=True):
    """Two responses to one prompt, of which the first is better. ``tools``: as of a problem. Other keys are ignored.

    Responses are texts, messages after the prompt, or whole chats, which begin with the same prompt.
    """

    chosen: str | list[Message]
    rejected: str | list[Message]
    prompt: str | list[Message] = ""
    tools: list[dict[str, Any]] = []

    EXAMPLE = (
        '{"prompt": "text, or a list of {role, content}", "chosen": "text", "rejected": "text"} '
        'or {"chosen": [{role, content}, ...], "rejected": [{role, content}, ...]}'
    )

    def parts(self) -> tuple[PromptText, list[str | list[Message]]]:
        """Return the prompt, and the chosen and the rejected response. Raises DataError if the prompts differ."""
        if isinstance(self.chosen, str) and isinstance(self.rejected, str):
            return self.prompt, [self.chosen, self.rejected]
        chosen, rejected = _turns(self.chosen), _turns(self.rejected)
        if _is_response(chosen) and _is_response(rejected) and self.prompt:
            return self.prompt, [chosen, rejected]
        pairs = enumerate(zip(chosen, rejected, strict=False))
        first = next((i for i, (one, two) in pairs if one != two), min(len(chosen), len(rejected)))
        prompt, responses = chosen[:first], (chosen[first:], rejected[first:])
        if not all(_is_response(response) for response in responses if response):
            raise DataError("chosen and rejected have different prompts")
        asked = self.prompt if isinstance(self.prompt, list) else [Message("user", self.prompt)]
        if self.prompt and not all(message in prompt for message in asked):
            raise DataError("chosen and rejected do not begin with prompt")
        return prompt, list(responses)


def _turns(response: str | list[Message]) -> list[Message]:
    return [Message("assistant", response)] if isinstance(response, str) else response


def _is_response(messages: list[Message]) -> bool:
    return bool(messages) and messages[0].role == "assistant"


# ---- decoding and checks of a line

Record = TypeVar("Record", bound=Problem | Demonstration | Preference)

_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
_MEDIA_KEY = re.compile(rb'"(?:image|video|audio)s?"\s*:')
_OF_MESSAGES = frozenset({"prompt", "messages", "chosen", "rejected"})  # keys whose values may be messages
_OBJECT: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


class LineReader(Generic[Record]):
    """Reader of the lines of one record type."""

    def __init__(self, kind: type[Record]) -> None:
        self.kind = kind
        self._decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(kind)

    def decode(self, path: Path, number: int, line: bytes) -> Record:
        """Decode and check the record on line ``number`` (from 1). Raises DataError."""
        try:
            if not line.isascii():
                line.decode()  # the decoder does not check the characters of keys that it skips
            record = self._record(line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line)
        except MALFORMED as error:
            raise self._error(path, number, line, str(error)) from None
        problem = problem_of(record)
        if problem is None and _MEDIA_KEY.search(line):
            problem = media_problem(_OBJECT.decode(line.removeprefix(BYTE_ORDER_MARK)))
        if problem:
            raise self._error(path, number, line, problem)
        return record

    def _record(self, line: bytes) -> Record:
        try:
            record = self._decoder.decode(line)
        except msgspec.ValidationError:  # null for an absent key, or further keys of messages: rare, and takes longer
            keys = {key: value for key, value in _OBJECT.decode(line).items() if value is not None}
            for key in _OF_MESSAGES.intersection(self.kind.__struct_fields__):
                if isinstance(given := keys.get(key), list) and all(isinstance(one, dict) for one in given):
                    read = [_read_message(key, number, one) for number, one in enumerate(given)]
                    keys[key] = msgspec.to_builtins(read)
            record = msgspec.convert(keys, self.kind)
        if record.tools:
            return msgspec.structs.replace(record, tools=without_nulls(record.tools))
        return record

    def decode_extra(self, path: Path, number: int, line: bytes) -> dict[str, Any]:
        """Decode the keys of a line other than those of its texts and messages. Raises DataError."""
        try:
            keys = _OBJECT.decode(line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line)
        except MALFORMED as error:
            raise self._error(path, number, line, str(error)) from None
        for name in set(self.kind.__struct_fields__).difference(_SHARED):
            keys.pop(name, None)
        return keys

    def scan(self, path: Path) -> Iterator[tuple[int, int, Record]]:
        """Yield (byte offset, line number, record) of every line that is not blank. Raises DataError at a bad one."""
        for offset, number, line in scan_lines(path):
            yield offset, number, self.decode(path, number, line)

    def _error(self, path: Path, number: int, line: bytes, problem: str) -> DataError:
        place = f"{path}:{number}"
        if ORIGIN.encode() in line:
            with contextlib.suppress(*MALFORMED):
                place = str(_OBJECT.decode(line).get(ORIGIN, place))
        return DataError(f"{place}: {problem}; a line must be {self.kind.EXAMPLE}")


def _read_message(key: str, number: int, value: dict[str, Any]) -> Message:
    try:
        return Message.read(value)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(str(error).replace("`$", f"`$.{key}[{number}]")) from None


def media_problem(row: Mapping[str, Any]) -> str | None:
    """Return the problem of a row that has images, videos or sound, or None: models get text only."""
    if (key := next((key for key in _MEDIA if row.get(key)), None)) is None:
        return None
    return f"field {key!r}: models get text only: remove the row, or the field if the text is enough"


def problem_of(record: Problem | Demonstration | Preference) -> str | None:
    """Return the problem that the types cannot express, or None."""
    if not isinstance(record, Problem):
        return _problem_of_learned(record)
    if problem := _problem_of_prompt(record.prompt):
        return problem
    if record.code_tests is not None:
        return record.code_tests.problem()
    return None if record.answer.strip() else "answer is empty: a verifier needs it"


def _problem_of_learned(record: Demonstration | Preference) -> str | None:
    if isinstance(record, Preference) and record.chosen == record.rejected:
        return "chosen and rejected are equal"
    try:
        prompt, responses = record.parts()
    except DataError as error:
        return str(error)
    names = ["chosen", "rejected"] if isinstance(record, Preference) else ["response"]
    problem = _problem_of_prompt(prompt)
    if isinstance(record, Demonstration) and record.messages:
        if record.response:
            return "messages and response are both there: leave one out"
        names = ["messages"]
        problem = _problem_of_contents("messages", record.messages)
    problems = (_problem_of_response(name, response) for name, response in zip(names, responses, strict=True))
    return problem or next(filter(None, problems), None)


def _problem_of_response(name: str, response: str | list[Message]) -> str | None:
    if not response:
        return f"{name} has no response of the assistant" if isinstance(response, list) else f"{name} is empty"
    if isinstance(response, str):
        return None
    if any(message.role == "assistant" and not (message.content or message.tool_calls) for message in response):
        return f"{name} has an empty message of the assistant"
    return _problem_of_contents(name, response)


def _problem_of_prompt(prompt: PromptText) -> str | None:
    if isinstance(prompt, str):
        return None if prompt.strip() else "prompt is empty"
    if not prompt:
        return "prompt has no messages"
    if problem := _problem_of_contents("prompt", prompt):
        return problem
    if (role := prompt[-1].role) not in ("user", "tool"):
        return f"the last message of prompt has role {role!r}, but it must be 'user' or 'tool'"
    return None


def _problem_of_contents(name: str, messages: list[Message]) -> str | None:
    for number, message in enumerate(messages, 1):
        if message.content is None and not (message.role == "assistant" and message.tool_calls):
            return f"message {number} of {name} has no content: only an assistant with tool_calls may have none"
    return None


def scan_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield (byte offset, line number from 1, content) of every line that is not blank. Raises DataError."""
    return (entry for entry in _all_lines(path) if entry[2].strip())


def _all_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    offset = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield offset, number, line
                offset += len(line)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


# ---- random access


class Lines(Generic[Record]):
    """Random access to some lines of a file, by their byte offsets; it takes 16 bytes of memory per line."""

    def __init__(
        self,
        path: Path,
        reader: LineReader[Record],
        offsets: npt.NDArray[np.int64],
        numbers: npt.NDArray[np.int64],
    ) -> None:
        self.path = path
        self._reader = reader
        self._offsets = offsets
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._offsets)

    def number(self, index: int) -> int:
        """Return the line number of record ``index``, from 1."""
        return int(self._numbers[index])

    def where(self, index: int) -> str:
        """Return file and line of a record; for a converted one, those of the source."""
        place = f"{self.path}:{self.number(index)}"
        try:
            ((number, line),) = self._raw(range(index, index + 1))
            return str(self._reader.decode_extra(self.path, number, line).get(ORIGIN, place))
        except DataError:
            return place

    def chosen(self, indices: npt.NDArray[np.int64]) -> Lines[Record]:
        """Return the records at ``indices``, in their order; a record may be there several times."""
        return Lines(self.path, self._reader, self._offsets[indices], self._numbers[indices])

    def once(self) -> Lines[Record]:
        """Return every record once, in the order of the file."""
        return self.chosen(np.unique(self._numbers, return_index=True)[1])

    def numbers(self) -> npt.NDArray[np.int64]:
        """Return the line numbers of all records, int64 [n]."""
        return self._numbers

    def __getitem__(self, index: int) -> Record:
        self._check(index)
        return self.read(range(index, index + 1))[0]

    def read(self, indices: range) -> list[Record]:
        """Read several records, opening the file once. Raises DataError."""
        return [self._reader.decode(self.path, number, line) for number, line in self._raw(indices)]

    def read_whole(self, index: int) -> tuple[Record, dict[str, Any]]:
        """Read one record, and the other keys of its line with their values unchanged. Raises DataError."""
        self._check(index)
        ((number, line),) = self._raw(range(index, index + 1))
        record = self._reader.decode(self.path, number, line)
        return record, self._reader.decode_extra(self.path, number, line)

    def _raw(self, indices: range) -> Iterator[tuple[int, bytes]]:
        try:
            with self.path.open("rb") as file:
                for index in indices:
                    file.seek(int(self._offsets[index]))
                    yield self.number(index), file.readline()
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror or error}") from None

    def _check(self, index: int) -> None:
        if not 0 <= index < len(self):
            raise DataError(f"{self.path}: record {index} not found: the file has {len(self)}")

    def chunks(self, size: int = 1024) -> Iterator[tuple[range, list[Record]]]:
        """Yield all records in order, ``size`` at a time, with their indices."""
        for start in range(0, len(self), size):
            indices = range(start, min(start + size, len(self)))
            yield indices, self.read(indices)


class LinesBuilder(Generic[Record]):
    """Builder of Lines from the offsets of a scan."""

    def __init__(self, path: Path, reader: LineReader[Record]) -> None:
        self._path = path
        self._reader = reader
        self._offsets = array("q")
        self._numbers = array("q")

    def add(self, offset: int, number: int) -> None:
        self._offsets.append(offset)
        self._numbers.append(number)

    def build(self) -> Lines[Record]:
        return Lines(self._path, self._reader, _as_numpy(self._offsets), _as_numpy(self._numbers))


def _as_numpy(values: array[int]) -> npt.NDArray[np.int64]:
    return np.frombuffer(values, np.int64) if values else np.empty(0, np.int64)


def index_file(path: Path, reader: LineReader[Record]) -> Lines[Record]:
    """Check every line of a file and return all of them. Raises DataError."""
    builder = LinesBuilder(path, reader)
    for offset, number, _ in reader.scan(path):
        builder.add(offset, number)
    return builder.build()


# ---- the tests of a program, as every code layout writes them and a code verifier reads them
#
# A row of a code task has the key ``code_tests``, which reaches the verifier in ``Item.extra``:
#
#     tests = code_tests_of(item.extra)
#
# A program passes if it passes all tests of all kinds:
#
#     stdio   the program is run once per test: ``stdin`` is its input, and its output must be ``stdout``
#     calls   ``function(*args)`` of the program must return ``result``
#     source  Python source of unit tests. It runs in another process than the program, which it can call; arguments and
#             results are plain data (docs/sandbox.md). The program fails if the source raises


KEY = "code_tests"


class StdioTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of the program. How spaces and line ends are compared is the verifier's choice."""

    stdin: str
    stdout: str


class CallTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One call of ``CodeTests.function``. ``args`` and ``result`` are JSON values.

    wrapped  the only entry of the list ``result`` is right, too
    """

    args: list[Any]
    result: Any
    wrapped: bool = False


class CodeTests(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Tests of one task; at least one of ``stdio``, ``calls`` and ``source`` is not empty.

    language         of the program
    function         name that ``calls`` call; ``Class.method`` is called on a new object without arguments
    preamble         source that runs before the program: imports and helpers that the prompt gives
    stub             start of the program that the prompt shows; a completion may continue it
    time_limit_s     time limit of one run or call, None if the data set gives none
    memory_limit_mb  in MiB, None if the data set gives none
    """

    language: str = "python"
    stdio: list[StdioTest] = []
    function: str = ""
    calls: list[CallTest] = []
    source: str = ""
    preamble: str = ""
    stub: str = ""
    time_limit_s: float | None = None
    memory_limit_mb: float | None = None

    def problem(self) -> str | None:
        """Return the problem that the types cannot express, or None."""
        if not (self.stdio or self.calls or self.source.strip()):
            return f"{KEY} has no tests: any program would pass"
        if self.calls and not self.function:
            return f"{KEY}.function is empty, but {KEY}.calls call it"
        for name, limit in (("time_limit_s", self.time_limit_s), ("memory_limit_mb", self.memory_limit_mb)):
            if limit is not None and limit <= 0:
                return f"{KEY}.{name} is {limit:g}: it must be greater than 0"
        return None


def code_tests_of(extra: Mapping[str, Any]) -> CodeTests:
    """Return the tests of a row. Raises DataError if it has none, or wrong ones: that is no verdict on a program."""
    if KEY not in extra:
        raise DataError(f"the row has no key {KEY!r}: it is not a code task (docs/data.md)")
    try:
        tests = msgspec.convert(extra[KEY], CodeTests)
    except MALFORMED as error:
        raise DataError(f"{KEY}: {error}") from None
    if problem := tests.problem():
        raise DataError(problem)
    return tests
