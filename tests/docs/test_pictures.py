"""The wait of `make pictures` for its run."""

import subprocess
import sys

import pytest

from realsys.errors import WaitTimeout
from tests.support.docs import pictures

pytestmark = pytest.mark.processes


def _process(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)


def test_run_that_hangs_is_stopped(monkeypatch):
    monkeypatch.setattr(pictures, "_LOOK_S", 0.0)
    looks: list[int] = []
    with _process("import sys; sys.stdin.read()") as run:
        with pytest.raises(WaitTimeout, match="the end of the run whose pictures are made"):
            pictures.watch(run, lambda: looks.append(1), timeout_s=0.0)
        assert run.poll() is not None and looks


def test_run_that_ends_is_looked_at():
    looks: list[int] = []
    with _process("") as run:
        pictures.watch(run, lambda: looks.append(1), timeout_s=60.0)
    assert run.returncode == 0 and looks
