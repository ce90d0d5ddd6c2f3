"""Evaluate on the data sets of the configuration and print a table (docs/evaluation.md).

A model or a trial gets servers and RolloutWorkers of its own; nothing of them is left at the end. A trial that runs is
asked for its servers with --live.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import secrets
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from realsys.cluster.names.connect import is_known, make_name_store, trial_names
from realsys.cluster.names.contract import NameStore
from realsys.config.compose import with_overrides
from realsys.config.evaluation_sets import EvaluationSet, evaluation_sets, id_of_set
from realsys.config.paths import TrialPaths, read_config
from realsys.config.schema import Config
from realsys.errors import ConfigError, KeyMissing, NameStoreError, RecordError, WaitTimeout
from realsys.launch.commands.options import EVALUATIONS, add_config_dir, preload_workers
from realsys.launch.conclude import report_failure, summarised
from realsys.launch.evaluation_target import (
    Choices,
    Target,
    evaluation_config,
    exported,
    find_target,
    sets_to_evaluate,
    trial_of,
)
from realsys.launch.launchers.contract import check_start
from realsys.launch.prepare import prepare, resolve
from realsys.launch.run import Planned, plan_of, supervise
from realsys.launch.start import changes
from realsys.launch.supervise.restart_policy import TrialOutcome
from realsys.launch.words import command_line
from realsys.manager.client import ManagerClient
from realsys.manager.messages import CancelRequest, EvaluateRequest, EvaluationReply
from realsys.observe.evaluation_records import incomplete_reason, omissions, read_samples, record
from realsys.observe.percent import percent, percentage
from realsys.observe.screen.plain import EvaluationView
from realsys.observe.screen.terminal import Terminal, tell
from realsys.observe.step_log import read_steps
from realsys.train.master.request_evaluations import EVAL_ID, ResultWriter, outcome_of
from realsys.weights.host_places import sweep


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="folder of a model or trial, or EXPERIMENT/TRIAL of runs/")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="data.eval=FILE, evaluation.samples=8, ...")
    parser.add_argument("--step", type=int, metavar="N", help="weights of this step of the trial (default: the last)")
    parser.add_argument("--live", action="store_true", help="ask the servers of a trial that runs; training goes on")
    parser.add_argument("--name", metavar="NAME", help="name of the evaluation (default: date and time)")
    add_config_dir(parser, "your configuration files, as for run")


def run(args: Namespace) -> int:
    """Evaluate, print a table, and return the exit code. Raises RealsysError for bad input."""
    preload_workers(args)
    choices = Choices(args.overrides, args.config_dir, args.name)
    if not args.live:
        return evaluate_model(find_target(args.target, args.step), choices)
    for name, value in (("--step", args.step), ("--name", args.name), ("--config-dir", args.config_dir)):
        if value is not None:
            raise ConfigError(name, value, "has no meaning with --live: leave it out")
    return evaluate_live(trial_of(args.target), choices)


def evaluate_live(paths: TrialPaths, choices: Choices) -> int:
    """Evaluate with the servers of a trial that runs. Raises RealsysError."""
    config, sets = live_sets(paths, choices)
    if not is_known(config, paths):
        raise not_running(paths)
    console = Terminal()
    say = functools.partial(console.print, highlight=False, soft_wrap=True, markup=False)
    name = f"user-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    records = asyncio.run(_evaluate(config, paths, sets, name, say))
    about = {"model": None, "trial": str(paths.root), "live": True}
    return report(paths, paths.root / EVALUATIONS / name, about, records)


async def _evaluate(
    config: Config, paths: TrialPaths, sets: Mapping[str, EvaluationSet], name: str, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    store = await asyncio.to_thread(make_name_store, config, paths)
    try:
        manager = client_of(config, paths, store)
        say(f"evaluating the servers of {paths.root}; Ctrl-C cancels")
        try:
            return await LiveEvaluations(manager, config, name, say).run(sets, paths)
        finally:
            await manager.close()
    finally:
        store.close()


# ---- starts the processes of an evaluation, shows them, and reports the results


def evaluate_model(target: Target, choices: Choices) -> int:
    """Start servers for a model, evaluate it, and return the exit code. Raises RealsysError for bad input."""
    planned = planned_evaluation(target, choices)
    check_start(planned.config)
    console = Terminal()
    say = functools.partial(console.print, highlight=False, soft_wrap=True, markup=False)
    say(f"evaluating {planned.config.model.path} (step {target.step}) in {planned.paths.root}")
    for line in planned.chosen:
        say(line)
    with prepare(planned.config, say) as ready:
        started = time.time()
        outcome = asyncio.run(supervise(planned.config, ready, planned.specs, EvaluationView(console)))
        if outcome.refused:
            raise outcome.refused
        sweep()  # a server that was killed leaves its copy of the weights in /dev/shm
        return _conclude(planned, target, outcome, started)


def planned_evaluation(target: Target, choices: Choices) -> Planned:
    """Return the checked configuration of an evaluation. Raises RealsysError for bad input."""
    config, given = evaluation_config(target, choices, datetime.now())
    if target.form != "model":  # before the checks, which read the model's files
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(exported(target))})})
    return plan_of(resolve(config, now=datetime.now()), given)


def _conclude(planned: Planned, target: Target, outcome: TrialOutcome, started: float) -> int:
    """Write and print what the evaluation has found; return the exit code."""
    config, paths = planned.config, planned.paths
    _, failure = summarised(config, paths, outcome, started)
    if outcome.status == "failed":
        return report_failure(outcome, failure, paths, "give the command again to repeat the evaluation")
    if outcome.status == "interrupted":
        tell(f"realsys: {outcome.reason}; the evaluation is incomplete and has no result")
        return 128 + (outcome.signal or 2)
    records = [record for record in read_steps(paths.steps) if record["kind"] == "eval"]
    records.sort(key=lambda record: list(evaluation_sets(config)).index(record["set"]))
    stored = {id_of_set(f"{EVAL_ID}-{record['step']}", record["set"]): record for record in records}
    about = {"model": str(target.model), "trial": str(target.trial.root) if target.trial else None, "step": target.step}
    return report(paths, paths.root, about, stored)


# ---- asks the manager of a trial for evaluations while it trains, and waits for them
#
#     request per data set ──> poll ──> all have ended ──> records
#                               └── Ctrl-C, no progress: cancel what has not ended
#
# Such an evaluation belongs to a user, not to a trainer: no incarnation fences it, and the trainer never sees it. If
# the trainer goes back to a checkpoint, the evaluation begins again with the weights from which training continues.


_POLL_S, _SHOW_S = 0.5, 5.0
_CANCEL_S = 10.0  # a manager that does not answer may delay the end of the command for this time
#: what a request can say; RolloutWorkers read the rest from the trial's own configuration
_FREE = re.compile(r"evaluation\.(problems|samples|k|max_failed)|evaluation\.sets\.[^.]+\.(problems|samples|k)")


def live_sets(paths: TrialPaths, choices: Choices) -> tuple[Config, dict[str, EvaluationSet]]:
    """Return the configuration of a trial that runs, and the data sets to evaluate. Raises ConfigError."""
    config = read_config(paths.config)
    wanted = with_overrides(config, choices.overrides)
    for change in changes(config.model_dump(), wanted.model_dump()):
        if not _FREE.fullmatch(change.field):
            problem = "cannot be set with --live, because the RolloutWorkers of the trial have its own settings: set"
            raise ConfigError(change.field, change.new, f"{problem} evaluation.problems, samples, k or max_failed only")
    return wanted, sets_to_evaluate(wanted)


@dataclass(slots=True)
class LiveEvaluations:
    """Requested evaluations of a trial that runs. ``name``: their common one, unique in the trial.

    ``say`` gets lines about their progress.
    """

    manager: ManagerClient
    config: Config
    name: str
    say: Callable[[str], None]
    _states: dict[str, EvaluationReply | None] = field(default_factory=dict)  # evaluation id -> its last known state

    async def run(self, sets: Mapping[str, EvaluationSet], paths: TrialPaths) -> dict[str, dict[str, Any]]:
        """Evaluate all sets; store and return their records by their ids. If cancelled, cancel what has not ended.

        Raises WaitTimeout without progress for ``cluster.request_timeout_s``, or without a manager.
        """
        asked, began = {}, time.monotonic()
        try:
            for name, wanted in sets.items():
                eval_id = id_of_set(self.name, name)
                asked[eval_id], self._states[eval_id] = wanted, None
                await self.manager.evaluate(self._request(eval_id, wanted))
            await self._ended()
        finally:
            await self._cancel()
        writer, seconds = ResultWriter(self.config, paths.evaluations), time.monotonic() - began
        # In a thread, because the comparison of answers runs another event loop.
        return {
            eval_id: await asyncio.to_thread(self._stored, writer, eval_id, made, seconds)
            for eval_id, made in asked.items()
        }

    def _stored(self, writer: ResultWriter, eval_id: str, made: EvaluationSet, seconds: float) -> dict[str, Any]:
        """Store an evaluation that has ended; return its record."""
        state = self._states[eval_id]
        assert state is not None
        found = record(eval_id, max(0, state.version_min), made, outcome_of(state), seconds)
        return writer.write(eval_id, made, found, state)

    def _request(self, eval_id: str, wanted: EvaluationSet) -> EvaluateRequest:
        return EvaluateRequest(
            eval_id,
            wanted.split,
            wanted.problems,
            self.config.seed,
            samples=wanted.samples,
            set=wanted.name,
            max_failed=self.config.evaluation.max_failed,
            by_user=True,
        )

    def _open(self) -> list[str]:
        return [eval_id for eval_id, state in self._states.items() if state is None or not state.ended]

    async def _ended(self) -> None:
        """Return when all evaluations have ended."""
        timeout_s, moved, shown, before = self.config.cluster.request_timeout_s, time.monotonic(), 0.0, ""
        while open_ones := self._open():
            for eval_id in open_ones:
                self._states[eval_id] = await self.manager.evaluation(eval_id)
            parts = []
            for state in self._states.values():
                if state is not None:
                    again = f", begun again {state.restarts} times" if state.restarts else ""
                    version = f" of version {state.version_max}" if state.version_max >= 0 else ""
                    parts.append(f"{state.set} {state.done + state.failed}/{state.total}{version}{again}")
            now, text = time.monotonic(), "; ".join(parts)
            if text != before:
                before, moved = text, now
                if now > shown + _SHOW_S:
                    self.say(text)
                    shown = now
            elif now > moved + timeout_s:
                raise WaitTimeout(f"evaluation: no new completion for {timeout_s:g} s: {text}")
            await asyncio.sleep(_POLL_S)

    async def _cancel(self) -> None:
        """Cancel what has not ended, so that the servers stop sampling it."""
        for eval_id in self._open():
            try:
                async with asyncio.timeout(_CANCEL_S):
                    await self.manager.cancel_evaluation(CancelRequest(eval_id))
            except Exception as error:  # the manager may be gone: the end of the command matters more
                self.say(f"evaluation {eval_id} is not cancelled: {error or type(error).__name__}")


def not_running(paths: TrialPaths) -> ConfigError:
    return ConfigError("--live", str(paths.root), "does not run: leave --live out to evaluate its newest weights")


def client_of(config: Config, paths: TrialPaths, store: NameStore) -> ManagerClient:
    """Return a client of the trial's manager. Raises ConfigError if there is none, or if its token cannot be read."""
    names = trial_names(config)
    try:
        store.get(names.gserver_manager)
    except KeyMissing:
        raise not_running(paths) from None
    try:
        token = paths.token.read_text("utf-8").strip()
    except OSError as error:
        problem = f"{error.strerror}: only the user who runs the trial can ask its servers"
        raise ConfigError("--live", str(paths.token), problem) from None

    def address() -> str:
        try:
            return store.get(names.gserver_manager)
        except KeyMissing:
            raise NameStoreError("the manager of the trial is not there yet") from None

    return ManagerClient(address, token, retry_timeout_s=config.cluster.connect_timeout_s)


