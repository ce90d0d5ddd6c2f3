"""Every state that a small trial can reach: none breaks ARCHITECTURE section 5, from each an end can be reached.

The real ManagerState, SequenceBuffer and StuckCheck, driven by all that workers, network, trainer and supervisor may
do to them (``tests.support.ledger.ledger_actions``): ``faults`` things go wrong at any time, in any order. Invariants:

    states add up, N is what they add up to, and within the bound at each grant; each ticket has one end, each prompt is
    to come, pending or ended; nothing trained twice or beyond its bound; versions and training sides only go forward;
    what the journal says leads to the same ledger, and so does its snapshot; the audit finds nothing; no reservation is
    left behind

``REALSYS_EXPLORE=1`` adds larger bounds: minutes.
"""

import os

import msgspec
import pytest

from realsys.algorithm.sequence_buffer import SequenceBuffer
from realsys.manager.decisions import ManagerState
from realsys.manager.ledger.ledger import Ledger
from realsys.manager.ledger.staleness import StalenessBound
from realsys.manager.messages import AllocateRequest, FinishRequest
from realsys.manager.operations import status
from realsys.manager.routing.placement import Reservations
from realsys.manager.routing.servers import ServerRegistry
from realsys.train.master.intake_decisions import FEWEST_FAILURES, FEWEST_FILTERED, IntakeState, StuckCheck
from tests.support.ledger.ledger_actions import World
from tests.support.ledger.ledger_world import COPIER, Bounds, WorldState, bounds
from tests.support.ledger.state_explorer import Violation, explore

#: Everything that can go wrong once; two things that meet; larger batches; groups that grow too old; two workers; what
#: is too old is trained, or its tokens are masked; a trial that was resumed; machines that lose unsynced records; a
#: training script that submits the prompts.
SMALL = [
    bounds(),
    bounds("fails_though_stored lapses_though_alive", prompts=1, steps=1, faults=2),
    bounds("rejected filtered fails server_dies arrives_late", batch=2, prompts=3),
    bounds("", eta=1, prompts=3, steps=3, faults=0),
    bounds("dies reply_lost", workers=2, prompts=1, steps=1),
    bounds("lapses_though_alive", policy="train"),
    bounds("lapses_though_alive", policy="mask"),
    bounds("master_crashes", prompts=2, resumed=True),
    bounds("machine_fails"),
    bounds("manager_loses_its_tail", prompts=1, steps=1),
    bounds("submits_twice crashes_in_submit rejected manager_restarts", script=True),
    bounds("machine_fails", prompts=1, script=True),
]
LARGE = [
    bounds(prompts=1, steps=1, faults=2),
    bounds("master_crashes", prompts=1, faults=2),
    bounds("rejected filtered arrives_late lapses_though_alive manager_restarts", batch=2, prompts=4),
    bounds("rejected fails_though_stored never_arrives server_dies manager_restarts", eta=1),
    bounds("arrives_late filtered", eta=1, prompts=3, steps=3),
    bounds("dies dies_in_push reply_lost lapses_though_alive", workers=2),
    bounds("arrives_late", eta=1, prompts=3, steps=3, policy="train"),
    bounds("lapses_though_alive", eta=1, prompts=3, steps=3, policy="mask"),
    bounds("master_crashes never_arrives", prompts=3, steps=3, resumed=True),
    bounds("machine_fails master_crashes manager_restarts", prompts=1, steps=1, faults=2),
    bounds("manager_loses_its_tail", prompts=1),
]


EXPLORE = os.environ.get("REALSYS_EXPLORE") == "1"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chosen", SMALL + (LARGE if EXPLORE else []), ids=str)
def test_no_reachable_state_breaks_an_invariant(chosen):
    found = explore(World(chosen), COPIER)
    print(f"{chosen}: {found.states} states, {found.transitions} transitions; ends: {found.finals}")
    enough = chosen.script or chosen.prompts * chosen.epochs >= chosen.batch * chosen.steps
    assert ("tell_trained" in found.finals) == enough, "the trial can be trained to its end"
    assert chosen.kinds <= found.actions.keys(), "a fault that never happened"


