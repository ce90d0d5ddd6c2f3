"""The schedule of the chaos suite: complete, the same for the same seed, and of points that exist."""

import random

from tests.chaos.schedule.cases import chosen, full, short
from tests.chaos.schedule.nodes import runs
from tests.chaos.schedule.rows import PHASES, SUSPENDED
from tests.chaos.schedule.signals import PER_RUN, STATELESS, TRAINING
from tests.support.faults.points import POINTS

OF_AGENTS = len(runs(random.Random(0)))  # runs whose agents fail; they come first


def rows_of(cases):
    return [(row.fault, row.phase) for case in cases for row in case.rows]


def faults_of(cases):
    return [fault for fault, _ in rows_of(cases)]


def test_each_worker_meets_both_signals_at_each_phase():
    rows = rows_of(case for case in full(3) if case.name.startswith("signals-"))
    wanted = {
        (f"{signal} {victim.removesuffix('/0')}", phase)
        for victim in (*STATELESS, *TRAINING)
        for phase in PHASES
        for signal in ("SIGKILL", SUSPENDED)
    }
    assert len(rows) == len(wanted) and set(rows) == wanted


def test_each_socket_meets_each_fault_of_its_messages():
    found = set(rows_of(case for case in full(1) if case.name == "messages"))
    for what, socket in (
        ("message", "push-pull"),
        ("acknowledgement", "push-pull"),
        ("request", "request-reply"),
        ("reply", "request-reply"),
        ("notice", "request-reply"),
        ("request", "manager HTTP, rollout"),
        ("request", "manager HTTP, training"),
        ("request", "server HTTP, rollout"),
        ("request", "server HTTP, update"),
    ):
        assert {(f"{what} {how}", socket) for how in ("lost", "twice", "garbled")} <= found


def test_seed_changes_order_and_agents():
    """It also chooses the phases at which agents fail."""
    assert full(1) == full(1) != full(2)
    assert sorted(faults_of(full(1))) == sorted(faults_of(full(2)))
    assert sorted(rows_of(full(1)[OF_AGENTS:])) == sorted(rows_of(full(2)[OF_AGENTS:]))


def test_half_of_the_runs_go_over_agents():
    for seed in range(5):
        of_workers = [case for case in full(seed)[OF_AGENTS:] if case.needs != "sglang"]
        over = [case for case in of_workers if case.nodes]
        assert len(over) == len(of_workers) // 2 and over == chosen(of_workers, ["over agents"], [])
    assert len({frozenset(case.name for case in full(seed) if case.nodes) for seed in range(5)}) > 1


def test_cases_are_well_formed():
    """Names are unique, points exist, a run that must end has one row."""
    for cases in (full(1), short()):
        assert len({case.name for case in cases}) == len(cases)
        # A run's processes are found by the begin of its id, which is its name and a dash.
        assert not [(a.name, b.name) for a in cases for b in cases if b.name.startswith(f"{a.name}-")]
        assert len(set(rows_of(cases))) == len(rows_of(cases))
        for case in cases:
            assert all(fault.point in POINTS for row in case.rows for fault in row.faults)
            assert all(row.faults or row.act for row in case.rows)
            assert not case.ends or len(case.rows) == 1


def test_stateless_workers_are_hit_a_few_times_only():
    """With more restarts in one run their back-off would take over."""
    for seed in range(5):
        for case in full(seed):
            if case.name.startswith("signals-"):
                for victim in STATELESS:
                    assert sum(row.fault.endswith(victim.removesuffix("/0")) for row in case.rows) <= PER_RUN


def test_runs_and_rows_are_chosen_by_name():
    """A run by its name, a row by its fault and phase."""
    (case,) = chosen(full(1), ["disk"], ["EIO once, stage"])
    assert case.name == "disk" and rows_of([case]) == [("EIO once", "stage")]
    assert chosen(full(1), [], []) == full(1)
    assert chosen(full(1), ["no such"], []) == []
