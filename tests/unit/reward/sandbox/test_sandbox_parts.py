"""Parts of the sandbox: isolation, languages, limits, plain data, served programs, unit tests, waiting."""

import ast
import collections
import errno
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest

from realsys.errors import ConfigError, SandboxError
from realsys.reward.sandbox import settings
from realsys.reward.sandbox.inside import confine, kernel, plain
from realsys.reward.sandbox.inside import zygote as module
from realsys.reward.sandbox.inside.plain import Handle, PlainError, decode, encode
from realsys.reward.sandbox.inside.unit_tests import defined, functions_of, modules_of, problem_of, start_of, taken
from realsys.reward.sandbox.inside.zygote import KILLED, ThreadUse, Waiting, Zygote, _Running
from realsys.reward.sandbox.sandbox import Program, ProgramRaised
from realsys.reward.sandbox.settings import (
    BUILTIN,
    CPU,
    CRASHED,
    MEMORY,
    NONE,
    OUTPUT,
    WALL,
    IsolationSettings,
    Language,
    RunEnded,
    RunLimits,
    language_problem,
    languages_of,
)


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


# ---- Commands of other languages: settings and what is missing on this machine


PASCAL = {"source": "main.pas", "compile": ["fpc", "main.pas"], "makes": "main", "run": ["./main"]}


def test_settings_add_and_replace_languages():
    languages = languages_of({"pascal": PASCAL, "bash": {"source": "a.sh", "run": ["sh", "a.sh"]}})
    assert languages["pascal"] == Language(**PASCAL)
    assert languages["bash"].run == ["sh", "a.sh"]
    assert languages["c"] == BUILTIN["c"]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"source": "../main.pas"}, "source is '../main.pas': it must be a file name without a folder"),
        ({"run": []}, "source and run must not be empty"),
        ({"makes": ""}, "compile needs makes"),
        ({"compile": "fpc main.pas"}, "Expected `array`"),
        ({"compiler": []}, "unknown field `compiler`"),
    ],
)
def test_bad_settings_are_named(changed, problem):
    with pytest.raises(ConfigError, match=r"languages\.pascal=.*: .*" + problem):
        languages_of({"pascal": PASCAL | changed})


def test_built_in_languages_have_no_problem():
    assert [name for name, language in BUILTIN.items() if language.problem()] == []


def test_missing_compiler_is_named():
    languages = languages_of({"pascal": PASCAL | {"compile": ["no-such-compiler", "main.pas"]}})
    assert "needs no-such-compiler, which is not found" in language_problem(languages, "pascal", IsolationSettings())


def test_command_that_programs_cannot_see_is_named(tmp_path, monkeypatch):
    """Programs have a /tmp of their own, and no home of the user."""
    tool = tmp_path / "pascal"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    languages = languages_of({"pascal": {"source": "main.pas", "run": [str(tool), "main.pas"]}})
    assert f"needs {tool}, which programs cannot see" in language_problem(languages, "pascal", IsolationSettings())
    assert language_problem(languages, "pascal", IsolationSettings(isolation=NONE)) is None
    monkeypatch.setattr(confine, "TMP", "/no/folder")
    assert language_problem(languages, "pascal", IsolationSettings(readable=(str(tmp_path),))) is None


def test_unknown_language_is_named():
    assert "set data.verifier_args.languages.cobol" in language_problem({}, "cobol", IsolationSettings())


# ---- Limits of a run, and why it failed


def test_limit_of_zero_is_refused():
    with pytest.raises(ValueError, match="wall_s is 0"):
        RunLimits(wall_s=0)


def test_reached_limit_precedes_exit_code():
    assert RunEnded(-9, CPU).reason == CPU
    assert RunEnded(1).reason == CRASHED
    assert RunEnded(0).reason == ""


def test_process_limit_counts_all_calls():
    assert RunLimits(cpu_s=2.0).as_message(calls=3)["process_cpu_s"] == 6.0


# ---- Plain data between processes: it survives the way, and nothing else is read


