"""Checks of a simulation, by the names of the invariants.

The audit of the journal reads every record, by independent rules: ``admission``, ``one-end``, ``claim-before-train``
and ``monotonic``. The rest is checked here, against the cost models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from realsys.lab.simulation.rollout import GroupRun
from realsys.types import SampleMeta

if TYPE_CHECKING:
    from realsys.lab.simulation.simulation import Simulation


class Broken(AssertionError):
    """An invariant does not hold. The text ends with the command that repeats the simulation."""

    def __init__(self, problem: str, simulation: Simulation) -> None:
        self.problem = problem
        clock = simulation.clock
        where = f"at {clock.now / 3600:.4f} h, event {clock.events}, seed {simulation.config.seed}"
        super().__init__(f"{problem}\n{where}; to repeat it: {simulation.plan.command()}")


def check_cheap(simulation: Simulation) -> None:
    """Check everything that takes time in proportion to the open tickets. Raises Broken."""
    for check in (_audit, _tokens, _servers, _reservations, _ledger):
        if problem := check(simulation):
            raise Broken(problem, simulation)


def check_all(simulation: Simulation) -> None:
    """Check everything at the end. Raises Broken."""
    check_cheap(simulation)
    auditor = simulation.manager.journal.auditor
    logged = dict(enumerate(simulation.trainer.weights[: simulation.trainer.logged], 1))
    auditor.compare_steps(logged)
    report = auditor.report()
    failed = {check.name: check.problems[:5] for check in report.checks if not check.ok}
    if failed:
        raise Broken(f"audit: {failed}", simulation)


def check_loss(
    simulation: Simulation,
    groups: Sequence[GroupRun],
    in_loss: Sequence[SampleMeta],
    version: int,
    oldest: int | None,
) -> str:
    """Return the problem if a step into ``version`` trains other tokens than the policy allows, else ""."""
    settings = simulation.config.asynchronous
    bound = None if settings.stale_policy == "train" else version - 1 - settings.max_staleness
    if oldest != bound:
        return f"staleness: version {version} trains tokens of version {oldest} on, and the bound is {bound}"
    allowed = sum(
        tokens
        for group in groups
        for completion in group.completions
        for sampled, tokens in completion.versions.items()
        if bound is None or sampled >= bound
    )
    found = sum(row.loss_tokens for row in in_loss)
    if found == allowed:
        return ""
    return f"staleness: {found} tokens are in the loss of version {version}, and {allowed} are within the bound"


def _audit(simulation: Simulation) -> str:
    problems = {name: found[:3] for name, found in simulation.manager.journal.auditor.problems.items() if found}
    return f"audit: {problems}" if problems else ""


def _tokens(simulation: Simulation) -> str:
    """``no-waste``: each sampled token is open, trained, or wasted for a reason."""
    return simulation.account.balance(sum(group.tokens for group in simulation.open))


def _servers(simulation: Simulation) -> str:
    """``monotonic``, ``fenced-weights``: a routable server serves a verified version within the bound."""
    state = simulation.manager.state
    if not simulation.manager.up or state.servers.published is None:
        return ""
    published, eta = state.servers.published, simulation.config.asynchronous.max_staleness
    for load in state.router.routes(None):
        server, engine = state.servers.get(load.name), simulation.engines.get(load.name)
        assert server is not None
        verified = server.verified
        if verified is None or verified.incarnation != published.incarnation:
            return f"fenced-weights: {load.name} is routable with {verified}, published is {published}"
        if not 0 <= published.version - verified.version <= eta:
            return f"fenced-weights: {load.name} is routable at {verified.version}, published is {published.version}"
        same = engine is not None and engine.up and str(simulation.births[load.name]) == server.address.incarnation
        if same and engine is not None:
            serving = engine.serving
            if serving is None or (serving.incarnation, serving.version) < (verified.incarnation, verified.version):
                return f"fenced-weights: {load.name} is trusted with {verified}, and serves {serving}"
    return ""


def _reservations(simulation: Simulation) -> str:
    """Every place belongs to a running attempt, and the loads are their sums."""
    state = simulation.manager.state
    reservations, loads, found = state.reservations, Counter[str](), 0
    for ticket_id in [*state.ledger.open, *state.evaluations.running]:
        for call in reservations.calls(ticket_id):
            place = reservations.get(ticket_id, call)
            assert place is not None
            found += 1
            loads[place.server] += place.sequences
            ticket = state.ledger.open.get(ticket_id)
            if ticket is not None and ticket.state != "running":
                return f"ticket {ticket_id} is {ticket.state}, and has a place on {place.server}"
    if found != len(reservations):
        return f"{len(reservations) - found} places belong to no open ticket"
    wrong = [s.name for s in state.servers.all() if reservations.load(s.name)[0] != loads[s.name]]
    return f"the load of {wrong[0]} is not the sum of its places" if wrong else ""


def _ledger(simulation: Simulation) -> str:
    """``one-end``: the counts are those of the tickets, and what the trainer has trained is in the ledger."""
    ledger, trainer = simulation.manager.state.ledger, simulation.trainer
    states = Counter(ticket.state for ticket in ledger.open.values())
    if wrong := [state for state, count in ledger.counts.open.items() if states[state] != count]:
        return f"one-end: the ledger counts {ledger.counts.open}, and has {dict(states)}: {wrong[0]}"
    version = min(trainer.version, ledger.newest)
    if trainer.up and trainer.settled and version > 0:
        ends = {ledger.ended(ticket_id) for ticket_id in trainer.weights[version - 1]}
        if ends != {f"trained@{version}"}:
            return f"one-end: version {version} trained tickets that the ledger has as {ends}"
    return ""
