"""Starts the processes of an evaluation, shows them, and reports the results."""

from __future__ import annotations

import asyncio
import functools
import time
from datetime import datetime

from realsys.config.evaluation_sets import evaluation_sets, id_of_set
from realsys.launch.evaluate.eval_results import report
from realsys.launch.evaluate.eval_settings import Choices, evaluation_config
from realsys.launch.evaluate.target import Target, exported
from realsys.launch.launchers.build import check_start
from realsys.launch.prepare import prepare, resolve
from realsys.launch.processes.restart_policy import Outcome
from realsys.launch.results.conclude import report_failure, summarised
from realsys.launch.run import Planned, plan_of, supervise
from realsys.master.run.evaluation_run import EVAL_ID
from realsys.observe.screen.plain import EvaluationView
from realsys.observe.screen.terminal import Terminal, tell
from realsys.observe.step_log import read_steps
from realsys.weights.host.places import sweep


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


def _conclude(planned: Planned, target: Target, outcome: Outcome, started: float) -> int:
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
