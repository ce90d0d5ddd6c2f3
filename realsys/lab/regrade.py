"""Judge the recorded samples of a trial again, and report how often the verdict differs.

    record of a step ──> completions ──chunks──> environment and verifier of the trial ──> Disagreement
                                                       └─ or another verifier: --verifier

It reads the trial and never changes it, so the trial may be running.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from realsys.config.compose import with_overrides
from realsys.config.doors import AGENT, ENVIRONMENT, has_steps
from realsys.config.paths import read_config
from realsys.config.rules import check_verifiers
from realsys.config.schema import Config
from realsys.data.prompts import Prompt, PromptDataset
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import AgentError, ConfigError, DataError, RecordError, RewardError
from realsys.launch.commands.options import add_trial, find_trial
from realsys.launch.commands.replay import last_recorded
from realsys.launch.commands.samples import printable
from realsys.observe.evaluation_records import Tally, pooled
from realsys.observe.screen.terminal import WorkLine
from realsys.reward.open_verifiers import own_verifiers
from realsys.reward.rubric import read_rubric
from realsys.rollout import environments
from realsys.rollout.environments import Environment, Judgement, Response, Task
from realsys.rollout.group_player import explain
from realsys.train import record_files as files
from realsys.train.record_files import Arrays
from realsys.train.worker.data_manager import Array
from realsys.types import GroupOrigin, SampleMeta

CHUNK = 128  # completions that are judged together
_CAUSE = "environment"  # cause of an error that an environment raised
#: settings that decide a verdict, and sections of them
_CHANGEABLE = ("data.verifier_args", "rollout.environment", "rollout.environment_args", "rollout.reward")


def add_arguments(parser: ArgumentParser) -> None:
    add_trial(parser)
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="rollout.reward.FIELD=VALUE, rollout.environment=NAME, ..."
    )
    parser.add_argument("--verifier", metavar="NAME", help="name or package.module:function (default: the trial's)")
    parser.add_argument("--args", metavar="{...}", help="keyword arguments of the verifier, as data.verifier_args")
    parser.add_argument("--step", type=int, metavar="N", help="default: all recorded steps")
    parser.add_argument("--show", type=int, metavar="N", default=0, help="print the first N that disagree (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")


def run(args: Namespace) -> int:
    """Judge the recorded completions again and print the disagreements. Returns 0.

    Raises RealsysError for bad input, a damaged record, and a verifier that cannot judge anything.
    """
    if args.show < 0:
        raise ConfigError("--show", args.show, "must be 0 or more")
    paths = find_trial(args.trial_dir)
    recorded = read_config(paths.config)
    config = regrade_config(recorded, args.verifier, args.args, args.overrides)
    last_recorded(paths)  # refuses a trial without records
    steps = files.recorded_steps(paths.records)
    if args.step is not None:
        steps = {args.step: files.record_of_step(paths.records, args.step)}
    tokenizer = TextTokenizer(paths.base_model(config))
    reader = RecordedCompletions(recorded, tokenizer, PromptDataset(config, paths, tokenizer))
    counts = Disagreement(keep=args.show)
    asyncio.run(_judge_steps(config, tokenizer, reader, steps, counts))
    results = {"trial": str(paths.root), "verifier": config.data.verifier, "steps": sorted(steps), **counts.results()}
    for line in (*_headline(recorded, config, steps), *report(counts), *_notes(recorded)):
        print(line)
    for different in counts.shown:
        print("\n".join(_shown(different)))
    if args.json is not None:
        samples = [_plain(different) for different in counts.shown]
        args.json.write_text(json.dumps({**results, "shown": samples}, indent=2) + "\n", encoding="utf-8")
    return 0


def regrade_config(
    config: Config, verifier: str | None = None, arguments: str | None = None, changes: Sequence[str] = ()
) -> Config:
    """Return the trial's settings with the verifier to judge with, by default its own. Raises ConfigError."""
    overrides = list(changes)
    for text in overrides:
        name, _, value = text.partition("=")
        if not any(f"{name}.".startswith(f"{field}.") for field in _CHANGEABLE):
            problem = f"does not decide a verdict: use --verifier, or set a field of {', '.join(_CHANGEABLE)}"
            raise ConfigError(name, value, problem)
    verifier = verifier or config.data.verifier
    if arguments is not None:
        overrides.append(f"data.verifier_args={arguments}")
    if arguments is not None or verifier != config.data.verifier:
        own = config.data.model_copy(update={"verifier": verifier, "verifier_args": {}})
        config = config.model_copy(update={"data": own})
    # Only the verifier that judges is checked and started; those of the evaluation's sets may need what is not here.
    evaluation = config.evaluation.model_copy(update={"sets": {}})
    config = with_overrides(config.model_copy(update={"evaluation": evaluation}), overrides)
    config = read_rubric(config)
    check_verifiers(config)
    ENVIRONMENT.check(config.rollout.environment, config.rollout.environment_args)
    if has_steps(ENVIRONMENT.load(config.rollout.environment)):
        problem = "plays steps (reset, step, close): only an environment with judge can judge recorded completions"
        raise ConfigError("rollout.environment", config.rollout.environment, problem)
    return config


