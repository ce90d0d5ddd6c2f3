"""A chaos suite that is stopped leaves nothing behind."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.polling import poll

pytestmark = [pytest.mark.system, pytest.mark.alone, pytest.mark.timeout(300)]
BEFORE_ANY_STOP_TIMEOUT_S = 30.0  # on a loaded machine; the runs themselves would take minutes


def mine(folder):
    """Processes whose command line has the folder in it."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(folder) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_runs_and_leaves_nothing(tmp_path, number):
    names = ["tmpfs-freed", "signals-0"] if os.geteuid() == 0 else ["signals-1", "signals-0"]
    argv = [sys.executable, "-m", "tests.chaos", "--jobs", "2", "--only", *names]
    log = tmp_path / "log"
    with log.open("w") as output:
        chaos = subprocess.Popen(
            argv, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=output, stderr=output, start_new_session=True
        )
    try:
        # Wait until it has workers; a worker that waits in a failpoint does not handle signals.
        for name in names:
            masters = functools.partial(tmp_path.glob, f"*/{name}/faults/pid-master*")
            poll(lambda pids=masters: list(pids()), f"a master in {name}", 120, log.read_text)
        if os.geteuid() == 0:
            poll(lambda: str(tmp_path) in Path("/proc/mounts").read_text(), "a disk of its own", 120, log.read_text)
        chaos.send_signal(number)
        began = time.monotonic()
        assert chaos.wait(120) == 128 + number, log.read_text()
        assert time.monotonic() - began < BEFORE_ANY_STOP_TIMEOUT_S
    finally:
        chaos.kill()
        chaos.wait()
    assert mine(tmp_path) == []
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    ours = ("torchinductor_", f"realsys-{os.getuid()}")  # one per user: torch's cache, and the folder of our sockets
    left = [path for path in tmp_path.iterdir() if not path.name.startswith(ours)]
    assert [path.name for path in left] == ["log"], list(tmp_path.rglob("*"))[:20]
    assert f"stopped by {signal.Signals(number).name}; 0 runs of 2 were over" in log.read_text()
