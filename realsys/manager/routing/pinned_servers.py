"""Servers that keep the version of a running evaluation while the others update. Pure: time is an argument.

    version v + 1 is published, an evaluation of v is running
        a share of the servers at v          ──> keep v, and sample the rest of the evaluation
        other servers with its completions   ──> take no further ones, and update when those have ended
        all other servers                    ──> update
    the evaluation has ended, or HOLD_S after the first delay it is lost ──> all update

Training continues: a server that keeps v samples train tickets while ``admission`` and the staleness bound let it. A
completion of an evaluation never meets an update, so all of them are of one version (``one-version``).

An evaluation is pinned to a version by its first grant, or when the first server that may serve it has to decide about
an update. If no server has that version any more, the evaluation begins anew with another one. A server in quarantine
samples nothing, so it does not count. After a restart the manager first asks the servers for
their versions.

A version that the trainer has pinned (POST /pin) is kept in the same way, without a limit of time, by servers that
share no devices with ranks. If none of them has it any more, one goes back to it: what it samples ends, and goes on
elsewhere. The last server that no pin has stays with the policy in training. When a pin moves or ends, its calls end
before their server updates, for at most HOLD_S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from realsys.manager.ledger.events import EvalHeld, EvalLost
from realsys.manager.ledger.pinned_evaluations import Evaluation, Evaluations
from realsys.manager.routing.placement import Reservations
from realsys.manager.routing.servers import Hold, Server, ServerRegistry
from realsys.types import PublishedVersion

HOLD_S = 600.0  # of delay after which the weights of the servers matter more than the numbers of the evaluation


@dataclass(frozen=True, slots=True)
class HoldRules:
    """Limits of what an evaluation may delay: ``share`` of the servers, at least one, for ``seconds``."""

    share: float = 0.25
    seconds: float = HOLD_S


class Holds:
    """Decides which servers keep their version (``ServerRegistry.holds``)."""

    def __init__(
        self, rules: HoldRules, servers: ServerRegistry, reservations: Reservations, evaluations: Evaluations
    ) -> None:
        self._rules = rules
        self._servers = servers
        self._reservations = reservations
        self._evaluations = evaluations

    def playable(self, evaluation: Evaluation, serves: Callable[[int], object]) -> int | None:
        """Return the version that the evaluation may be sampled with now; None: it must wait.

        ``serves`` tells if servers take new completions of an evaluation of exactly this version.
        """
        published = self._servers.published
        if published is None:
            return None
        version = published.version if evaluation.pinned is None else evaluation.pinned
        return version if version >= evaluation.started.version and serves(version) else None

    def refresh(self, now: float) -> list[EvalHeld | EvalLost]:
        """Decide anew which servers keep their version. Returns what the journal must have."""
        holds: dict[str, Hold] = {}
        events: list[EvalHeld | EvalLost] = []
        for evaluation in self._evaluations.unfinished():
            if lost := self._lost(evaluation, now):
                events.append(lost)
            elif self._needs_hold(evaluation):
                served = next((server.verified for server in self._serving(evaluation.pinned)), None)
                if evaluation.saved.held is None and served is not None:
                    events.append(self._evaluations.hold(evaluation, served, now))
                self._hold(evaluation, holds)
        kept = [evaluation.saved.held for evaluation in self._evaluations.unfinished()]
        pinned = self._pinned(holds)
        kept += self._evaluations.pins.values()
        self._servers.take_holds(holds, [held for held in kept if held is not None], pinned)
        return events

    def _pinned(self, holds: dict[str, Hold]) -> dict[str, PublishedVersion]:
        """Choose the servers of the pinned versions. Adds to ``holds`` those whose calls of a pin must still end."""
        before, pinned = self._servers.pinned, dict[str, PublishedVersion]()
        versions = list(dict.fromkeys(self._evaluations.pins.values()))
        able = [s for s in self._servers.all() if s.name not in self._servers.lending.lent and not s.quarantined]
        most = max(1, int(self._rules.share * len(able) / max(1, len(versions))))

        def preference(server: Server, held: PublishedVersion) -> tuple[bool, bool, bool, bool, str]:
            has, stays = held in (server.verified, server.target), before.get(server.name) == held
            needed = not has and (server.verified in versions or server.name in holds)
            # One that has not said what it has may have it, and else has nothing to lose.
            asked = server.verified is not None or server.failures > 0
            return not has, needed, not stays if has else asked, not stays, server.name

        for held in versions:
            free = [server for server in able if server.name not in pinned]
            free.sort(key=partial(preference, held=held))
            for server in free[:most]:
                if held in (server.verified, server.target) or len(able) - len(pinned) > 1:
                    pinned[server.name] = held
        for name in before.keys() | self._servers.holds.keys():
            known = self._servers.get(name)
            leaves = known is not None and pinned.get(name) != known.verified
            if leaves and (placed := self._reservations.last_pinned(name)) is not None:
                holds.setdefault(name, Hold(placed + self._rules.seconds, keeps=False))
        return pinned

    def _lost(self, evaluation: Evaluation, now: float) -> EvalLost | None:
        """End or restart an evaluation whose version cannot be kept any longer."""
        evaluations, pinned = self._evaluations, evaluation.pinned
        if pinned is None:
            # the oldest version that may sample it, if its server is about to leave it
            published = self._servers.published
            leaving = [
                server.verified.version
                for server in self._servers.all()
                if _is_free(server)
                and self._servers.current(server) not in (None, published)
                and server.verified is not None
            ]
            evaluation.pinned = min((v for v in leaving if v >= evaluation.started.version), default=None)
            return None
        since, seconds = evaluation.saved.held_since, self._rules.seconds
        if since is not None and now >= since + seconds:
            left = evaluation.units - len(evaluation.saved.done)
            reason = f"{left} of {evaluation.units} had not ended when version {pinned} was kept for {seconds:g} s"
            return evaluations.lose_version(evaluation, reason, False, now)
        if any(self._serving(pinned)) or (evaluation.saved.held is not None and self._servers.unasked()):
            return None
        others = [version for version in self._current_versions() if version >= evaluation.started.version]
        if not others:
            return None  # no server is ready, and one that comes may have this version
        reason = f"no server has version {pinned} any more"
        return evaluations.lose_version(evaluation, reason, True, now)

    def _needs_hold(self, evaluation: Evaluation) -> bool:
        """Return True if the servers of its version have a newer one to load."""
        published = self._servers.published
        return published is not None and evaluation.pinned is not None and evaluation.pinned != published.version

    def _hold(self, evaluation: Evaluation, holds: dict[str, Hold]) -> None:
        since = evaluation.saved.held_since
        if since is None:
            return  # no server has its version yet
        until = since + self._rules.seconds
        sampling = set()
        for problem in self._evaluations.running_of(evaluation):
            for call in self._reservations.calls(problem.ticket_id):
                if place := self._reservations.get(problem.ticket_id, call):
                    sampling.add(place.server)
        before = self._servers.holds
        ready = [server for server in self._serving(evaluation.pinned) if _is_free(server)]

        def preference(server: Server) -> tuple[bool, bool, str]:
            keeps = server.name in before and before[server.name].keeps
            return not keeps, server.name not in sampling, server.name

        trusted = sum(self._servers.current(server) is not None for server in self._servers.all())
        most = max(1, int(self._rules.share * trusted))
        for number, server in enumerate(sorted(ready, key=preference)):
            if number < most or server.name in sampling:
                keeps, end = number < most, until
                if earlier := holds.get(server.name):
                    keeps, end = keeps or earlier.keeps, max(end, earlier.until)
                holds[server.name] = Hold(end, keeps)

    def _serving(self, version: int | None) -> Iterator[Server]:
        """Yield the servers with this version of the current trainer, without those in quarantine."""
        for server in self._servers.all():
            served = self._servers.current(server)
            if served is not None and served.version == version:
                yield server

    def _current_versions(self) -> Iterator[int]:
        for server in self._servers.all():
            if served := self._servers.current(server):
                yield served.version


def _is_free(server: Server) -> bool:
    """Return True if no update has begun that would end in the middle of a completion."""
    return server.target is None and not server.draining
