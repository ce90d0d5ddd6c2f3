"""Fingerprints of the manager: the parts of its state that decide. Only public names, so that a rename is noticed."""

from collections.abc import Iterable
from typing import Any

from realsys.algorithm.sequence_buffer import SequenceBuffer
from realsys.manager.decisions import ManagerState
from realsys.manager.ledger.ledger import Ledger
from realsys.manager.ledger.pinned_evaluations import Evaluations
from realsys.manager.ledger.tickets import OpenTicket
from realsys.manager.routing.placement import Reservations
from realsys.manager.routing.rollout_workers import WorkerHeartbeat
from realsys.manager.routing.servers import Server
from realsys.train.master.intake_decisions import Departures, IntakeState
from realsys.types import PublishedVersion, SampleMeta, Ticket
from tests.support.ledger.state_explorer import Canonical


def _ticket(ticket: OpenTicket) -> Any:
    owner = (ticket.worker, ticket.incarnation, ticket.version, ticket.request)
    return ticket.ticket_id, ticket.prompt_index, ticket.attempt, ticket.state, ticket.failures, ticket.weights, owner


def _server(server: Server) -> Any:
    flags = (server.draining, server.health.state, server.health.epoch)
    return server.address.incarnation, server.verified, server.target, flags


def _heartbeat(heartbeat: WorkerHeartbeat) -> Any:
    return heartbeat.kind, heartbeat.incarnation, heartbeat.state


def _sample(sample: SampleMeta) -> Any:
    return (
        sample.ticket_id,
        sample.attempt,
        sample.reward,
        sample.version_min,
        sample.trainer_incarnation,
        sample.reissues,
    )


def _buffer(buffer: SequenceBuffer) -> Any:
    """All but its statistics and its functions, which never change."""
    return {name: value for name, value in vars(buffer).items() if name != "rejected" and not callable(value)}


def _intake(intake: IntakeState) -> Any:
    """Counts of what was dropped, and the bounds of a wait, decide nothing here."""
    return intake.buffer, intake.version, intake.held(), intake.departures


KEY = Canonical(
    {
        OpenTicket: _ticket,
        Server: _server,
        WorkerHeartbeat: _heartbeat,
        SampleMeta: _sample,
        SequenceBuffer: _buffer,
        IntakeState: _intake,
        Departures: lambda departures: (departures.dropped, departures.stale),
        PublishedVersion: lambda published: (published.version, published.incarnation),
        Ticket: lambda ticket: ticket.trainer_incarnation,
    }
)


def ledger_key(ledger: Ledger) -> Any:
    """The whole ledger, without times."""
    snapshot, counts = ledger.snapshot(0.0, [], {}), ledger.counts
    snapshot.open.sort(key=lambda ticket: ticket.ticket_id)
    for ticket in snapshot.open:  # a copy
        ticket.news_at = 0.0
    return snapshot, counts.by_state(), counts.attempts, dict(counts.dropped_by_reason)


def manager_key(state: ManagerState) -> Any:
    """All that decides in ledger, servers, reservations and workers."""
    ledger, counts = state.ledger, state.ledger.counts
    columns = ledger.columns
    places = {(t, call): state.reservations.get(t, call) for t in ledger.open for call in state.reservations.calls(t)}
    rolled_back = ledger.rolled_back
    return (
        ledger.open,
        (columns.outcome, columns.attempt, columns.prompt, columns.reasons, columns.stale),
        (ledger.prompts, ledger.submitted, ledger.cursor, ledger.base, ledger.newest),
        rolled_back and (rolled_back.version, rolled_back.incarnation),
        (counts.inherited, counts.granted, counts.open, counts.trained, counts.dropped, counts.dropped_by_reason),
        (state.servers.all(), state.servers.published, places, state.workers),
        (state.repeats.by_worker, state.unplaced),
    )


def recount(reservations: Reservations, tickets: Iterable[str]) -> dict[str, tuple[int, int]]:
    """(sequences, tokens) per server, summed from scratch."""
    loads: dict[str, tuple[int, int]] = {}
    for place in [reservations.get(t, call) for t in tickets for call in reservations.calls(t)]:
        assert place is not None
        sequences, tokens = loads.get(place.server, (0, 0))
        loads[place.server] = (sequences + place.sequences, tokens + place.tokens)
    return loads


def evaluations_key(evaluations: Evaluations) -> Any:
    """Progress and running problems, without times."""
    progress = [
        (e.started.eval_id, e.started.version, e.waiting, e.attempts, e.failures, e.saved.done, e.saved.failed)
        for e in evaluations.by_id.values()
    ]
    pins = [(e.pinned, e.saved.held is None) for e in evaluations.by_id.values()]
    running = {(p.ticket_id, p.ticket.attempt): (p.worker, p.incarnation) for p in evaluations.running.values()}
    return progress, pins, running, evaluations.ever_started()
