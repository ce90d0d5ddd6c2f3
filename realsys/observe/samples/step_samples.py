"""Texts of samples: a row is cut into turns and spans, its text into the pieces of its tokens; reference answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from realsys.algorithm.advantages import advantages_by_id
from realsys.algorithm.minibatches import sequence_refs
from realsys.config.dataflow import token_level_advantages
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.data.prompts import PromptDataset
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import RealsysError, RecordError
from realsys.observe.samples.filters import SampleRow, SampleView, Turn, TurnKind
from realsys.train import record_files as files
from realsys.train.master.executor import add_scores
from realsys.train.record_files import RowReader, StepRecord
from realsys.train.worker.data_manager import Array
from realsys.types import RowOrigin, SampleMeta

CONTEXT = -1  # instead of a version: the policy did not sample the token
DIGITS = 4  # decimal digits of log-probs and advantages


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens after the prompt that one version sampled in a row; ``version`` None: context, not in the loss."""

    version: int | None
    tokens: int
    text: str


def token_versions(mask: Array, versions: Array) -> Array:
    """Return the version that sampled each token of a row, CONTEXT for a token outside the loss, int64 [T]."""
    found = np.full(len(mask), CONTEXT, np.int64)
    found[mask] = versions
    return found


def version_spans(ids: Sequence[int], versions: Array, tokenizer: TextTokenizer) -> Iterator[VersionSpan]:
    """Cut tokens where their version changes. A character of several tokens goes to the one that completes it.

    ``versions`` [len(ids)]: CONTEXT for a token that is not in the loss.
    """
    if not ids:
        return
    pieces = tokenizer.token_texts(ids)
    starts = [0, *(int(i) + 1 for i in np.flatnonzero(np.diff(versions)))]
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        version = int(versions[start])
        yield VersionSpan(None if version == CONTEXT else version, end - start, "".join(pieces[start:end]))


def token_kinds(mask: Array, masked: int) -> list[TurnKind]:
    """Return the kind of each token of a row.

    ``masked``: number of its tokens that were sampled and left the loss because they were too old. Their place is
    known if the row is one completion: they are its first tokens.
    """
    sampled = np.flatnonzero(mask)
    first = int(sampled[0]) if len(sampled) else len(mask)
    kinds: list[TurnKind] = ["sampled" if own else "context" for own in mask]
    start = first - masked if len(sampled) == len(mask) - first and 0 < masked < first else first
    kinds[start:first] = ["masked"] * (first - start)
    kinds[:start] = ["prompt"] * start
    return kinds


def turns(arrays: Mapping[str, Array], masked: int, tokenizer: TextTokenizer) -> list[Turn]:
    """Return the turns of a row with the text, version, log-prob and advantage of each token."""
    ids, mask = arrays["tokens"].tolist(), arrays["loss_mask"].astype(bool)
    kinds, pieces = token_kinds(mask, masked), tokenizer.token_texts(ids)
    place = np.cumsum(mask) - 1  # index of a token among those with loss_mask
    made: list[Turn] = []
    start = 0
    while start < len(kinds):
        end = next((i for i in range(start, len(kinds)) if kinds[i] != kinds[start]), len(kinds))
        own = place[start:end] if kinds[start] == "sampled" else place[:0]
        made.append(
            Turn(
                kinds[start],
                pieces[start:end],
                _of(arrays.get("versions"), own),
                _of(arrays.get("behav_logprobs"), own),
                _of(arrays.get("advantages"), own),
            )
        )
        start = end
    return made


def _of(array: Array | None, places: Array) -> list[Any]:
    """Return the values of some loss tokens as JSON has them: one number if all are equal, [] without any."""
    if array is None or not len(array) or not len(places):
        return []
    values = array[places]
    values = values[:1] if (values == values[0]).all() else values
    rounded = values if values.dtype.kind == "i" else np.round(values.astype(np.float64), DIGITS)
    return list(rounded.tolist())


# ---- reference answers of the prompts of a trial, from its data set as it is on disk now


class References:
    """Data set of one configuration. It is opened for the first reference, which reads all of its lines once."""

    def __init__(self, config: Config, paths: TrialPaths, tokenizer: TextTokenizer) -> None:
        self._config = config
        self._paths = paths
        self._tokenizer = tokenizer
        self._prompts: PromptDataset | None = None
        self._problem = ""

    def find(self, split: str, index: int) -> tuple[str | None, str]:
        """Return the reference answer, or None and the reason. A data set that cannot be opened is tried once."""
        if self._prompts is None and not self._problem:
            try:
                self._prompts = PromptDataset(self._config, self._paths, self._tokenizer)
            except (RealsysError, OSError) as error:
                self._problem = str(error)
        if self._prompts is None:
            return None, self._problem
        try:
            return self._prompts.prompt(split, index).answer, ""
        except (RealsysError, OSError, LookupError) as error:
            return None, str(error)


