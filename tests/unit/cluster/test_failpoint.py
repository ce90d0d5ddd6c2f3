"""Failpoints: the product's hook, and the faults that the tests install behind it."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from realsys.cluster import failpoint as hook
from realsys.cluster.failpoint import MODULE, arm, failpoint
from realsys.errors import ConfigError
from tests.support.faults.plan import FOLDER, Fault, environment, parse
from tests.support.faults.points import POINTS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def armed(tmp_path, monkeypatch):
    """Arm this process as worker ``a/0`` with faults; disarm it after the test."""
    monkeypatch.setattr(hook._Process, "action", None)

    def arm_with(*faults, worker="a/0"):
        named = [msgspec.structs.replace(fault, name=str(number)) for number, fault in enumerate(faults)]
        for name, value in environment(named, tmp_path).items():
            monkeypatch.setenv(name, value)
        arm(worker)

    return arm_with


def fault(point="rollout.push", action="drop", worker="a/0", **fields):
    return Fault("0", worker, point, action, **fields)


def test_product_passes_each_point_and_no_other():
    sources = [p for folder in ("realsys", "workers", "launch") for p in (ROOT / folder).rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources if path.name != "failpoint.py")
    assert set(re.findall(r"\bfailpoint(?:\(\s*|=)\"([^\"]+)\"", text)) == set(POINTS)


def test_nothing_is_armed_without_the_variable(monkeypatch):
    monkeypatch.delenv(MODULE, raising=False)
    monkeypatch.setattr(hook._Process, "action", None)
    arm("a/0")
    assert hook._Process.action is None and failpoint("rollout.push") == ""


def test_unknown_module_ends_a_process_by_name(monkeypatch):
    monkeypatch.setenv(MODULE, "no_such_faults")
    with pytest.raises(ModuleNotFoundError, match="no_such_faults"):
        arm("a/0")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"{", "is not a list of faults"),
        (b'[{"name": "x", "worker": "a/0", "point": "rollout.pusch", "action": "kill"}]', "no such point"),
        (b'[{"name": "x", "worker": "a/0", "point": "rollout.push", "action": "kil"}]', "Invalid enum value"),
        (b'[{"name": "x", "worker": "a/0", "point": "rollout.push", "action": "kill", "hits": 2}]', "unknown field"),
    ],
)
def test_wrong_plan_is_refused(text, problem):
    with pytest.raises(ConfigError, match=problem):
        parse(text)


@pytest.mark.parametrize("folder", [None, "/no/such/folder"])
def test_plan_without_a_folder_is_refused(monkeypatch, tmp_path, folder):
    monkeypatch.setenv(MODULE, environment([], tmp_path)[MODULE])
    if folder is None:
        monkeypatch.delenv(FOLDER, raising=False)
    else:
        monkeypatch.setenv(FOLDER, folder)
    with pytest.raises(ConfigError, match=FOLDER):
        arm("a/0")


def test_unknown_point_is_a_defect(armed):
    armed(fault())
    with pytest.raises(AssertionError, match="no such failpoint"):
        failpoint("rollout.pusch")


def test_fault_fires_at_its_pass_and_once(armed, tmp_path):
    """Once in the whole run: a process that is started again finds the marker file."""
    armed(fault(hit=2))
    assert [failpoint("rollout.push") for _ in range(4)] == ["", "drop", "", ""]
    assert failpoint("rollout.finish") == ""
    armed(fault(hit=1))  # the process was restarted
    assert failpoint("rollout.push") == ""
    assert (tmp_path / "fired-0").exists()


def test_fault_hits_its_worker_only(armed):
    armed(fault(worker="b/*"), fault(action="garbage"))
    assert failpoint("rollout.push") == "garbage"
    armed(fault(worker="b/*"), worker="b/7")
    assert failpoint("rollout.push") == "drop"


def test_fault_waits_for_gate_and_step(armed, tmp_path):
    armed(fault(point="master.batch", gate="open", at=3))
    assert failpoint("master.batch", at=3) == ""
    (tmp_path / "open").touch()
    assert [failpoint("master.batch", at=step) for step in (2, 3)] == ["", "drop"]


def test_full_disk_stays_full(armed):
    armed(fault(action="error", every=True))
    for _ in range(2):
        with pytest.raises(OSError) as caught:
            failpoint("rollout.push", Path("/some/file"))
        assert caught.value.errno == errno.ENOSPC and "/some/file" in str(caught.value)


def test_hold_waits_for_its_file(armed, tmp_path):
    """Other faults of the same point have their turn afterwards."""
    armed(fault(action="hold", until="go"), fault())
    passed = []
    waiting = threading.Thread(target=lambda: passed.append(failpoint("rollout.push")))
    waiting.start()
    assert not passed
    (tmp_path / "go").touch()
    waiting.join(60)
    assert passed == ["drop"]


@pytest.mark.parametrize("how", ["truncate", "flip"])
def test_damage_changes_a_file_in_its_middle(armed, tmp_path, how):
    folder = tmp_path / "version"
    folder.mkdir()
    (folder / "a.bin").write_bytes(bytes(8))
    (folder / "b.json").write_bytes(bytes(9))
    armed(fault(action=how, file="*.json"))
    failpoint("rollout.push", folder)
    assert (folder / "a.bin").read_bytes() == bytes(8)
    expected = bytes(4) if how == "truncate" else bytes(4) + b"\x10" + bytes(4)
    assert (folder / "b.json").read_bytes() == expected


def test_jump_moves_the_wall_clock_only(armed, monkeypatch):
    for name in ("time", "time_ns"):
        monkeypatch.setattr(time, name, getattr(time, name))  # restored after the test
    armed(fault(action="jump", seconds=-3600))
    wall, wall_ns, monotonic = time.time(), time.time_ns(), time.monotonic()
    failpoint("rollout.push")
    assert wall - time.time() > 3000 and wall_ns - time.time_ns() > 3000e9
    assert time.monotonic() >= monotonic


def test_another_worker_can_be_the_victim(armed, tmp_path):
    victim = subprocess.Popen(["sleep", "600"])
    try:
        (tmp_path / "pid-b-0").write_text(str(victim.pid))
        armed(fault(action="kill", victim="b/0"))
        failpoint("rollout.push")
        assert victim.wait(60) == -signal.SIGKILL
    finally:
        victim.kill()
        victim.wait()


SUSPENDED = """
import time
from realsys.cluster.failpoint import arm, failpoint
arm("a/0")
began = time.monotonic()
failpoint("rollout.push")
print(time.monotonic() - began)
"""


@pytest.mark.processes
def test_suspended_process_is_woken_again(tmp_path):
    """Also: a process outside of the checkout finds the tests' module through the environment."""
    plan = environment([fault(action="stop", seconds=0.3)], tmp_path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", SUSPENDED],
        env={**os.environ, **plan},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) >= 0.3