async def _judge_steps(
    config: Config, tokenizer: TextTokenizer, reader: RecordedCompletions, steps: dict[int, Path], counts: Disagreement
) -> None:
    verifiers, line = own_verifiers(config), WorkLine("regrade")
    try:
        environment = environments.build(config, tokenizer, verifiers)
        places = {step: place for place, step in enumerate(steps)}
        for step, chunk in _chunks(reader, steps):
            seen = f"{counts.samples:,} samples judged, {counts.different:,} differ; now step {step}"
            line.show(places[step], len(steps), f"{seen}, {places[step]} of {len(steps)} steps done")
            await judge_chunk(environment, chunk, counts)
    finally:
        line.clear()
        await verifiers.close()


def _chunks(
    reader: RecordedCompletions, steps: dict[int, Path]
) -> Iterator[tuple[int, list[RecordedCompletion | LeftOut]]]:
    """Yield (step, samples), a few samples at a time."""
    for step, directory in steps.items():
        samples = reader.read(step, directory)
        while chunk := list(itertools.islice(samples, CHUNK)):
            yield step, chunk


async def judge_chunk(
    environment: Environment, chunk: Sequence[RecordedCompletion | LeftOut], counts: Disagreement
) -> None:
    """Judge samples together and count them in order. Raises what no other sample would escape."""
    samples = [sample for sample in chunk if isinstance(sample, RecordedCompletion)]
    for sample in chunk:
        if isinstance(sample, LeftOut):
            counts.leave_out(sample)
    judged = await asyncio.gather(*(environment.judge(s.task, s.response) for s in samples), return_exceptions=True)
    for sample, now in zip(samples, judged, strict=True):
        if not isinstance(now, BaseException):
            counts.add(sample, now)
            continue
        error = explain(now)
        if isinstance(error, AgentError):
            error = RewardError(str(error), _CAUSE)
        if not isinstance(error, RewardError):
            raise error
        counts.fail(error)


# ---- on the terminal


def _headline(recorded: Config, config: Config, steps: Iterable[int]) -> Iterator[str]:
    own = " (its own)" if config.data == recorded.data else f"; trained with {recorded.data.verifier}"
    yield f"{recorded.experiment}/{recorded.trial}: verifier {config.data.verifier}{own}, steps {files.ranges(steps)}"


def report(counts: Disagreement) -> Iterator[str]:
    """Yield the lines of the report."""
    results = counts.results()
    yield f"samples     {counts.samples:,} on record, {counts.judged:,} judged again"
    if counts.judged:
        low, high = results["rate_interval_95"]
        rate = f"{results['rate']:.2%} (95 % interval {low:.2%} to {high:.2%})"
        yield f"disagree    {counts.different:,}: {rate}"
    for flip, count in counts.flips.most_common():
        yield f"            {count:,} {flip}"
    for name, spec in (("reward_mean", "+.4f"), ("accuracy", ".2%")):
        if means := results[name]:
            yield f"{name.partition('_')[0]:11} {means['recorded']:{spec}} on record, {means['now']:{spec}} now"
    for cause, count in counts.errors.most_common():
        yield f"no verdict  {count:,} {cause}: {printable(counts.first_errors[cause])}"
    for reason, count in counts.left_out.most_common():
        yield f"left out    {count:,}: {counts.first_left_out[reason]}: {printable(reason)}"


def _notes(recorded: Config) -> Iterator[str]:
    """Yield what a reader must know about the record."""
    yield f"on record   whole completions of the trained groups, newest {recorded.record.keep_steps} steps or more"
    yield "            (record.keep_steps); groups that were dropped and episodes without a verdict are not on record"
    if recorded.rollout.agent != "single_turn":
        yield f"            agent {recorded.rollout.agent}: the last completion of each episode is judged"


