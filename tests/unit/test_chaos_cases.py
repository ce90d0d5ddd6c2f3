"""The schedule of the chaos suite: complete, the same for the same seed, and of points that exist."""

from realsys.cluster.failpoint import POINTS
from tests.chaos.cases import PER_RUN, PHASES, STATELESS, SUSPENDED_S, TRAINING, full, short


def test_every_kind_of_worker_meets_both_signals_at_every_phase():
    rows = {(row.fault, row.phase) for case in full(3) for row in case.rows}
    for victim in (*STATELESS, *TRAINING):
        for phase in PHASES:
            for signal in ("SIGKILL", f"SIGSTOP {SUSPENDED_S:g} s"):
                assert (f"{signal} {victim.removesuffix('/0')}", phase) in rows


def test_the_seed_orders_the_phases_and_changes_nothing_else():
    assert full(1) == full(1) != full(2)
    assert {row for case in full(1) for row in case.rows} == {row for case in full(2) for row in case.rows}


def test_names_are_unique_points_exist_and_a_run_that_is_to_end_has_one_row():
    for cases in (full(1), short()):
        assert len({case.name for case in cases}) == len(cases)
        # A run's processes are found by the begin of its id, which is its name and a dash.
        assert not [(a.name, b.name) for a in cases for b in cases if b.name.startswith(f"{a.name}-")]
        for case in cases:
            assert all(fault.point in POINTS for row in case.rows for fault in row.faults)
            assert all(row.faults or row.act for row in case.rows)
            assert not case.ends or len(case.rows) == 1


def test_no_stateless_worker_is_hit_so_often_that_its_back_off_takes_over():
    for case in full(1):
        if "stateless" in case.name:
            for victim in STATELESS:
                assert sum(row.fault.endswith(victim.removesuffix("/0")) for row in case.rows) <= PER_RUN