# ---- eval results
#
# Results of an evaluation: results.json, and a table for people. An incomplete evaluation has a reason, no numbers.


Result = Mapping[str, Any]
_FILE = "results.json"
_NONE = "-"


def with_lengths(record: Result, paths: TrialPaths, eval_id: str) -> dict[str, Any]:
    """Add to the step log's record where its completions are, and the share of them that was cut off (None: unknown).

    ``eval_id``: the name by which the manager knows the evaluation.
    """
    folder = paths.evaluations / eval_id
    try:
        reasons = [sample.finish_reason for sample in read_samples(folder)]
    except RecordError:  # the disk was full: the record of the step log is the result all the same
        reasons = []
    cut = reasons.count("length") / len(reasons) if reasons else None
    return {**record, "completions": len(reasons), "cut_off": cut, "folder": str(folder)}


def report(paths: TrialPaths, folder: Path, about: Mapping[str, Any], records: Mapping[str, Result]) -> int:
    """Write results.json into ``folder`` and print the table. Returns 1 if an evaluation is incomplete, else 0.

    ``records``: of the step log, by the name under which the trial at ``paths`` stores their completions.
    """
    results = [with_lengths(record, paths, eval_id) for eval_id, record in records.items()]
    path = write_results(folder, about, results)
    shown = (f"completions  {command_line('samples', paths.root, '--eval', name)}" for name in records)
    for line in [*table(results), f"results      {path}", *shown]:
        print(line)
    return int(any(map(incomplete_reason, results)))