def _shown(different: Different) -> Iterator[str]:
    sample, now = different.recorded, different.now
    yield ""
    yield f"step {sample.step}, sample {sample.sample_id}: reward {sample.reward:g}, {verdict_name(sample.correct)}" + (
        f" -> reward {now.reward:g}, {verdict_name(now.correct)}"
    )
    yield f"prompt  {printable(sample.task.prompt.text)}"
    yield f"answer  {printable(sample.task.prompt.answer)}"
    yield f"        {printable(sample.response.text)}"


def _plain(different: Different) -> dict[str, Any]:
    sample, now = different.recorded, different.now
    return {
        "step": sample.step,
        "sample_id": sample.sample_id,
        "prompt": sample.task.prompt.text,
        "answer": sample.task.prompt.answer,
        "completion": sample.response.text,
        "recorded": {"reward": sample.reward, "correct": sample.correct},
        "now": {"reward": now.reward, "correct": now.correct, "metrics": now.metrics},
    }


# ---- disagreement
#
# Disagreement: counts of new judgements against the recorded rewards. Pure. Its size depends on the prompts only.


TOLERANCE = 1e-6  # rewards that differ by less are equal
_VERDICTS = {True: "right", False: "wrong", None: "not judged"}


@dataclass(frozen=True, slots=True)
class Different:
    """A sample whose new judgement is not the recorded one."""

    recorded: RecordedCompletion
    now: Judgement


@dataclass(slots=True)
class Disagreement:
    """Counts of the samples so far. ``shown``: the first ``keep`` that disagree."""

    keep: int = 0
    judged: int = 0
    flips: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)  # cause -> samples without a new verdict
    first_errors: dict[str, str] = field(default_factory=dict)  # cause -> message
    left_out: Counter[str] = field(default_factory=Counter)  # reason -> samples, or steps
    first_left_out: dict[str, str] = field(default_factory=dict)  # reason -> sample or step
    shown: list[Different] = field(default_factory=list)
    _by_prompt: dict[tuple[str, int], Tally] = field(default_factory=dict)  # prompt -> samples judged, different
    _reward: tuple[float, float] = (0.0, 0.0)  # sums: recorded, now
    _right: tuple[int, int] = (0, 0)
    _known: int = 0  # samples that are right or wrong in both

    @property
    def samples(self) -> int:
        return self.judged + sum(self.errors.values())

    @property
    def different(self) -> int:
        return sum(self.flips.values())

    def add(self, recorded: RecordedCompletion, now: Judgement) -> None:
        """Count a sample with a new judgement."""
        self.judged += 1
        self._reward = self._reward[0] + recorded.reward, self._reward[1] + now.reward
        if recorded.correct is not None and now.correct is not None:
            self._known += 1
            self._right = self._right[0] + recorded.correct, self._right[1] + now.correct
        flip = _flip(recorded, now)
        ticket = recorded.task.ticket
        before = self._by_prompt.get((ticket.split, ticket.prompt_index), Tally(0, 0))
        self._by_prompt[ticket.split, ticket.prompt_index] = Tally(before.judged + 1, before.right + bool(flip))
        if flip:
            self.flips[flip] += 1
            if len(self.shown) < self.keep:
                self.shown.append(Different(recorded, now))

    def fail(self, error: RewardError) -> None:
        """Count a sample without a new verdict."""
        self.errors[error.cause] += 1
        self.first_errors.setdefault(error.cause, str(error))

    def leave_out(self, sample: LeftOut) -> None:
        """Count a sample that cannot be judged."""
        self.left_out[sample.reason] += 1
        self.first_left_out.setdefault(sample.reason, sample.what)

    def results(self) -> dict[str, Any]:
        """Return all counts as plain values; a mean or rate that was not measured is None."""
        rate = pooled(self._by_prompt.values())
        return {
            "samples": self.samples,
            "judged": self.judged,
            "disagreements": self.different,
            "rate": rate.value if rate else None,
            "rate_interval_95": [rate.low, rate.high] if rate else None,
            "flips": dict(self.flips.most_common()),
            "errors": dict(self.errors.most_common()),
            "left_out": dict(self.left_out.most_common()),
            "reward_mean": _pair(self._reward, self.judged),
            "accuracy": _pair(self._right, self._known),
        }