VALUES = [
    None,
    True,
    -(10**40),
    1.5,
    float("inf"),
    2 + 3j,
    "a\ud800é",
    b"\0\xff",
    [1, (2, [3])],
    {1, (2, 3)},
    frozenset({"a"}),
    {(1, 2): {"x": None}, 3: [4]},
    range(1, 9, 2),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_value_survives(value):
    read = decode(encode(value))
    assert read == value
    assert type(read) is type(value)


def test_subclasses_become_their_base():
    point = collections.namedtuple("point", "x y")
    values = [collections.Counter("aab"), point(1, 2), collections.OrderedDict(a=1), {"k": 1}.keys()]
    assert decode(encode(values)) == [{"a": 2, "b": 1}, (1, 2), {"a": 1}, {"k"}]


def test_lying_text_is_sent_as_it_is():
    class Liar(str):
        def __eq__(self, other):
            return True

        __hash__ = str.__hash__

    assert decode(encode(Liar("wrong"))) != "right"


def test_other_value_is_refused_or_kept():
    with pytest.raises(PlainError, match="object is no plain data"):
        encode([object()])
    kept = []
    read = decode(encode([object()], lambda value: kept.append(value) or len(kept) - 1))
    assert isinstance(read[0], Handle)
    assert len(kept) == 1


def test_endless_value_is_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(PlainError, match="no plain data"):
        encode(endless)


SAME = [{"i": hex(n * sys.hash_info.modulus)} for n in range(1000)]


@pytest.mark.parametrize(
    ("wire", "problem"),
    [
        *[(wire, "JSONDecodeError") for wire in ("", "[")],
        ('{"x": 1}', "unknown tag 'x'"),
        ('{"t": 1}', "no list"),
        ('{"n": "1"}', "no number"),
        ('{"d": [[1]]}', "not enough values"),
        ('{"s": [[]]}', "unhashable"),
        ('{"h": "a"}', "no handle"),
        ('{"r": ["a"]}', "no range"),
        ('{"a": 1, "b": 2}', "not one tag"),
        ("[" * 100_000, "recursion"),
        ('{"i": "zz"}', "'zz'"),
        ('{"b": "0"}', "fromhex"),
        ('{"r": [1, 2, 0]}', "must not be zero"),
        # a set of them takes quadratic time
        (json.dumps({"s": SAME}), "same hash"),
        (json.dumps({"d": [[member, 0] for member in SAME]}), "same hash"),
    ],
    ids=lambda text: text[:20],
)
def test_other_bytes_are_refused(wire, problem):
    with pytest.raises(PlainError, match=problem):
        decode(wire.encode())


# ---- Answers of a served program: whatever it sends, the outside gets plain data or ProgramRaised


LOADED = plain.encode(("ok", None))


class FakeChild:
    """A program that has sent all its answers already, and is still there."""

    left_s, begin, born, ended, limits = 1.0, float("inf"), 0.0, None, RunLimits()

    def __init__(self):
        self.zygote = SimpleNamespace(last=lambda child: RunEnded(0))


@pytest.fixture
def link():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Program(FakeChild(), ours), theirs


def answer(link, *frames, most=1 << 20):
    program, theirs = link
    for frame in frames:
        plain.send(theirs.fileno(), frame)
    theirs.shutdown(socket.SHUT_WR)
    return program.call("f", [1], most)


def test_plain_result_is_returned(link):
    assert answer(link, LOADED, plain.encode(("ok", (1, [2])))) == (1, [2])


@pytest.mark.parametrize(
    ("frames", "reason", "gone"),
    [
        ([LOADED, plain.encode(("raised", ["MemoryError", "Exception"], ""))], MEMORY, False),
        ([LOADED, plain.encode(("raised", ["KeyError"], "x"))], CRASHED, False),
        ([LOADED, plain.encode(("raised", 5, "x"))], CRASHED, True),
        ([LOADED, plain.encode(("raised", [5], 10**5000))], CRASHED, True),
        ([LOADED, plain.encode(("ok",))], CRASHED, True),
        ([LOADED, plain.encode([])], CRASHED, True),
        ([LOADED, b""], CRASHED, True),
        ([LOADED, b"[" * 90_000], CRASHED, True),
        ([LOADED, b" " * 100_000], OUTPUT, True),
        # the program has ended, and one that could not be loaded
        ([LOADED], CRASHED, True),
        ([plain.encode(("raised", ["SyntaxError"], "x"))], CRASHED, True),
    ],
)
def test_other_answer_has_a_reason(link, frames, reason, gone):
    with pytest.raises(ProgramRaised) as raised:
        answer(link, *frames, most=99_999)
    assert (raised.value.reason, raised.value.gone) == (reason, gone)


def test_time_without_a_processor_does_not_count(link):
    """The first wait is longer than the limit; the machine was busy for all of it."""
    program, _ = link
    child, own_s, killed = program._child, [0.01, 9.0], []
    child.limits = RunLimits(cpu_s=0.01, wall_s=0.02)
    child.own_s, child.kill = lambda begin: own_s.pop(0), killed.append
    with pytest.raises(ProgramRaised) as raised:
        program.call("f", [1])
    assert (raised.value.reason, killed, own_s) == (WALL, [WALL], [])


# ---- The source of unit tests: what is run, what is the program's, and what cannot judge


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("assert f(1) == 2", {"f"}),
        ("assert list(map(f, g(1))) == [x for x in h]", {"f", "g"}),
        ("candidate = f\nassert candidate(1)", {"f"}),
        ("for each in (f, g): each(1)", {"f", "g"}),
        ("assert f(1) == EXPECTED", {"f"}),
        ("assert math.isclose(f(1), np.one)", {"f"}),
        ("assert bisect([1], 2) == 1", {"bisect"}),
        ("def f(): pass\nassert sum([f()])", set()),
    ],
)
def test_names_in_use_are_the_programs(source, names):
    assert taken(ast.parse(source)) == names


