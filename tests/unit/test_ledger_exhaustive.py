"""Every state that a small trial can reach: none breaks ARCHITECTURE section 5, from each an end can be reached.

The real ManagerState, SequenceBuffer and StuckCheck, driven by all that workers, network, trainer and supervisor may do
to them (``tests/ledger_actions``): ``faults`` things go wrong at any moment, in any order. Invariants after each action:

    states add up, N is what they add up to, and within the bound at each grant; each ticket has one end, each prompt is
    to come, pending or ended; nothing trained twice or beyond its bound; versions and training sides only go forward;
    what the journal says leads to the same ledger, and so does its snapshot; no reservation is left behind

``REALSYS_EXPLORE=1`` adds larger bounds: minutes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from realsys.admission.ledger import Ledger
from realsys.admission.ledger_state import LedgerState
from realsys.admission.manager import ManagerState
from realsys.admission.messages import AllocateRequest, FinishRequest
from realsys.admission.routing import Reservations
from realsys.admission.servers import ServerRegistry
from realsys.admission.staleness import StalenessBound
from realsys.admission.status import status
from realsys.buffer.replay import SequenceBuffer
from realsys.master.stuck import FEWEST_FAILURES, StuckCheck
from tests.ledger_actions import World
from tests.ledger_world import COPIER, Bounds
from tests.state_explorer import Found, Violation, explore

#: Everything that can go wrong once; two things of a kind that meet; larger batches, lags and more workers.
SMALL = [
    Bounds(),
    Bounds(
        prompts=1, steps=1, faults=2, kinds=frozenset({"fails_though_stored", "lapses_though_alive", "arrives_late"})
    ),
    Bounds(batch=2, prompts=3, kinds=frozenset({"rejected", "filtered", "fails", "server_dies", "arrives_late"})),
    Bounds(eta=1, prompts=2, kinds=frozenset({"rejected", "filtered", "arrives_late", "server_dies"})),
    Bounds(workers=2, prompts=1, steps=1, kinds=frozenset({"dies", "dies_in_push", "reply_lost"})),
]
LARGE = [
    Bounds(prompts=1, steps=1, faults=2),
    Bounds(faults=2, kinds=frozenset({"master_crashes"})),
    Bounds(batch=2, prompts=4),
    Bounds(eta=1, prompts=2),
    Bounds(eta=1, prompts=3, steps=3, kinds=frozenset({"arrives_late", "filtered"})),
    Bounds(workers=2, prompts=2, kinds=frozenset({"dies", "dies_in_push", "reply_lost", "lapses_though_alive"})),
]
AT_MOST = 500_000


def search(bounds: Bounds, at_most: int = AT_MOST) -> Found:
    return explore(World(bounds), COPIER, at_most=at_most)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("bounds", SMALL + (LARGE if os.environ.get("REALSYS_EXPLORE") == "1" else []), ids=str)
def test_no_reachable_state_breaks_an_invariant_or_is_stuck(bounds: Bounds) -> None:
    found = search(bounds)
    print(f"{found.states} states, {found.transitions} transitions; ends: {found.finals}")
    enough = bounds.prompts * bounds.epochs >= bounds.batch * bounds.steps
    assert ("tell_trained" in found.finals) == enough, "the trial can be trained to its end"
    assert bounds.kinds <= found.actions.keys(), "a fault that never happened"


def test_every_kind_of_fault_happens_and_both_ends_are_reached() -> None:
    found = search(Bounds(steps=1, prompts=1))
    assert {"tell_trained", "give_up"} <= found.finals.keys()
    assert {
        "manager_restarts server_dies fails fails_though_stored rejected filtered arrives_twice arrives_late "
        "finishes_twice lapses_though_alive dies dies_in_push reply_lost told_twice master_crashes"
    } == {" ".join(name for name in FAULTS if name in found.actions)}


FAULTS = [
    "manager_restarts",
    "server_dies",
    "fails",
    "fails_though_stored",
    "rejected",
    "filtered",
    "arrives_twice",
    "arrives_late",
    "finishes_twice",
    "lapses_though_alive",
    "dies",
    "dies_in_push",
    "reply_lost",
    "told_twice",
    "master_crashes",
]


def test_a_batch_that_can_never_fill_ends_by_name_in_every_history() -> None:
    """Two prompts make no batch of three, whatever happens to them."""
    found = search(Bounds(batch=3, prompts=2, steps=1, kinds=frozenset({"rejected", "filtered", "fails", "dies"})))
    assert found.finals.keys() == {"give_up"}


# -- seeded defects: the exploration must find each of them


def without(owner: type, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The method does nothing."""
    return lambda patch: patch.setattr(owner, name, lambda *args, **kwargs: None)