def _pair(sums: tuple[float, float], count: int) -> dict[str, float] | None:
    return {"recorded": sums[0] / count, "now": sums[1] / count} if count else None


def _flip(recorded: RecordedCompletion, now: Judgement) -> str:
    """Return the direction in which a judgement changed; "" if it did not.

    Correctness decides where both have it, so that another scale of rewards is no disagreement.
    """
    if recorded.correct is not None and now.correct is not None:
        changed = recorded.correct is not now.correct
        return f"{_VERDICTS[recorded.correct]} -> {_VERDICTS[now.correct]}" if changed else ""
    if abs(now.reward - recorded.reward) <= TOLERANCE:
        return ""
    return "higher reward" if now.reward > recorded.reward else "lower reward"


def verdict_name(correct: bool | None) -> str:
    return _VERDICTS[correct]


# ---- recorded completions of a trial, one step in memory at a time, with what a verifier needs to judge them again


@dataclass(frozen=True, slots=True)
class RecordedCompletion:
    """Last completion of a trained episode, with the reward and correctness that the episode was given."""

    step: int
    sample_id: str
    task: Task
    response: Response
    reward: float
    correct: bool | None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A sample, or all samples of a step, that cannot be judged again."""

    what: str
    reason: str


class RecordedCompletions:
    """Reader of the recorded steps of one trial. It changes nothing."""

    def __init__(self, config: Config, tokenizer: TextTokenizer, prompts: PromptDataset) -> None:
        self._single_turn = config.rollout.agent == "single_turn"
        self._known_agent = config.rollout.agent in AGENT.builtin
        self._tokenizer = tokenizer
        self._prompts = prompts

    def read(self, step: int, directory: Path) -> Iterator[RecordedCompletion | LeftOut]:
        """Yield the samples of a step. Raises RecordError for a damaged record."""
        try:
            record = files.read_record(directory)
            arrays, origins = files.read_arrays(directory, record)
        except RecordError:
            if directory.exists():
                raise
            yield LeftOut(f"step {step}", "the running trial has removed the record (record.keep_steps)")
            return
        by_ticket = {origin.ticket.ticket_id: origin for origin in origins}
        for group in record.groups:
            origin = by_ticket[group[0].ticket_id]
            try:
                prompt = self._prompts.prompt(origin.ticket.split, origin.ticket.prompt_index)
            except DataError as error:
                yield from (LeftOut(meta.sample_id, f"its row cannot be read: {error}") for meta in _last_rows(group))
                continue
            for meta in _last_rows(group):
                yield self._sample(step, meta, origin, arrays, prompt)

    def _sample(
        self, step: int, meta: SampleMeta, origin: GroupOrigin, arrays: Arrays, prompt: Prompt
    ) -> RecordedCompletion | LeftOut:
        tokens = arrays[meta.sample_id, "tokens"]
        if self._known_agent and meta.row == 0 and tokens[: len(prompt.ids)].tolist() != prompt.ids:
            return LeftOut(meta.sample_id, "its row has another prompt now: the data was changed")
        begin, end, turn = self._completion(tokens, arrays[meta.sample_id, "loss_mask"], len(prompt.ids))
        if begin == end:
            return LeftOut(meta.sample_id, "it has no completion")
        text = self._tokenizer.completion_text(tokens[begin:end].tolist())
        finish_reason = origin.episodes[meta.episode][meta.row].finish_reason
        response = Response(text, finish_reason, end - begin, turn)
        task = Task(prompt, origin.ticket, meta.episode)
        return RecordedCompletion(step, meta.sample_id, task, response, meta.reward, meta.correct)

    def _completion(self, tokens: Array, mask: Array, prompt_len: int) -> tuple[int, int, int]:
        """Return where the last completion of a row begins and ends, and its number.

        With several turns it is the last run of loss tokens. With one turn it is all after the prompt, so tokens that
        were masked as too old belong to it, too.
        """
        if self._single_turn:
            return prompt_len, len(tokens), 0
        edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
        if not len(edges):
            return 0, 0, 0
        return int(edges[-2]), int(edges[-1]), len(edges) // 2 - 1


def _last_rows(group: list[SampleMeta]) -> list[SampleMeta]:
    """Return the last row of each episode: the reward belongs to its completion."""
    last: dict[int, SampleMeta] = {}
    for meta in group:
        if meta.episode not in last or meta.row > last[meta.episode].row:
            last[meta.episode] = meta
    return list(last.values())