def test_modules_come_from_the_library():
    assert modules_of(ast.parse("import os\nos.x, math.pi, bisect(1)")) == {"math"}


def test_only_unmentioned_functions_are_called():
    source = "def test_a(): pass\ndef test_b(): pass\ndef helper(): pass\ntest_b()\n"
    assert functions_of(ast.parse(source)) == ["test_a"]


@pytest.mark.parametrize(
    ("source", "function", "names"),
    [
        ("import os\ndef f(x):\n", "f", {"os", "f", "x"}),
        ("def g(): pass\ndef f():\n", "", {"g"}),
        ("class S:\n    def f(self):\n        ", "S.f", {"S", "f", "self"}),
        ("def f():\n    x = 1\n    ", "f", {"f", "x"}),
    ],
)
def test_start_of_a_program_is_read(source, function, names):
    assert defined(start_of(source, function)) == names


def test_text_is_no_start_of_a_program():
    assert start_of("def f( =", "f") is None


@pytest.mark.parametrize(
    "source",
    [
        "import re as r\nx = f()\nassert r.match('a', x)",
        "try:\n    f()\nexcept ValueError as e:\n    assert e.args",
        "match f():\n    case [a, *b]: assert a and b",
        "from math import *\nassert isclose(f(), pi)",
        "assert (lambda v: v)(f()) == g.__name__\ncheck = f, g",
    ],
)
def test_names_that_something_defines_are_taken(source):
    assert problem_of(source, "f", ["", "def g(): pass"]) is None


def test_helpers_of_the_prompt_are_defined():
    assert problem_of("assert K == f()", "f", ["K = 1"]) is None
    assert "line 1: 'K' is not defined" in problem_of("assert K == f()", "f", [])


# ---- Waiting of a program: the machine's fault, or its own


ASLEEP = ThreadUse(False, 0.0, 0.0)