def test_batch_that_cannot_fill_ends_by_name():
    """Two prompts make no batch of three, whatever happens to them."""
    found = explore(World(bounds("rejected filtered fails", batch=3, prompts=2, steps=1)), COPIER)
    assert found.finals.keys() == {"give_up"}


# -- seeded defects: the exploration must find each of them


def instead(owner, name, new):
    """``new`` is called with the method that it replaces, and its arguments."""
    old = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *args, **kwargs: new(old, *args, **kwargs))


def nothing(*_, **__): ...


def none_found(*_):
    return []


def any_attempt(finish, ledger, ticket_id, attempt, *rest):
    ticket = ledger.open.get(ticket_id)
    return finish(ledger, ticket_id, ticket.attempt if ticket else attempt, *rest)


def counted_twice(apply, ledger, event):
    apply(ledger, event)
    ledger.counts.open["finished"] += event.outcome == "accepted"


def kept(apply, ledger, event):
    """A group that is filtered out keeps its place."""
    filtered = event.outcome == "filtered"
    apply(ledger, msgspec.structs.replace(event, outcome="accepted") if filtered else event)


def one_more(oldest_weights, bound, n):
    return oldest_weights(bound, n - 1)


def no_record(lose, state, *args):
    before = list(state.outbox)
    lost = lose(state, *args)
    state.outbox = before
    return lost


def keeps_the_finished(apply, ledger, event):
    finished = {name: ticket for name, ticket in ledger.open.items() if ticket.state == "finished"}
    for name in finished:
        del ledger.open[name]
    apply(ledger, event)
    ledger.open |= finished


def first_attempts(never_arrived, ledger, held, *rest):
    """A group that is held in an older attempt than the one that finished counts as missing."""
    return never_arrived(ledger, {t for t in held if t in ledger.open and ledger.open[t].attempt == 0}, *rest)


def forgets(add, buffer, samples):
    """Discard the groups in training."""
    for sample in samples:
        buffer._training.pop(sample.ticket_id, None)
    return add(buffer, samples)


def any_claim(claim, ledger, version, tickets, *rest):
    return claim(ledger, version, [ticket for ticket in tickets if ticket in ledger.open], *rest)


def not_kept(claim, ledger, *args):
    return None, []


def claimed_too(lose, ledger, *args):
    for ticket in ledger.open.values():
        if ticket.state == "claimed":
            ledger._move(ticket, "running")
    return lose(ledger, *args)


def never_synced(commit, world, before):
    world.syncs = False
    commit(world, before)


def any_side(publish, servers, published):
    servers.trainer_incarnation = ""
    return publish(servers, published)


def always_new(submit, ledger, start, prompts, now):
    return submit(ledger, ledger.total_submitted, prompts, now)


def not_taken(advance, ledger, event):
    before = ledger.submitted.copy()
    advance(ledger, event)
    ledger.submitted = before


