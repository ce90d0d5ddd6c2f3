"""`realsys samples`: shows the samples of a train step, with the version of every token, rewards and advantages."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.text import Text

from realsys.algorithm.advantages import advantages_by_id
from realsys.buffer.minibatches import sequence_refs
from realsys.config.allocation import ACTOR
from realsys.config.dataflow import token_level_advantages
from realsys.config.dump import read_config
from realsys.config.paths import TrialPaths
from realsys.config.roles import role_settings
from realsys.config.schema import Config
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import ConfigError, RecordError
from realsys.launch.commands.replay import last_recorded
from realsys.launch.screen.evaluation_samples import printable
from realsys.master.calls.executor import add_scores
from realsys.train.data_manager import Array
from realsys.train.records import record_files as files
from realsys.train.records.record_files import Arrays, StepRecord
from realsys.types import GroupOrigin, SampleMeta

_SHOWN = 4  # prompts without --limit
CONTEXT = -1  # instead of a version: the policy did not sample the token
_VERDICTS = {True: "correct", False: "wrong", None: "not judged"}
_COLOURS = {True: "green", False: "red", None: "default"}
_STYLES = ("cyan", "yellow", "magenta", "green", "blue")  # versions take them in turn


class Span(msgspec.Struct, frozen=True):
    """Tokens after the prompt that one version sampled in a row; ``version`` None: context, not in the loss."""

    version: int | None
    tokens: int
    text: str


class Sample(msgspec.Struct, frozen=True):
    """One row as it was trained. ``reward``, ``correct`` and ``metrics`` are of its episode; ``advantage`` is the mean
    over its loss tokens if they differ. ``answer``: everything after the first prompt, with feedback.
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
    answer: str
    spans: list[Span]
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