def write_results(folder: Path, about: Mapping[str, Any], results: Sequence[Result]) -> Path:
    """Write results.json into ``folder``: ``about`` the model, and the results by data set. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _FILE
    staged = path.with_suffix(".tmp")
    staged.write_text(json.dumps({**about, "results": list(results)}, indent=2) + "\n", encoding="utf-8")
    staged.replace(path)
    return path


def table(results: Sequence[Result]) -> list[str]:
    """Return the lines of the table, a line per data set. They are not wrapped."""
    ks = sorted({int(k) for result in results for k in result["pass_at"]} - {1})
    has_votes = any(result.get("majority") for result in results)
    head = ["data set", "problems", "samples", "accuracy", *(f"pass@{k}" for k in ks)]
    head += [*(["majority"] if has_votes else []), "cut off", "mean length", "failed", "version"]
    rows = [_row(result, ks, has_votes=has_votes) for result in results]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    notes = [f"{result['set']}: incomplete: {reason}" for result in results if (reason := incomplete_reason(result))]
    notes += [f"{result['set']}: {phrase}" for result in results for phrase in omissions(result)]
    return [line.rstrip() for line in lines] + notes


def _row(result: Result, ks: Sequence[int], *, has_votes: bool) -> list[str]:
    shares = [_share(result["pass_at"].get(str(k))) for k in ks]
    shares += [_share(result.get("majority"))] if has_votes else []
    cut, length = result.get("cut_off"), result["length_mean"]
    return [
        result["set"],
        str(result["problems"]),
        str(result["samples"]),
        _share(result["pass_at"].get("1")),
        *shares,
        _NONE if cut is None else percent(cut),
        f"{length:.0f}",
        str(result["failed"]),
        str(result["version"]),
    ]


def _share(value: Mapping[str, float] | None) -> str:
    """Return a share with its interval: ``43.8 % (35.5 - 52.4)``."""
    if value is None:
        return _NONE
    return f"{percent(value['value'])} ({percentage(value['low'])} - {percentage(value['high'])})"
