"""Waits on a thread that a stop ends."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from realsys.cluster.process import gpu_peak_bytes, on_thread
from realsys.errors import NameStoreError, WaitTimeout

BOUND_S = 60.0


def never(_: Callable[[], None]) -> None:
    """Take a callback for a stop that does not come."""


def test_result_of_the_thread_is_returned() -> None:
    assert on_thread(lambda: 7, never, BOUND_S, lambda: "") == 7


def test_error_of_the_thread_is_raised() -> None:
    def fail() -> None:
        raise NameStoreError("gone")

    with pytest.raises(NameStoreError, match="gone"):
        on_thread(fail, never, BOUND_S, lambda: "")


@pytest.mark.parametrize(
    ("on_stop", "timeout_s", "message"),
    [
        (lambda callback: callback(), BOUND_S, "stopped while waiting for a peer"),
        (never, 0.01, "waited 0.01 s for a peer"),
    ],
    ids=["stop", "deadline"],
)
def test_wait_ends_before_the_thread(
    on_stop: Callable[[Callable[[], None]], None], timeout_s: float, message: str
) -> None:
    release = threading.Event()
    with pytest.raises(WaitTimeout) as raised:
        on_thread(lambda: release.wait(BOUND_S), on_stop, timeout_s, lambda: "a peer")
    release.set()
    assert str(raised.value) == message


@pytest.mark.parametrize(("initialized", "peak"), [(True, 9), (False, 0)])
def test_gpu_peak_is_that_of_the_fullest(monkeypatch: pytest.MonkeyPatch, initialized: bool, peak: int) -> None:
    """A process that has not used its GPU is not made to: that would take hundreds of MiB of it."""
    cuda = SimpleNamespace(
        is_initialized=lambda: initialized, device_count=lambda: 2, max_memory_allocated=[4, 9].__getitem__
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert gpu_peak_bytes() == peak


def test_process_without_torch_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert gpu_peak_bytes() == 0
