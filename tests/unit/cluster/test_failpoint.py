"""Failpoints: every point is reached somewhere, a fault fires once, and nothing happens where none is armed."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from realsys.cluster import failpoint as module
from realsys.cluster.failpoint import FAULTS, FOLDER, POINTS, arm, failpoint, parse
from realsys.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def armed(tmp_path, monkeypatch):
    """Arms this process as worker ``a/0`` with the given faults; disarmed afterwards."""
    monkeypatch.setattr(module._Process, "plan", None)

    def arm_with(*faults, worker="a/0"):
        monkeypatch.setenv(FAULTS, json.dumps([{"name": str(k), **fault} for k, fault in enumerate(faults)]))
        monkeypatch.setenv(FOLDER, str(tmp_path))
        arm(worker)

    return arm_with


def fault(point="rollout.push", action="drop", worker="a/0", **fields):
    return {"worker": worker, "point": point, "action": action, **fields}


def test_each_point_is_reached_somewhere_and_no_other():
    sources = [p for folder in ("realsys", "workers", "launch") for p in (ROOT / folder).rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources if path.name != "failpoint.py")
    assert set(re.findall(r"\bfailpoint\(\s*\"([^\"]+)\"", text)) == set(POINTS)


def test_nothing_is_armed_without_the_variable(monkeypatch):
    monkeypatch.delenv(FAULTS, raising=False)
    monkeypatch.setattr(module._Process, "plan", None)
    arm("a/0")
    assert module._Process.plan is None and failpoint("rollout.push") == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is no list of faults"),
        ('[{"name": "x", "worker": "a/0", "point": "rollout.pusch", "action": "kill"}]', "no such point"),
        ('[{"name": "x", "worker": "a/0", "point": "rollout.push", "action": "kil"}]', "Invalid enum value"),
        ('[{"name": "x", "worker": "a/0", "point": "rollout.push", "action": "kill", "hits": 2}]', "unknown field"),
    ],
)
def test_a_wrong_plan_is_refused(text, problem):
    with pytest.raises(ConfigError, match=problem):
        parse(text)


def test_markers_need_a_folder(monkeypatch):
    monkeypatch.setenv(FAULTS, "[]")
    monkeypatch.delenv(FOLDER, raising=False)
    with pytest.raises(ConfigError, match=FOLDER):
        arm("a/0")


def test_a_fault_fires_at_its_pass_and_once_in_the_whole_run(armed, tmp_path):
    armed(fault(hit=2))
    assert [failpoint("rollout.push") for _ in range(4)] == ["", "drop", "", ""]
    assert failpoint("rollout.finish") == ""
    armed(fault(hit=1))  # the process was restarted
    assert failpoint("rollout.push") == ""
    assert (tmp_path / "fired-0").exists()


def test_it_is_meant_for_its_worker_only(armed):
    armed(fault(worker="b/*"), fault(action="garbage"))
    assert failpoint("rollout.push") == "garbage"
    armed(fault(worker="b/*"), worker="b/7")
    assert failpoint("rollout.push") == "drop"


def test_a_gate_and_a_step_hold_it_back(armed, tmp_path):
    armed(fault(point="master.batch", gate="open", at=3))
    assert failpoint("master.batch", at=3) == ""
    (tmp_path / "open").touch()
    assert [failpoint("master.batch", at=step) for step in (2, 3)] == ["", "drop"]


def test_a_full_disk_stays_full(armed):
    armed(fault(action="error", every=True))
    for _ in range(2):
        with pytest.raises(OSError) as caught:
            failpoint("rollout.push", Path("/some/file"))
        assert caught.value.errno == errno.ENOSPC and "/some/file" in str(caught.value)


def test_hold_waits_for_its_file_and_then_lets_other_faults_have_their_turn(armed, tmp_path):
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


def test_the_wall_clock_jumps_and_the_monotonic_one_does_not(armed, monkeypatch):
    for name in ("time", "time_ns"):
        monkeypatch.setattr(time, name, getattr(time, name))  # put back afterwards
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
import sys, time
sys.path.insert(0, sys.argv[1])
from realsys.cluster.failpoint import arm, failpoint
arm("a/0")
began = time.monotonic()
failpoint("rollout.push")
print(time.monotonic() - began)
"""


def test_a_suspended_process_is_woken_again(tmp_path):
    env = {
        **os.environ,
        FAULTS: json.dumps([{"name": "0", **fault(action="stop", seconds=0.3)}]),
        FOLDER: str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", SUSPENDED, str(ROOT)], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) >= 0.3
