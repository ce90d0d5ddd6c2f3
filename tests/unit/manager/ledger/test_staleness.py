"""The admission inequality."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.manager.ledger.staleness import StalenessBound

bounds = st.builds(StalenessBound, st.integers(1, 600), st.integers(0, 20))
versions = st.integers(0, 10_000)


@given(bounds, versions)
def test_capacity_is_the_largest_n_that_is_admitted(bound: StalenessBound, version: int) -> None:
    capacity = bound.capacity(version)
    assert bound.admits(capacity, version)
    assert not bound.admits(capacity + 1, version)
    assert capacity == bound.batch_groups * (version + bound.eta + 1)


@given(bounds, versions, st.integers(1, 10_000_000))
def test_admits_is_the_papers_inequality(bound: StalenessBound, version: int, n: int) -> None:
    assert bound.admits(n, version) == ((n - 1) // bound.batch_groups <= version + bound.eta)
    assert bound.admits(n, version) == (n <= bound.capacity(version))
    assert bound.headroom(n, version) == max(0, bound.capacity(version) - n)


@given(bounds, versions)
def test_one_version_makes_room_for_one_batch(bound: StalenessBound, version: int) -> None:
    assert bound.capacity(version + 1) - bound.capacity(version) == bound.batch_groups


def test_eta_zero_is_synchronous() -> None:
    bound = StalenessBound(batch_groups=4, eta=0)
    assert [bound.capacity(version) for version in range(3)] == [4, 8, 12]
    assert bound.may_serve(3, 3) and not bound.may_serve(2, 3)


@given(bounds, versions, versions)
def test_weights_from_the_future_never_serve(bound: StalenessBound, served: int, version: int) -> None:
    assert bound.may_serve(served, version) == (version - bound.eta <= served <= version)


@pytest.mark.parametrize(("batch", "eta"), [(0, 1), (-1, 0), (1, -1)])
def test_senseless_bounds_are_refused(batch: int, eta: int) -> None:
    with pytest.raises(ValueError, match="batch_groups"):
        StalenessBound(batch, eta)