def waiting(*looks, last_pids=None):
    """Return it after looks, one each second."""
    found = Waiting(0.0)
    for second, tasks in enumerate(looks, 1):
        found.look(float(second), dict(enumerate(tasks)), last_pids[second - 1] if last_pids else 7)
    return found


@pytest.mark.parametrize(
    ("looks", "last_pids", "waited_s"),
    [
        # the first process only waits for the second, as with a command, or a program that waits for another
        ([[ASLEEP, ThreadUse(True, 0.25, 0.75)], [ASLEEP, ThreadUse(True, 0.75, 1.25)]], [7, 7], 1.25),
        (
            [
                [ThreadUse(True, 0.1, 0.0)],
                [ThreadUse(True, 0.2, 0.9), ThreadUse(True, 0.1, 0.0)],
                [ThreadUse(True, 0.3, 1.8)],
            ],
            [7, 8, 9],
            0.0,
        ),
        ([[ThreadUse(True, 0.25 * n, 0.5 * n), ThreadUse(True, 0.0, 0.75 * n)] for n in (1, 2)], [0, 0], 1.5),
        ([[ThreadUse(True, 1.0 * n, 0.0), ThreadUse(True, 0.0, 1.0 * n)] for n in (1, 2)], [0, 0], 0.0),
        ([[ASLEEP], [ASLEEP]], [7, 7], 0.0),
    ],
    ids=["one thread", "own children", "several threads once", "its threads run", "asleep"],
)
def test_waiting_for_others_is_free(looks, last_pids, waited_s):
    assert waiting(*looks, last_pids=last_pids).waited_s == waited_s


def test_each_run_has_its_own_waiting():
    found = waiting([ThreadUse(True, 0.0, 1.0)])
    found.begin()
    assert (found.run_s, found.waited_s) == (0.0, 1.0)


def test_time_that_the_host_takes_away_is_free():
    """The thread that ran for 0.4 s had a processor for no longer; on another processor nothing was missing."""
    found = Waiting(0.0)
    found.look(1.0, {0: ThreadUse(True, 0.5, 0.25)}, 7, (10.0, 20.0))
    assert found.waited_s == 0.25
    found.look(2.0, {0: ThreadUse(True, 0.9, 0.25)}, 7, (10.5, 20.0))
    assert found.waited_s == 0.75
    found.look(3.0, {0: ThreadUse(True, 1.8, 0.25)}, 7, (11.5, 20.0))
    assert round(found.waited_s, 9) == 0.85, "no more than the time in which it did not run"


# ---- The zygote: how it judges the end of a program


def reached(command, monkeypatch, *, namespaces=True, oom=False, kill=False):
    """Return the limit that the zygote finds when a command has ended. ``oom``: the kernel has ended a process."""
    kills = iter([3, 4 if oom else 3])
    monkeypatch.setattr(module, "oom_kills", lambda: next(kills))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        zygote = Zygote(theirs, {"namespaces": namespaces})
        process = subprocess.Popen(["sh", "-c", command])
        running = _Running({"id": 1, "limits": RunLimits().as_message()}, process.pid, None)
        if kill:
            zygote._kill(running)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        zygote._kill(running)  # too late: this one does not count
        zygote._collect(running)
        process.returncode = 0
        return json.loads(ours.recv(4096))["reached"]


@pytest.mark.parametrize(
    ("command", "settings", "expected"),
    [
        ("exit 0", {"oom": True}, ""),
        ("exit 3", {}, ""),
        ("exit 3", {"oom": True}, KILLED),
        ("kill -9 $$", {}, KILLED),
        ("kill -9 $$", {"namespaces": False}, ""),
        ("kill -15 $$", {}, ""),
        ("exec sleep 60", {"kill": True, "oom": True}, ""),
    ],
)
def test_victim_of_the_machine_is_found(monkeypatch, command, settings, expected):
    assert reached(command, monkeypatch, **settings) == expected


def test_counts_of_the_kernel_are_read():
    assert module.oom_kills() >= 0
    assert module.last_pid() > 0