LAPSE, CRASH, OLD = bounds("lapses_though_alive"), bounds("master_crashes"), SMALL[3]
MASKED = bounds("", eta=1, prompts=3, steps=3, faults=0, policy="mask")
ENDS, CLAIM, LOSES = SMALL[1], bounds("claims_twice"), SMALL[9]
SCRIPT = bounds("submits_twice", prompts=1, steps=1, script=True)
#: Defect, patch, bounds that reach it, part of the message.
DEFECTS = [
    ("a drop gives no quota back", instead(Ledger, "drop", nothing), MASKED, "has ended"),
    ("a filtered group keeps its quota", instead(Ledger, "_apply_finished", kept), bounds("filtered"), "truth"),
    ("a finish counts twice", instead(Ledger, "_apply_finished", counted_twice), LAPSE, "but in truth"),
    ("any finish counts", instead(Ledger, "finish", any_attempt), LAPSE, "but in truth"),
    ("one ticket too many", instead(StalenessBound, "oldest_weights", one_more), LAPSE, "is over the bound"),
    ("no record of a lapse", instead(ManagerState, "_lose", no_record), LAPSE, "not what the journal says"),
    ("places are kept", instead(Reservations, "release", nothing), LAPSE, "are not given back"),
    ("lost tickets stay lost", instead(Ledger, "lose", none_found), bounds("dies"), "in _death_noticed"),
    ("a copy is new", instead(SequenceBuffer, "add", forgets), bounds("arrives_twice", eta=1), "is trained again"),
    ("old tokens are trained", instead(IntakeState, "_oldest_trained", nothing), MASKED, "is too old"),
    ("a stale group is dropped for good", instead(Ledger, "reissue_stale", none_found), OLD, "but in truth"),
    ("nothing is missed", instead(Ledger, "never_arrived", none_found), bounds("never_arrives", prompts=1), "stuck"),
    (
        "what is held is missed",
        instead(Ledger, "never_arrived", first_attempts),
        bounds("lapses_though_alive", prompts=1),
        "without end",
    ),
    ("the buffered is kept", instead(Ledger, "_apply_rolled_back", keeps_the_finished), CRASH, "but in truth"),
    ("an old side may publish", instead(ServerRegistry, "publish", any_side), CRASH, "of the side before"),
    ("whatever arrived is trained", instead(Ledger, "claim", any_claim), ENDS, "in _claim"),
    ("a claim is not kept", instead(Ledger, "claim", not_kept), CLAIM, "but in truth"),
    ("what is claimed can be lost", instead(Ledger, "lose", claimed_too), bounds("dies"), "in _death_noticed"),
    ("a repeated submission is new", instead(Ledger, "submit", always_new), SCRIPT, "repeated /submit"),
    ("a submitted prompt is taken twice", instead(Ledger, "_advance", not_taken), SCRIPT, "in _check_prompts"),
    ("a claim is not replayed", instead(Ledger, "_apply_claimed", nothing), CLAIM, "but in truth"),
    (
        "nothing is synced",
        instead(WorldState, "_commit", never_synced),
        bounds("machine_fails"),
        "older than the checkpo",
    ),
    ("what is unknown is passed over", instead(Ledger, "require", nothing), LOSES, "has never heard of is passed over"),
    ("no end is noticed", instead(StuckCheck, "check", nothing), bounds("rejected"), "stuck"),
]


@pytest.mark.parametrize(("defect", "chosen", "said"), [d[1:] for d in DEFECTS], ids=[d[0] for d in DEFECTS])
def test_exploration_finds_a_seeded_defect(defect, chosen, said, monkeypatch):
    defect(monkeypatch)
    with pytest.raises(Violation, match=said):
        explore(World(chosen), COPIER, at_most=700 if said == "without end" else 3000)


# -- without an end of the data


@pytest.mark.parametrize("outcome", ["rejected", "failed", "filtered"])
def test_endless_data_without_accepted_group_ends_by_name(outcome):
    world = World(Bounds(batch=2, prompts=3, epochs=0, attempts=1, faults=0))
    check = StuckCheck(2, 10)
    assert check.check(status(world.manager, 0.0, 0.0), 0) is None
    reason = None
    most = FEWEST_FILTERED if outcome == "filtered" else FEWEST_FAILURES
    for turn in range(most):
        assert reason is None, f"given up after {turn} groups"
        (ticket,) = world.manager.allocate(AllocateRequest("rollout_worker/0", 1), 0.0).tickets
        world.manager.finish(FinishRequest(ticket.ticket_id, 0, "w", outcome, "why"), 0.0)  # type: ignore[arg-type]
        reason = check.check(status(world.manager, 0.0, 0.0), 0)
    assert reason is not None and f"{most} groups were" in reason and f"{outcome} why" in reason