def instead(owner: type, name: str, new: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """``new`` is called with the method it stands for, and its arguments."""
    old = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *args, **kwargs: new(old, *args, **kwargs))


def any_attempt(finish: Any, ledger: Ledger, ticket_id: str, attempt: int, *rest: Any) -> Any:
    ticket = ledger.open.get(ticket_id)
    return finish(ledger, ticket_id, ticket.attempt if ticket else attempt, *rest)


def counted_twice(apply: Any, ledger: LedgerState, event: Any) -> None:
    apply(ledger, event)
    ledger.counts.open["finished"] += event.outcome == "accepted"


def not_in_the_journal(lose: Any, state: ManagerState, *args: Any) -> Any:
    before = list(state.outbox)
    lost = lose(state, *args)
    state.outbox = before
    return lost


def only_the_trained(apply: Any, ledger: LedgerState, event: Any) -> None:
    finished = {name: ticket for name, ticket in ledger.open.items() if ticket.state == "finished"}
    for name in finished:
        ledger.open.pop(name)
    apply(ledger, event)
    ledger.open |= finished


def same_attempt(never_arrived: Any, ledger: Ledger, held: Any, *rest: Any) -> Any:
    """A group that is held in an older attempt than the one that finished counts as missing."""
    return never_arrived(ledger, {t for t in held if not (ledger.open[t].attempt if t in ledger.open else 0)}, *rest)


def any_training_side(publish: Any, servers: ServerRegistry, published: Any) -> bool:
    servers.training = ""
    accepted: bool = publish(servers, published)
    return accepted


DEFECTS = [
    ("a drop gives no quota back", without(Ledger, "drop"), "filtered"),
    ("a finish counts twice", instead(LedgerState, "_apply_finished", counted_twice), "finishes_twice"),
    ("a finish of any attempt counts", instead(Ledger, "finish", any_attempt), "lapses_though_alive"),
    ("one ticket too many", instead(StalenessBound, "admits", lambda f, self, n, v: f(self, n - 1, v)), "fails"),
    ("a lapse is not journalled", instead(ManagerState, "_lose", not_in_the_journal), "lapses_though_alive"),
    ("places are never given back", without(Reservations, "release"), "fails"),
    ("lost tickets stay lost", instead(Ledger, "lose", lambda f, *args: []), "dies"),
    ("a copy of what was trained is new", without(SequenceBuffer, "_end"), "arrives_twice"),
    ("too old groups are trained", without(SequenceBuffer, "_drop_stale"), "arrives_late"),
    ("what never arrived is not missed", instead(Ledger, "never_arrived", lambda f, *args: []), "arrives_late"),
    ("what is held is issued again", instead(Ledger, "never_arrived", same_attempt), "lapses_though_alive"),
    (
        "a roll-back keeps what was buffered",
        instead(LedgerState, "_apply_rolled_back", only_the_trained),
        "master_crashes",
    ),
    ("an old side may publish", instead(ServerRegistry, "publish", any_training_side), "master_crashes"),
    ("a full end is not noticed", instead(StuckCheck, "look", lambda f, *args: None), "rejected"),
]


@pytest.mark.parametrize(("defect", "kind"), [d[1:] for d in DEFECTS], ids=[d[0] for d in DEFECTS])
def test_exploration_finds_a_seeded_defect(
    defect: Callable[[pytest.MonkeyPatch], None], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    with pytest.raises(Violation) as found:
        search(Bounds(kinds=frozenset({kind})), at_most=3000)
    assert found.value.path, "a way there"


# -- without an end of the data


@pytest.mark.parametrize("outcome", ["rejected", "failed"])
def test_endless_data_of_which_nothing_is_accepted_ends_by_name(outcome: str) -> None:
    world = World(Bounds(batch=2, prompts=3, epochs=0, attempts=1, faults=0))
    check = StuckCheck(2)
    assert check.look(status(world.manager, 0.0, 0.0), 0) is None
    reason = None
    for turn in range(FEWEST_FAILURES):
        assert reason is None, f"given up after {turn} groups"
        (ticket,) = world.manager.allocate(AllocateRequest("rollout_worker/0", 1), 0.0).tickets
        world.manager.finish(FinishRequest(ticket.ticket_id, 0, "w", outcome, "why"), 0.0)  # type: ignore[arg-type]
        reason = check.look(status(world.manager, 0.0, 0.0), 0)
    assert reason is not None and f"{FEWEST_FAILURES} groups were dropped" in reason and f"{outcome} why" in reason
