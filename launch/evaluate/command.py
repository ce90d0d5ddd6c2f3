"""`realsys eval`: evaluates a model folder, the weights of a trial, or the servers of a trial that runs."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Any

from realsys.cluster.store.connect import is_known, make_name_store
from realsys.config.evaluation_sets import EvaluationSet
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.launch.commands.trials.finding import EVALUATIONS
from realsys.launch.evaluate.eval_results import report
from realsys.launch.evaluate.eval_settings import Choices
from realsys.launch.evaluate.live import LiveEvaluations, client_of, live_sets, new_name, not_running
from realsys.launch.evaluate.own_servers import evaluate_model
from realsys.launch.evaluate.target import find_target, trial_of
from realsys.observe.screen.terminal import Terminal


def evaluate(target: str, choices: Choices, step: int | None, *, live: bool) -> int:
    """Evaluate, print a table, and return the exit code. Raises RealsysError for bad input."""
    if not live:
        return evaluate_model(find_target(target, step), choices)
    for name, value in (("--step", step), ("--name", choices.name), ("--config-dir", choices.config_dir)):
        if value is not None:
            raise ConfigError(name, value, "has no meaning with --live: leave it out")
    return evaluate_live(trial_of(target), choices)


def evaluate_live(paths: TrialPaths, choices: Choices) -> int:
    """Evaluate with the servers of a trial that runs. Raises RealsysError."""
    config, sets = live_sets(paths, choices)
    if not is_known(config, paths):
        raise not_running(paths)
    console = Terminal()
    say = functools.partial(console.print, highlight=False, soft_wrap=True, markup=False)
    name = new_name()
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