# ---- samples of a recorded train step: rewards and advantages from its metadata, tokens row by row from its files


VERDICTS = {True: "correct", False: "wrong", None: "not judged"}


class Sample(msgspec.Struct, frozen=True):
    """One row as it was trained. ``reward``, ``correct`` and ``metrics`` are of its episode; ``advantage`` is the mean
    over its loss tokens if they differ. ``completion``: all that follows the first prompt, with feedback.
    ``reference``: None if it is unknown.
    """

    step: int
    sample_id: str
    ticket_id: str
    attempt: int
    episode: int
    row: int
    prompt_index: int
    seed: int
    granted_version: int
    worker: str
    seconds: float  # duration of its group's rollout
    prompt: str
    completion: str
    spans: list[VersionSpan]
    route: list[tuple[str, int]]  # (server, tokens)
    finish_reason: str
    reward: float
    rewards: list[tuple[int, float]]  # (position in the row, reward) of single tokens
    score: float | None
    correct: bool | None
    metrics: dict[str, float]
    truncated: bool
    staleness: int
    advantage: float | None
    logprob_difference: float | None  # mean |proximal - sampled| per token, nats
    reference: str | None = None


class StepSource:
    """Samples of one recorded step, by row."""

    def __init__(self, paths: TrialPaths, step: int, tokenizer: TextTokenizer, references: References) -> None:
        """Raises RecordError if the step is not recorded, or its record is damaged."""
        directory = files.record_of_step(paths.records, step)
        self.record = files.read_record(directory)
        self.config = files.config_of(directory, self.record)
        self._reader = RowReader(directory, self.record)
        self._tokenizer = tokenizer
        self._references = references
        self._metas = {meta.sample_id: meta for group in self.record.groups for meta in group}
        self._advantages = episode_advantages(self.config, self.record)
        self._rows = [self._row(meta) for meta in self._metas.values()]

    @property
    def title(self) -> str:
        record, config = self.record, self.config
        rows = len(self._metas)
        episodes = sum(len({meta.episode for meta in group}) for group in record.groups)
        several = f" in {rows} rows" if rows != episodes else ""
        return (
            f"{config.experiment}/{config.trial} step {record.step}: version {record.version} trained on "
            f"{len(record.groups)} prompts, {episodes} episodes{several}"
        )

    def rows(self) -> Sequence[SampleRow]:
        return self._rows

    def prompt(self, sample_id: str) -> str:
        tokens, mask = (self._reader.array(sample_id, name) for name in ("tokens", "loss_mask"))
        return self._tokenizer.decode(tokens[: np.argmax(mask) if mask.any() else None].tolist())

    def text(self, sample_id: str) -> str:
        return self._tokenizer.decode(self._reader.array(sample_id, "tokens").tolist())

    def view(self, sample_id: str) -> SampleView:
        meta = self._meta(sample_id)
        arrays = self._reader.arrays(sample_id)
        row = next(row for row in self._rows if row.sample_id == sample_id)
        advantage = self._advantages.get(sample_id)
        if "advantages" not in arrays and advantage is not None:
            arrays["advantages"] = np.full(meta.loss_tokens, advantage)
        sample = self._sample(meta, arrays)
        note = "" if sample.reference is not None else self._reference(meta)[1]
        return SampleView(
            row, turns(arrays, self._masked(meta), self._tokenizer), facts(sample), sample.reference, note
        )

    def sample(self, sample_id: str) -> Sample:
        """Read one row. Raises RecordError."""
        return self._sample(self._meta(sample_id), self._reader.arrays(sample_id))

    def _meta(self, sample_id: str) -> SampleMeta:
        if sample_id not in self._metas:
            raise RecordError(f"step {self.record.step} has no sample {sample_id!r}")
        return self._metas[sample_id]

    def _row(self, meta: SampleMeta) -> SampleRow:
        origin = self._origin(meta)
        return SampleRow(
            sample_id=meta.sample_id,
            group=meta.ticket_id,
            prompt_index=self._reader.origins[meta.ticket_id].ticket.prompt_index,
            reward=meta.reward,
            correct=meta.correct,
            tokens=meta.loss_tokens,
            truncated=meta.truncated,
            finish_reason=origin.finish_reason,
            staleness=self.record.version - meta.version_min,
            advantage=self._advantages.get(meta.sample_id),
        )

    def _origin(self, meta: SampleMeta) -> RowOrigin:
        try:
            return self._reader.origins[meta.ticket_id].episodes[meta.episode][meta.row]
        except (KeyError, IndexError):
            raise RecordError(f"step {self.record.step}: the record has no origin of {meta.sample_id}") from None

    def _masked(self, meta: SampleMeta) -> int:
        """Return how many tokens of a row left the loss because they were too old."""
        return max(0, sum(tokens for _, tokens in self._origin(meta).route) - meta.loss_tokens)

    def _reference(self, meta: SampleMeta) -> tuple[str | None, str]:
        ticket = self._reader.origins[meta.ticket_id].ticket
        return self._references.find(ticket.split, ticket.prompt_index)

    def _sample(self, meta: SampleMeta, arrays: Mapping[str, Array]) -> Sample:
        name, origin, row = meta.sample_id, self._reader.origins[meta.ticket_id], self._origin(meta)
        tokens = arrays["tokens"].tolist()
        versions = token_versions(arrays["loss_mask"].astype(bool), arrays["versions"])
        of_tokens = arrays.get("advantages")
        advantage = self._advantages.get(name) if of_tokens is None else _mean(of_tokens)
        score = self.record.scores.get(name)
        prompt_len = int(np.argmax(versions != CONTEXT)) if meta.loss_tokens else len(tokens)
        return Sample(
            step=self.record.step,
            sample_id=name,
            ticket_id=meta.ticket_id,
            attempt=meta.attempt,
            episode=meta.episode,
            row=meta.row,
            prompt_index=origin.ticket.prompt_index,
            seed=origin.ticket.seed,
            granted_version=origin.ticket.version,
            worker=origin.worker,
            seconds=origin.finished - origin.started,
            prompt=self._tokenizer.decode(tokens[:prompt_len]),
            completion=self._tokenizer.decode(tokens[prompt_len:]),
            spans=list(version_spans(tokens[prompt_len:], versions[prompt_len:], self._tokenizer)),
            route=list(row.route),
            finish_reason=row.finish_reason,
            reward=meta.reward,
            rewards=list(row.rewards),
            score=None if score is None else float(score),
            correct=meta.correct,
            metrics=meta.metrics,
            truncated=meta.truncated,
            staleness=self.record.version - meta.version_min,
            advantage=advantage,
            logprob_difference=_difference(self.config, arrays, advantage),
            reference=self._reference(meta)[0],
        )


