"""Fault schedule: each kind is a Poisson process with its own generator, so that one kind does not move another."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from realsys.simulate.simulation import Simulation


class Faults:
    """Injects the faults of ``sim.faults`` into a simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._random = {kind: Random(f"{simulation.config.seed} {kind}") for kind in self._kinds()}

    def _kinds(self) -> dict[str, Callable[[Random], bool]]:
        """Return the kinds, each with a function that returns False if it cannot happen now."""
        return {
            "server_dies": self._server_dies,
            "worker_dies": self._worker_dies,
            "manager_restarts": self._manager_restarts,
            "trainer_restarts": self._trainer_restarts,
            "false_report": self._false_report,
            "update_fails": self._update_fails,
            "reply_lost": self._reply_lost,
            "notice_lost": self._notice_lost,
            "rollout_fails": self._rollout_fails,
        }

    def start(self) -> None:
        """Plan the first fault of each kind."""
        for kind in self._random:
            self._plan(kind)

    def _plan(self, kind: str) -> None:
        hours = getattr(self._simulation.sim.faults, kind)
        if hours:
            seconds = self._random[kind].expovariate(1.0 / (3600 * hours))
            self._simulation.clock.after(seconds, self._happen, kind)

    def _happen(self, kind: str) -> None:
        if self._kinds()[kind](self._random[kind]):
            self._simulation.account.faults[kind] += 1
        self._plan(kind)

    def _server_dies(self, random: Random) -> bool:
        up = sorted(name for name, engine in self._simulation.engines.items() if engine.up)
        if up:
            self._simulation.kill_server(random.choice(up))
        return bool(up)

    def _worker_dies(self, random: Random) -> bool:
        up = sorted(name for name, worker in self._simulation.workers.items() if worker.up)
        if up:
            self._simulation.kill_worker(random.choice(up))
        return bool(up)

    def _manager_restarts(self, random: Random) -> bool:
        up = self._simulation.manager.up
        if up:
            self._simulation.kill_manager()
        return up

    def _trainer_restarts(self, random: Random) -> bool:
        up = self._simulation.trainer.up
        if up:
            self._simulation.kill_trainer()
        return up

    def _false_report(self, random: Random) -> bool:
        self._simulation.false_reports += 1
        return True

    def _update_fails(self, random: Random) -> bool:
        self._simulation.failing_updates += 1
        return True

    def _reply_lost(self, random: Random) -> bool:
        self._simulation.manager.lose_replies += 1
        return True

    def _notice_lost(self, random: Random) -> bool:
        self._simulation.trainer.lose_notices += 1
        return True

    def _rollout_fails(self, random: Random) -> bool:
        self._simulation.agent_failures += 1
        return True
