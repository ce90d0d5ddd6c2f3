"""Isolation: what a program may see, and refusals of machines that lack a part."""

import errno
import platform
import shutil
import socket
import struct

import pytest

from realsys.errors import SandboxError
from realsys.reward.sandbox import settings
from realsys.reward.sandbox.inside import kernel
from realsys.reward.sandbox.settings import IsolationSettings


@pytest.fixture
def no_cache():
    settings._bwrap.cache_clear()
    yield
    settings._bwrap.cache_clear()


def test_missing_bubblewrap_is_refused(monkeypatch, no_cache):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SandboxError, match=r"bwrap is not found: install bubblewrap"):
        settings.zygote_command(IsolationSettings(), 3, "{}")


def test_no_isolation_needs_no_bubblewrap(monkeypatch, no_cache):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert settings.zygote_command(IsolationSettings("none"), 3, "{}")[0] == settings.python()


def test_full_isolation_refuses_missing_landlock(monkeypatch):
    monkeypatch.setattr(kernel, "landlock_abi", lambda: 0)
    with pytest.raises(SandboxError, match="lacks Landlock"):
        settings.setup_of(IsolationSettings("full"))
    assert settings.setup_of(IsolationSettings("available"))["namespaces"]


def test_readable_folder_that_is_hidden_is_refused(tmp_path):
    with pytest.raises(SandboxError, match=f"{tmp_path} is in a folder that programs do not see"):
        settings.setup_of(IsolationSettings(readable=(str(tmp_path),)))


def test_secrets_are_not_readable(tmp_path):
    paths = settings.readable_paths(IsolationSettings(readable=(str(tmp_path),)))
    assert str(tmp_path.resolve()) in paths
    assert not {"/", "/home", "/root", "/run", "/var", "/proc", "/etc", "/etc/shadow", "/tmp"} & set(paths)


def test_rules_name_outermost_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "is_hidden", lambda path: False)
    inner, other = tmp_path / "a" / "b", tmp_path / "ab"
    readable = IsolationSettings(readable=(str(inner), str(tmp_path / "a"), str(other)))
    paths = settings.setup_of(readable)["readable"]
    assert {str(tmp_path / "a"), str(other), "/usr"} <= set(paths)
    assert not [path for path in paths if path == str(inner) or path.startswith("/etc/")]


def test_environment_is_made_anew(monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    assert settings.environment().keys() == {"PATH", "HOME", "LANG", "OMP_NUM_THREADS"}


def test_filter_jumps_stay_inside():
    program = kernel.filter_program(kernel.ALL_NAMESPACES)
    if program is None:
        pytest.skip("no table of system calls for this architecture")
    steps = [program[at : at + 8] for at in range(0, len(program), 8)]
    for place, step in enumerate(steps):
        if int.from_bytes(step[:2], "little") in (0x15, 0x25, 0x35, 0x45):
            assert place + 1 + max(step[2], step[3]) < len(steps)


def _answer(program, call, first=0, second=0, fourth=0):
    """Return what a filter answers to a call. Codes are those of struct sock_filter."""
    steps = list(struct.iter_unpack("=HBBI", program))
    data = {0: call, 4: kernel._MACHINES[platform.machine()][1], 16: first, 24: second, 40: fourth}
    place = loaded = 0
    while True:
        code, true, false, value = steps[place]
        if code == 0x06:
            return value
        if code == 0x20:
            loaded, jump = data[value], 0
        else:
            met = {0x15: loaded == value, 0x25: loaded > value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
            jump = true if met else false
        place += 1 + jump


def test_filter_refuses_exactly_the_table():
    program = kernel.filter_program(kernel.ALL_NAMESPACES)
    if program is None:
        pytest.skip("no table of system calls for this architecture")
    refused = {call for call in range(kernel.NEWEST + 1) if _answer(program, call, 1) == 0x50000 | errno.EPERM}
    special = {kernel.number(name) for name in kernel._SPECIAL}
    assert refused == {kernel.number(name) for name in kernel._NUMBERS} - special - {None}
    assert _answer(program, kernel.number("clone"), kernel.CLONE_NEWUSER) == 0x50000 | errno.EPERM
    memory = [_answer(program, kernel.number("mmap"), fourth=flags) for flags in (0x01, 0x22, 0x21, 0x8031)]
    assert [answer == 0x50000 | errno.EPERM for answer in memory] == [False, False, True, True]
    pairs = [
        _answer(program, kernel.number("socketpair"), family, kind)
        for family, kind in (
            (socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK),
            (socket.AF_INET, socket.SOCK_STREAM),
            (socket.AF_UNIX, socket.SOCK_DGRAM),
            (socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC),
        )
    ]
    assert [answer == 0x50000 | errno.EPERM for answer in pairs] == [False, True, True, True]
    assert _answer(program, kernel.NEWEST + 1) == 0x50000 | errno.ENOSYS