def episode_advantages(config: Config, record: StepRecord) -> dict[str, float]:
    """Compute the advantage of every row from the rewards of the batch, as the trainer does.

    Empty if the settings give each token its own advantage.
    """
    if token_level_advantages(config):
        return {}
    refs = sequence_refs(record.groups)
    if record.scores:
        scores = {name: float(score) for name, score in record.scores.items()}
        refs = add_scores(refs, scores, config.train.ppo.reward_model_weight)
    return advantages_by_id(refs, config.train.ppo, config.generation.sampling.max_new_tokens)


def facts(sample: Sample) -> list[tuple[str, str]]:
    """Return the facts of a sample as (name, value), for people."""
    parts = [("episode", f"{sample.episode}, row {sample.row}"), ("finish", sample.finish_reason)]
    parts += [(name, f"{value:g}") for name, value in sample.metrics.items()]
    parts += [(f"reward at {position}", f"{reward:g}") for position, reward in sample.rewards]
    if sample.score is not None:
        parts.append(("score", f"{sample.score:+.3f}"))
    if sample.logprob_difference is not None:
        parts.append(("|prox - behav|", f"{sample.logprob_difference:.2e} nats"))
    parts.append(("servers", " -> ".join(f"{server} ({tokens})" for server, tokens in sample.route) or "unknown"))
    parts.append(("worker", f"{sample.worker}, {sample.seconds:.2f} s"))
    parts.append(("ticket", f"{sample.ticket_id}, attempt {sample.attempt}, granted at v{sample.granted_version}"))
    parts.append(("prompt", f"{sample.prompt_index}, seed {sample.seed}"))
    return parts


def _difference(config: Config, arrays: Mapping[str, Any], advantage: float | None) -> float | None:
    proximal, sampled = arrays.get("prox_logprobs"), arrays["behav_logprobs"]
    if proximal is None or not len(proximal):
        return None
    if config.train.ppo.skip_zero_advantage and advantage == 0.0 and not proximal.any():
        return None  # the trainer skipped the row
    return _mean(np.abs(proximal - sampled))


def _mean(array: Array) -> float | None:
    return float(array.mean(dtype=np.float64)) if len(array) else None
