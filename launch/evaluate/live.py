"""Asks the manager of a trial for evaluations while it trains, and waits for them.

    request per data set ──> poll ──> all have ended ──> records
                              └── Ctrl-C, no progress: cancel what has not ended

Such an evaluation belongs to a user, not to a trainer: no incarnation fences it, and the trainer never sees it. If the
trainer goes back to a checkpoint, the evaluation begins again with the weights from which training continues.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from realsys.cluster.store.base import NameStore
from realsys.cluster.store.connect import trial_names
from realsys.config.compose import with_overrides
from realsys.config.dump import read_config
from realsys.config.evaluation_sets import EvaluationSet, id_of_set
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import ConfigError, KeyMissing, NameStoreError, WaitTimeout
from realsys.launch.evaluate.eval_settings import Choices, sets_to_evaluate
from realsys.launch.start import changes
from realsys.manager.messages import CancelRequest, EvaluateRequest, EvaluationReply
from realsys.master.evaluation import ResultWriter, outcome_of
from realsys.observe.evaluation_records import record
from realsys.rollout.manager_client import ManagerClient

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


def new_name() -> str:
    """Return a name for evaluations of a user, by the time."""
    return f"user-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


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
            now, text = time.monotonic(), self._progress()
            if text != before:
                before, moved = text, now
                if now > shown + _SHOW_S:
                    self.say(text)
                    shown = now
            elif now > moved + timeout_s:
                raise WaitTimeout(f"evaluation: no new completion for {timeout_s:g} s: {text}")
            await asyncio.sleep(_POLL_S)

    def _progress(self) -> str:
        parts = []
        for state in self._states.values():
            if state is not None:
                again = f", begun again {state.restarts} times" if state.restarts else ""
                version = f" of version {state.version_max}" if state.version_max >= 0 else ""
                parts.append(f"{state.set} {state.done + state.failed}/{state.total}{version}{again}")
        return "; ".join(parts)

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