def show_samples(trial_dir: Path, step: int | None, ticket: str | None, limit: int | None, as_json: bool) -> int:
    """Print a recorded step, the last one by default. Raises RealsysError for bad input and a damaged record."""
    if limit is not None and limit < 0:
        raise ConfigError("--limit", limit, "must be 0 (all) or more")
    paths = TrialPaths(trial_dir.resolve())
    read_config(paths.config)  # refuses a folder that is not a trial
    directory = files.record_of_step(paths.records, last_recorded(paths) if step is None else step)
    record = files.read_record(directory)
    config = files.config_of(directory, record)
    arrays, origins = files.read_arrays(directory, record)
    tokenizer = TextTokenizer(role_settings(config, ACTOR).model_dir(paths))
    groups = wanted(record, ticket)
    shown = groups[: limit or None] if limit is not None or as_json else groups[:_SHOWN]
    found = samples(config, record, arrays, origins, tokenizer)
    if as_json:
        lines = (msgspec.json.encode(found[meta.sample_id]).decode() for group in shown for meta in group)
        try:
            sys.stdout.write("".join(f"{line}\n" for line in lines))
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has ended, as in `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    console = Console()
    console.print(_headline(config, record), highlight=False, soft_wrap=True)
    for group in shown:
        for text in group_lines([found[meta.sample_id] for meta in group]):
            console.print(text, highlight=False, soft_wrap=True)
    if len(shown) < len(groups):
        console.print(f"\n{len(groups) - len(shown)} more prompts: --limit 0 shows all", style="dim", highlight=False)
    return 0


def wanted(record: StepRecord, ticket: str | None) -> list[list[SampleMeta]]:
    """Return the groups of the step, or the one of ``ticket``. Raises RecordError naming some tickets of the step."""
    if ticket is None:
        return record.groups
    groups = [group for group in record.groups if group[0].ticket_id == ticket]
    if not groups:
        ids = [group[0].ticket_id for group in record.groups]
        more = f" and {len(ids) - 5} more" if len(ids) > 5 else ""
        raise RecordError(f"step {record.step} has not trained ticket {ticket!r}: it has {', '.join(ids[:5])}{more}")
    return groups


def samples(
    config: Config, record: StepRecord, arrays: Arrays, origins: Sequence[GroupOrigin], tokenizer: TextTokenizer
) -> dict[str, Sample]:
    """Return sample id -> Sample for every row of the step."""
    by_ticket = {origin.ticket.ticket_id: origin for origin in origins}
    advantages = episode_advantages(config, record)
    return {
        meta.sample_id: _sample(config, record, meta, by_ticket[meta.ticket_id], arrays, advantages, tokenizer)
        for group in record.groups
        for meta in group
    }


def episode_advantages(config: Config, record: StepRecord) -> dict[str, float]:
    """Compute the advantage of every row from the rewards of the batch, as the trainer does.

    Empty if the settings give each token its own advantage.
    """
    if token_level_advantages(config):
        return {}
    refs = sequence_refs(record.groups)
    if record.scores:
        scores = {name: float(score) for name, score in record.scores.items()}
        refs = add_scores(refs, scores, config.train.ppo.reward_model.weight)
    return advantages_by_id(refs, config.train.ppo, config.generation.sampling.max_new_tokens)


def _sample(
    config: Config,
    record: StepRecord,
    meta: SampleMeta,
    origin: GroupOrigin,
    arrays: Arrays,
    of_episodes: dict[str, float],
    tokenizer: TextTokenizer,
) -> Sample:
    name, ticket, row = meta.sample_id, origin.ticket, origin.episodes[meta.episode][meta.row]
    tokens = [int(token) for token in arrays[name, "tokens"]]
    versions = token_versions(arrays[name, "loss_mask"], arrays[name, "versions"])
    of_tokens = arrays.get((name, "advantages"))
    advantage = of_episodes.get(name) if of_tokens is None else _mean(of_tokens)
    score = record.scores.get(name)
    prompt_len = int(np.argmax(versions != CONTEXT)) if meta.loss_tokens else len(tokens)
    return Sample(
        step=record.step,
        sample_id=name,
        ticket_id=meta.ticket_id,
        attempt=meta.attempt,
        episode=meta.episode,
        row=meta.row,
        prompt_index=ticket.prompt_index,
        seed=ticket.seed,
        granted_version=ticket.version,
        worker=origin.worker,
        seconds=origin.finished - origin.started,
        prompt=tokenizer.decode(tokens[:prompt_len]),
        answer=tokenizer.decode(tokens[prompt_len:]),
        spans=list(version_spans(tokens[prompt_len:], versions[prompt_len:], tokenizer)),
        route=list(row.route),
        finish_reason=row.finish_reason,
        reward=meta.reward,
        rewards=list(row.rewards),
        score=None if score is None else float(score),
        correct=meta.correct,
        metrics=meta.metrics,
        truncated=meta.truncated,
        staleness=record.version - meta.version_min,
        advantage=advantage,
        logprob_difference=_difference(config, arrays, name, advantage),
    )


def token_versions(mask: Array, versions: Array) -> Array:
    """Return the version that sampled each token of a row, CONTEXT for a token outside the loss, int64 [T]."""
    found = np.full(len(mask), CONTEXT, np.int64)
    found[mask] = versions
    return found


def version_spans(ids: Sequence[int], versions: Array, tokenizer: TextTokenizer) -> Iterator[Span]:
    """Cut tokens where their version changes. A character of several tokens goes to the one that completes it.

    ``versions`` [len(ids)]: CONTEXT for a token that is not in the loss.
    """
    if not ids:
        return
    starts = [0, *(int(i) + 1 for i in np.flatnonzero(np.diff(versions)))]
    before = ""
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        text = tokenizer.decode(ids[:end])
        own = text[len(before) :] if text.startswith(before) else tokenizer.decode(ids[start:end])
        version = int(versions[start])
        yield Span(None if version == CONTEXT else version, end - start, own)
        before = text


def _difference(config: Config, arrays: Arrays, name: str, advantage: float | None) -> float | None:
    proximal, sampled = arrays.get((name, "prox_logprobs")), arrays[name, "behav_logprobs"]
    if proximal is None or not len(proximal):
        return None
    if config.train.ppo.skip_zero_advantage and advantage == 0.0 and not proximal.any():
        return None  # the trainer skipped the row
    return _mean(np.abs(proximal - sampled))


def _mean(array: Array) -> float | None:
    return float(array.mean(dtype=np.float64)) if len(array) else None


# ---- on the terminal


def _headline(config: Config, record: StepRecord) -> str:
    rows = sum(len(group) for group in record.groups)
    episodes = sum(len({meta.episode for meta in group}) for group in record.groups)
    several = f" in {rows} rows" if rows != episodes else ""
    return (
        f"{config.experiment}/{config.trial} step {record.step}: version {record.version} trained on "
        f"{len(record.groups)} prompts, {episodes} episodes{several}"
    )


def group_lines(group: Sequence[Sample]) -> Iterator[Text]:
    """Yield the lines for a prompt and its episodes."""
    first = group[0]
    yield Text()
    yield Text(
        f"ticket {first.ticket_id} attempt {first.attempt}: prompt {first.prompt_index}, seed {first.seed}, granted at "
        f"v{first.granted_version}, {first.worker}, {first.seconds:.2f} s",
        style="bold",
    )
    yield Text("prompt  ").append(printable(first.prompt))
    for sample in group:
        if sample.prompt != first.prompt:  # a row that begins with another history
            yield Text("  from  ").append(printable(sample.prompt), style="dim")
        yield _facts(sample)
        yield _answer(sample)


def _facts(sample: Sample) -> Text:
    parts = [f"reward {sample.reward:g}", _VERDICTS[sample.correct], sample.finish_reason]
    parts += [f"{name} {value:g}" for name, value in sample.metrics.items()]
    parts += [f"reward {reward:g} at {position}" for position, reward in sample.rewards]
    if sample.score is not None:
        parts.append(f"score {sample.score:+.3f}")
    parts.append(f"staleness {sample.staleness}")
    parts.append(f"advantage {_signed(sample.advantage)}")
    if sample.logprob_difference is not None:
        parts.append(f"|prox - behav| {sample.logprob_difference:.2e}")
    parts.append(" -> ".join(f"{server} ({tokens})" for server, tokens in sample.route) or "no server known")
    label = f"  {sample.sample_id.rpartition('/')[2]:>4}  "
    return Text(label).append(", ".join(parts), style=_COLOURS[sample.correct])


def _answer(sample: Sample) -> Text:
    text = Text(" " * 8)
    for span in sample.spans:
        if span.version is None:
            text.append("[context]", style="dim").append(printable(span.text), style="dim")
            continue
        style = _STYLES[span.version % len(_STYLES)]
        text.append(f"[v{span.version}]", style=f"dim {style}").append(printable(span.text), style=style)
    return text


def _signed(value: Any) -> str:
    return "unknown" if value is None else f"{value:+.4f}"
