"""`realsys regrade`: judges the recorded completions of a trial again, and reports how often the verdict differs.

    record of a step ──> completions ──chunks──> environment and verifier of the trial ──> Disagreement
                                                       └─ or another verifier: --verifier

It reads the trial and never changes it, so the trial may be running.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realsys.config.compose import with_overrides
from realsys.config.doors import ENVIRONMENT
from realsys.config.dump import read_config
from realsys.config.rules.checks import check_verifiers
from realsys.config.schema import Config
from realsys.data.prompts import PromptDataset
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import AgentError, ConfigError, RewardError
from realsys.launch.commands.replay import last_recorded
from realsys.launch.commands.samples.lines import printable
from realsys.launch.commands.trials.finding import find_trial
from realsys.launch.regrade.disagreement import Different, Disagreement, verdict_name
from realsys.launch.regrade.recorded import LeftOut, Recorded, RecordReader
from realsys.observe.screen.terminal import WorkLine
from realsys.reward.build import own_verifiers
from realsys.reward.judge.rubric_file import read_rubric
from realsys.rollout import environments
from realsys.rollout.defects import explain
from realsys.rollout.environments.base import Environment
from realsys.train.records import record_files as files

CHUNK = 128  # completions that are judged together
_CAUSE = "environment"  # cause of an error that an environment raised
#: settings that decide a verdict, and sections of them
_CHANGEABLE = ("data.verifier_args", "rollout.environment", "rollout.environment_args", "rollout.reward")


@dataclass(frozen=True, slots=True)
class RegradeOptions:
    """Options of the command line. ``verifier`` None: the trial's own. ``step`` None: all recorded steps."""

    verifier: str | None = None
    arguments: str | None = None
    overrides: Sequence[str] = field(default_factory=tuple)
    step: int | None = None
    show: int = 0
    json: Path | None = None


def regrade(trial_dir: Path, options: RegradeOptions) -> int:
    """Judge the recorded completions again and print the disagreements. Returns 0.

    Raises RealsysError for bad input, a damaged record, and a verifier that cannot judge anything.
    """
    if options.show < 0:
        raise ConfigError("--show", options.show, "must be 0 or more")
    paths = find_trial(trial_dir)
    recorded = read_config(paths.config)
    config = regrade_config(recorded, options)
    last_recorded(paths)  # refuses a trial without records
    steps = files.recorded_steps(paths.records)
    if options.step is not None:
        steps = {options.step: files.record_of_step(paths.records, options.step)}
    tokenizer = TextTokenizer(paths.base_model(config))
    reader = RecordReader(recorded, tokenizer, PromptDataset(config, paths, tokenizer))
    counts = Disagreement(keep=options.show)
    asyncio.run(_judge_steps(config, tokenizer, reader, steps, counts))
    results = {"trial": str(paths.root), "verifier": config.data.verifier, "steps": sorted(steps), **counts.results()}
    for line in (*_headline(recorded, config, steps), *report(counts), *_notes(recorded)):
        print(line)
    for different in counts.shown:
        print("\n".join(_shown(different)))
    if options.json is not None:
        samples = [_plain(different) for different in counts.shown]
        options.json.write_text(json.dumps({**results, "shown": samples}, indent=2) + "\n", encoding="utf-8")
    return 0


def regrade_config(config: Config, options: RegradeOptions) -> Config:
    """Return the trial's settings with the verifier to judge with. Raises ConfigError."""
    overrides = list(options.overrides)
    for text in overrides:
        name, _, value = text.partition("=")
        if not any(f"{name}.".startswith(f"{field}.") for field in _CHANGEABLE):
            problem = f"does not decide a verdict: use --verifier, or set a field of {', '.join(_CHANGEABLE)}"
            raise ConfigError(name, value, problem)
    verifier = options.verifier or config.data.verifier
    if options.arguments is not None:
        overrides.append(f"data.verifier_args={options.arguments}")
    if options.arguments is not None or verifier != config.data.verifier:
        own = config.data.model_copy(update={"verifier": verifier, "verifier_args": {}})
        config = config.model_copy(update={"data": own})
    # Only the verifier that judges is checked and started; those of the evaluation's sets may need what is not here.
    evaluation = config.evaluation.model_copy(update={"sets": {}})
    config = with_overrides(config.model_copy(update={"evaluation": evaluation}), overrides)
    config = config.model_copy(update={"rollout": read_rubric(config.rollout)})
    check_verifiers(config)
    ENVIRONMENT.check(config.rollout.environment, config.rollout.environment_args)
    return config


async def _judge_steps(
    config: Config, tokenizer: TextTokenizer, reader: RecordReader, steps: dict[int, Path], counts: Disagreement
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


def _chunks(reader: RecordReader, steps: dict[int, Path]) -> Iterator[tuple[int, list[Recorded | LeftOut]]]:
    """Yield (step, samples), a few samples at a time."""
    for step, directory in steps.items():
        samples = reader.read(step, directory)
        while chunk := list(itertools.islice(samples, CHUNK)):
            yield step, chunk


async def judge_chunk(environment: Environment, chunk: Sequence[Recorded | LeftOut], counts: Disagreement) -> None:
    """Judge samples together and count them in order. Raises what no other sample would escape."""
    samples = [sample for sample in chunk if isinstance(sample, Recorded)]
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
