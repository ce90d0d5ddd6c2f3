"""realsys doctor: a line for each part of the machine, and what to do where one is too small or missing."""

import importlib.metadata
import resource

import pytest

from realsys.launch.cli import main
from realsys.launch.commands import doctor


def test_healthy_machine_fails_nothing(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    looked_at = {line[6:22].strip() for line in lines}
    assert {"machine", "packages", "sglang", "shared memory", "sockets", "open files", "etcd", "sandbox"} <= looked_at
    assert all(line[:6].strip() in ("ok", "note", "-") for line in lines)


def test_packages_of_other_versions_are_named(monkeypatch, capsys):
    asked = ["numpy>=999", "no-such-package<2", "torch", "nothing-either; extra == 'docs'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: asked)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.startswith("fails")]
    assert [line.split()[1] for line in failed] == ["numpy", "no-such-package"]
    assert failed[0].endswith("and realsys needs >=999: pip install 'numpy>=999'")
    assert "not installed, and realsys needs <2: pip install 'no-such-package<2'" in failed[1]
    assert any("1 of 3 as realsys needs them" in line for line in lines)


@pytest.mark.parametrize(
    ("finding", "state", "words"),
    [
        (doctor.shared_memory(64 << 20, 64 << 20), doctor.NOTE, "--shm-size=16g"),
        (doctor.shared_memory(9 << 30, 16 << 30), doctor.OK, "9.0 GiB of 16.0 GiB free"),
        (doctor.open_files(1024), doctor.NOTE, "ulimit -Hn"),
        (doctor.open_files(1 << 20), doctor.OK, "1,048,576 a process"),
        (doctor.open_files(resource.RLIM_INFINITY), doctor.OK, "unlimited"),
        (doctor.attention("FA3", 9), doctor.OK, "FlashAttention 3"),
        (doctor.attention("", 9), doctor.NOTE, "module flash_attn_interface) or FlashAttention 4 (pip install"),
        (doctor.attention("", 10), doctor.NOTE, "FlashAttention 2: FlashAttention 4 (pip install flash-attn-4) is"),
        (doctor.attention("", 8), doctor.OK, "the only one for this GPU"),
    ],
)
def test_small_limits_come_with_a_remedy(finding, state, words):
    assert (finding.state, words in finding.text) == (state, True), finding
