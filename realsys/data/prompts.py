"""Prompts of a trial, by split and index. Every process that opens them gets the same ones.

``data.eval`` names the held-out problems; rows of ``data.train`` with the same prompt are left out of training. Without
``data.eval`` they are a part of ``data.train``, chosen by a hash of the prompt. The choice depends on nothing else: a
repeated prompt is never in both splits, and a new line moves no other line. Prompts are the same if they differ in
case and spaces only.

The number of a prompt in "train" is what ledger and checkpoints keep. It depends on the files, the weights of a mixture
and the seed alone. Numbers beyond that split are rows that the training script has made (``realsys.data.submitted``).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from realsys.config.dataflow import takes_prompts
from realsys.config.evaluation_sets import evaluation_sets, sources_of_sets
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.schema_data import TRAIN, DataConfig
from realsys.data.lines import LineReader, Lines, LinesBuilder, Problem, PromptText, index_file
from realsys.data.submitted import SubmittedLines
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import DataError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, with its dataset row.

    text    the prompt without chat template
    answer  the reference answer, which a verifier compares with a completion
    ids     token ids for the model
    extra   the other keys of the row, with any JSON values, unchanged
    messages  messages of a chat, as JSON objects; empty if the prompt is a text
    agent   the agent that plays it; "": that of the trial
    """

    text: str
    answer: str
    ids: list[int]
    extra: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    agent: str = ""


class PromptCheck(NamedTuple):
    """Result of reading all prompts.

    unknown  characters that the tokenizer does not know
    marked   first prompt that has marks of the chat template already, as ``place: mark``; "" without one
    left_out the part of the first prompt with tools or a system message that the chat template leaves out, likewise
    digest   of the prompts to train on, in the order of their numbers; equal on any machine
    """

    unknown: list[str]
    digest: str
    marked: str = ""
    left_out: str = ""


class PromptDataset:
    """Splits "train" and "eval". Opening checks every line; ``prompt`` tokenises one prompt."""

    def __init__(self, config: Config, paths: TrialPaths, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._chat = config.data.chat_template
        self._max_tokens = config.data.max_prompt_tokens
        self._splits = open_splits(config, paths)
        self._reader = LineReader(Problem)
        self._by_script = config.data.order == "script"
        self._submitted = SubmittedLines(paths.submitted)

    @property
    def leaked(self) -> int:
        """Number of rows of ``data.train`` that are left out, because they are held-out problems."""
        return self._splits.leaked

    def sizes(self) -> dict[str, int]:
        """Return the number of prompts per split."""
        return self._splits.sizes()

    def size(self, split: str) -> int:
        return len(self._lines(split))

    async def arrival(self, split: str, index: int) -> None:
        """Wait, for a bounded time, until a row of the training script can be read. Raises DataError."""
        if self._by_script and split == TRAIN and index >= (size := self.size(split)):
            await self._submitted.arrival(index - size)

    def prompt(self, split: str, index: int) -> Prompt:
        """Read and tokenise one prompt. DataError names file and line, also if it has too many tokens."""
        lines = self._lines(split)
        if self._by_script and split == TRAIN and index >= len(lines):
            return self._submitted_prompt(index - len(lines))
        return self._made(*lines.read_whole(index), partial(lines.where, index))

    def _submitted_prompt(self, number: int) -> Prompt:
        line = self._submitted.read(number)
        if (index := line.train_index()) is not None:
            return replace(self.prompt(TRAIN, index), agent=line.agent)
        path, row = self._submitted.path, bytes(line.row)
        problem, extra = self._reader.decode(path, number + 1, row), self._reader.decode_extra(path, number + 1, row)
        return replace(self._made(problem, extra, partial(self._submitted.where, number)), agent=line.agent)

    def _made(self, problem: Problem, extra: dict[str, Any], where: Callable[[], str]) -> Prompt:
        ids = self._encode(problem, where)
        self._check_length(ids, where)
        messages = [] if isinstance(problem.prompt, str) else [message.as_object() for message in problem.prompt]
        return Prompt(plain_text(problem.prompt), problem.answer, ids, extra, messages)

    def check(self) -> PromptCheck:
        """Tokenise every prompt of every split once. Raises DataError for the first that cannot be used."""
        characters: set[str] = set()
        ranks = np.unique(self._splits.train.numbers(), return_inverse=True)[1]  # blank lines change no prompt
        digest = hashlib.blake2b(ranks.astype("<i8").tobytes(), digest_size=16)
        splits, marked, left_out = self._splits.values(), "", None
        for name, lines in splits.items():
            for indices, problems in lines.chunks():
                prompts, tools = [problem.prompt for problem in problems], [problem.tools for problem in problems]
                try:
                    encoded = self._tokenizer.encode_prompts(prompts, chat=self._chat, tools=tools)
                except DataError:
                    # The batch does not tell which prompt failed; one by one, the error names the line.
                    encoded = [self._encode(p, partial(lines.where, i)) for i, p in zip(indices, problems, strict=True)]
                for i, ids in zip(indices, encoded, strict=True):
                    self._check_length(ids, partial(lines.where, i))
                characters.update(*(plain_text(problem.prompt) for problem in problems))
                if self._chat and not marked:
                    marked = self._first_mark(lines, indices, problems)
                if self._chat and left_out is None:
                    left_out = self._left_out(lines, indices, problems)
                if name == "train":
                    digest.update(msgspec.json.encode([problem.prompt for problem in problems]))
        return PromptCheck(self._tokenizer.unknown(characters), digest.hexdigest(), marked, left_out or "")

    def _left_out(self, lines: Lines[Problem], indices: range, problems: list[Problem]) -> str | None:
        """Look at the first prompt that has tools or a system message; None without one."""
        for i, problem in zip(indices, problems, strict=True):
            if (part := self._tokenizer.left_out(problem.prompt, problem.tools)) is not None:
                return part and f"{lines.where(i)}: {part}"
        return None

    def _first_mark(self, lines: Lines[Problem], indices: range, problems: list[Problem]) -> str:
        for i, problem in zip(indices, problems, strict=True):
            if mark := self._tokenizer.template_mark(problem.prompt):
                return f"{lines.where(i)}: {mark}"
        return ""

    def _encode(self, problem: Problem, where: Callable[[], str]) -> list[int]:
        try:
            return self._tokenizer.encode_prompt(problem.prompt, chat=self._chat, tools=problem.tools)
        except DataError as error:
            raise DataError(f"{where()}: {error}") from None

    def _check_length(self, ids: list[int], where: Callable[[], str]) -> None:
        if len(ids) > self._max_tokens:
            problem = f"the prompt has {len(ids)} tokens, but data.max_prompt_tokens is {self._max_tokens}"
            raise DataError(f"{where()}: {problem}: increase it, or set data.long_prompts=drop")
        if not ids:
            raise DataError(f"{where()}: the prompt has no tokens: remove the line")

    def _lines(self, split: str) -> Lines[Problem]:
        splits = self._splits.values() | {"train": self._splits.train}  # the rows of a mixture repeat
        if split not in splits:
            raise DataError(f"split {split!r} not found: use one of {', '.join(splits)}")
        return splits[split]


# ---- splits: which problems are held out


@dataclass(frozen=True, slots=True)
class Splits:
    """Records of all splits, in the order of their numbers.

    leaked  rows of train that are held-out problems, or problems of a set
    sets    name of an evaluation set with data of its own -> its problems
    """

    train: Lines[Problem]
    eval: Lines[Problem]
    leaked: int = 0
    sets: dict[str, Lines[Problem]] = field(default_factory=dict)

    def values(self) -> dict[str, Lines[Problem]]:
        """Return the records by split, each record once, train first."""
        return {"train": self.train.once(), "eval": self.eval, **self.sets}

    def sizes(self) -> dict[str, int]:
        return {name: len(lines) for name, lines in self.values().items()} | {"train": len(self.train)}


def split_sizes(config: Config, paths: TrialPaths) -> dict[str, int]:
    """Count the prompts per split, without a tokenizer. Raises DataError."""
    return open_splits(config, paths).sizes()


def held_out_size(config: Config, paths: TrialPaths) -> int:
    """Count the held-out problems, before the trial has copies of its evaluation sets. Raises DataError."""
    return len(open_splits(config, paths, sets=False).eval)


def open_splits(config: Config, paths: TrialPaths, *, sets: bool = True) -> Splits:
    """Open all splits. Raises DataError for a bad line, or for a needed split that is empty."""
    files = dataset_files(config, paths)
    reader = LineReader(Problem)
    names = sources_of_sets(config) if sets else ()
    of_sets = {name: index_file(set_file(paths, name), reader) for name in names}
    keys = {
        prompt_key(problem.prompt) for lines in of_sets.values() for _, chunk in lines.chunks() for problem in chunk
    }
    if files.train is None:
        nothing = LinesBuilder(files.eval or Path(), reader).build()
        splits = Splits(nothing, index_file(files.eval, reader) if files.eval else nothing)
    elif files.eval is not None:
        splits = _keep_out(files.train, files.eval, reader, keys)
    else:
        builders = {"train": LinesBuilder(files.train, reader), "eval": LinesBuilder(files.train, reader)}
        leaked = 0
        for offset, number, problem in reader.scan(files.train):
            side = side_of(problem.prompt, config.data.eval_fraction)
            if side == "train" and keys and prompt_key(problem.prompt) in keys:
                leaked += 1
            else:
                builders[side].add(offset, number)
        splits = Splits(builders["train"].build(), builders["eval"].build(), leaked)
    splits = replace(splits, sets=of_sets)
    _check_sizes(splits, files, config)
    if files.train is not None and is_converted(paths):
        splits = replace(splits, train=_mixed(splits.train, _sources_file(paths).train, config.seed))
    return splits


def _keep_out(train: Path, held_out: Path, reader: LineReader[Problem], of_sets: Collection[int]) -> Splits:
    """Leave rows of ``train`` out whose prompt is in ``held_out`` or, by its key, in ``of_sets``."""
    kept, problems = LinesBuilder(train, reader), LinesBuilder(held_out, reader)
    keys = set(of_sets)
    for offset, number, problem in reader.scan(held_out):
        problems.add(offset, number)
        keys.add(prompt_key(problem.prompt))
    rows = 0
    for offset, number, problem in reader.scan(train):
        rows += 1
        if prompt_key(problem.prompt) not in keys:
            kept.add(offset, number)
    lines = kept.build()
    return Splits(lines, problems.build(), rows - len(lines))


def _mixed(train: Lines[Problem], sources: Sequence[ConvertedSource], seed: int) -> Lines[Problem]:
    """Return the rows of one epoch of the mixture, which is ``train`` itself for one source."""
    if len(sources) == 1:
        return train
    ends = np.cumsum([source.rows for source in sources])
    owners = np.searchsorted(ends, train.numbers())  # line 1 is in the first source, whose end is its number of rows
    parts = [np.flatnonzero(owners == number) for number in range(len(sources))]
    return train.chosen(epoch_of_mixture(parts, [source.weight for source in sources], seed))


def side_of(prompt: PromptText, fraction: float) -> Literal["train", "eval"]:
    """Return the side of a prompt if ``fraction`` of the prompts is held out."""
    return "eval" if prompt_key(prompt) / 2**64 < fraction else "train"


def prompt_key(prompt: PromptText) -> int:
    """Hash a prompt to 64 bits, equal on any machine, and for prompts that differ in case and spaces only."""
    text = " ".join(plain_text(prompt).casefold().split())
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _check_sizes(splits: Splits, files: DatasetFiles, config: Config) -> None:
    if not len(splits.train) and takes_prompts(config):
        where = "data.eval or in a set of evaluations" if splits.sets else "data.eval"
        problem = f"every prompt is in {where}, too" if splits.leaked else "no prompts to train on"
        raise DataError(f"{files.train}: {problem}: add lines")
    if len(splits.eval) or not any(made.source is None for made in evaluation_sets(config).values()):
        return
    if files.eval is not None or config.evaluate_only:
        source = files.eval or files.train
        raise DataError(f"{source}: no problems to evaluate on: add lines, or set evaluation.problems=0")
    total, fraction = len(splits.train), config.data.eval_fraction
    remedy = "increase data.eval_fraction, set data.eval, or set evaluation.problems=0"
    raise DataError(f"{files.train}: data.eval_fraction={fraction} holds out none of {total} prompts: {remedy}")


def plain_text(prompt: PromptText) -> str:
    """Return the text of a prompt, for a verifier."""
    return prompt if isinstance(prompt, str) else "\n".join(message.content or "" for message in prompt)


# ---- one epoch of a mixture: which rows of which source, and how often
#
#     source   rows  weight      copies in an epoch
#     a         100    1      -> 100 x 1                 the source with the most rows per weight occurs once
#     b          30    1      -> 30 x 3 + 10             the others are repeated; 10 are chosen by the seed
#
# The shares are those of the weights, to one row. An epoch has every row at least once, so no prompt is never trained.
# The order of an epoch is not decided here: the ledger shuffles the positions of a mixture like those of any other
# data (``realsys.manager.ledger.prompt_order``). The result depends on rows, weights and seed alone, so a cursor into
# it stays valid.

MAX_EPOCH = 20_000_000  # positions; each takes 16 bytes in every process that reads prompts


def epoch_of_mixture(
    sources: Sequence[npt.NDArray[np.int64]], weights: Sequence[float], seed: int
) -> npt.NDArray[np.int64]:
    """Return the indices of one epoch, source by source. ``sources``: the indices of each source's rows."""
    shares = copies_in_epoch([len(indices) for indices in sources], weights)
    parts = []
    for number, (indices, share) in enumerate(zip(sources, shares, strict=True)):
        repeats, rest = divmod(share, len(indices))
        order = np.random.Generator(np.random.PCG64([seed, number])).permutation(len(indices))
        parts += [indices] * repeats + [indices[np.sort(order[:rest])]]
    return np.concatenate(parts)


def copies_in_epoch(rows: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return the number of positions of each source in an epoch. Raises DataError if an epoch would be too long."""
    if not all(rows):
        raise DataError("data.mixture: a source has no rows to train on: remove it")
    scale = max(count / weight for count, weight in zip(rows, weights, strict=True))
    shares = [max(count, round(scale * weight)) for count, weight in zip(rows, weights, strict=True)]
    if sum(shares) > MAX_EPOCH:
        largest = max(range(len(rows)), key=lambda i: rows[i] / weights[i])
        problem = (
            f"an epoch would have {sum(shares):,} prompts, because each of the {rows[largest]:,} rows of source "
            f"{largest + 1} with weight {weights[largest]:g} occurs in it: increase that weight, or cut the source"
        )
        raise DataError(f"data.mixture: {problem}")
    return shares


# ---- dataset files -----------------------------------------------------------------------------------------------
#
# Dataset files that a trial reads: their paths, the writing of its own ones, and the record of how these were made.


@dataclass(frozen=True, slots=True)
class DatasetFiles:
    """Dataset files. One of ``train`` and ``eval`` is given, unless the run is supervised and evaluates nothing.

    train  None: an evaluation reads held-out problems alone, a supervised run no prompts to train on
    eval   None: a fraction of ``train`` is held out
    demos  None: no demonstrations
    """

    train: Path | None
    eval: Path | None
    demos: Path | None


def dataset_files(config: Config, paths: TrialPaths) -> DatasetFiles:
    """Return the files of this trial: the user's, or those that the launcher made in the trial folder.

    Made are the arith task, and copies of sources that cannot be read in their place.
    """
    data = config.data
    own = {name: paths.data / f"{name}.jsonl" for name in ("train", "eval", "demos")}
    if data.kind == "arith":
        return DatasetFiles(**own)
    train, held_out, demos = (Path(name) if name else None for name in (data.train, data.eval, data.demos))
    demos = paths.demos if copies_demos(data) else demos
    if is_converted(paths):
        return DatasetFiles(own["train"] if train or data.mixture else None, own["eval"] if held_out else None, demos)
    return DatasetFiles(train, held_out, demos)


def copies_demos(data: DataConfig) -> bool:
    """Return True if the trial has a copy of ``data.demos``; a file of lines is read in its place."""
    path = Path(data.demos)
    is_table = path.suffix.lower() in (".json", ".parquet", ".arrow") or not path.is_file()
    return data.kind != "arith" and bool(data.demos) and is_table


def set_file(paths: TrialPaths, name: str) -> Path:
    """Return the trial's own copy of an evaluation set's data."""
    return paths.data / "evaluation" / f"{name}.jsonl"


def is_converted(paths: TrialPaths) -> bool:
    """Return True if the trial has its own copy of the data."""
    return paths.data_sources.is_file()


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file that appears with all of its content or not at all, also after a crash."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp makes the file private, but workers of other users may read it
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)  # it is there only if a line above failed


# ---- sources.json says how the trial's own data was made; its presence means that the copy is complete


class ConvertedSource(msgspec.Struct, frozen=True):
    """Entry of sources.json: ``rows`` of train.jsonl are from this source, ``dropped`` were too long."""

    name: str
    weight: float
    rows: int
    dropped: int


class SourcesFile(msgspec.Struct, frozen=True):
    """Content of sources.json, in the order of the lines."""

    train: list[ConvertedSource]
    eval: list[ConvertedSource]


def dropped_lines(paths: TrialPaths) -> list[str]:
    """Return a line for each source whose long prompts were left out. Raises DataError."""
    sources = _sources_file(paths)
    return [
        f"left out {source.dropped} of {source.rows + source.dropped} rows of {source.name}: "
        "they have more than data.max_prompt_tokens"
        for source in (*sources.train, *sources.eval)
        if source.dropped
    ]


def _sources_file(paths: TrialPaths) -> SourcesFile:
    try:
        return msgspec.json.decode(paths.data_sources.read_bytes(), type=SourcesFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(f"{paths.data_sources}: cannot be read: {error}") from None
