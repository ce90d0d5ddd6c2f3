"""The sandbox with real programs: results, limits, what a program sees, and failures of the sandbox itself."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from realsys.errors import DataError, SandboxError
from realsys.reward.sandbox.sandbox import ProgramRaised, Sandbox, SandboxCommand, UnitTests
from realsys.reward.sandbox.settings import CPU, CRASHED, MEMORY, OUTPUT, WALL, WRONG, IsolationSettings, RunLimits

LIMITS = RunLimits(cpu_s=0.5, wall_s=60.0, memory_mb=256)  # a slow disk may hold up a run that is at work
IDLE = replace(LIMITS, wall_s=1.5)  # for a program that waits until its limit
ADD = "def add(a, b=1):\n    return a + b\n"

pytestmark = pytest.mark.needs("bwrap")


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(IsolationSettings()) as sandbox:
        sandbox.run("", b"", LIMITS)
        yield sandbox


def zygote_of(sandbox):
    """Return the innermost process that stays: bwrap, its first process in the namespace, the zygote."""
    process = psutil.Process(sandbox.zygote.pid)
    while children := process.children():
        process = children[0]
    return process


def test_program_reads_and_writes(sandbox):
    output = sandbox.run("import sys\nprint(input()[::-1])\nprint('x', file=sys.stderr)", b"abc\n", LIMITS)
    assert (output.stdout, output.stderr, output.ended.reason) == (b"cba\n", b"x\n", "")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("while True: pass", CPU),
        ("import time\ntime.sleep(60)", WALL),
        ("print('x' * 2**25)", OUTPUT),
        ("1 / 0", CRASHED),
        ("raise SystemExit(3)", CRASHED),
        ("import ctypes\nctypes.string_at(0)", CRASHED),
        ("import os\nb = [bytearray(10**8)]\nwhile os.fork() >= 0: b[0][::4096] = b'x' * len(b[0][::4096])", MEMORY),
    ],
)
def test_run_over_a_limit_has_its_reason(sandbox, source, reason):
    assert sandbox.run(source, b"", IDLE if reason == WALL else LIMITS).ended.reason == reason


def test_program_sees_nothing_of_the_machine(sandbox, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    source = """
import os
hidden = ["/root/.ssh", "/home", "/run", "/var", "/sys", "/etc/shadow", "/etc/passwd", "/proc/self"]
print([path for path in hidden if os.path.exists(path)], os.listdir("/tmp"), os.getpid(), os.getuid())
print(sorted(os.environ))
"""
    first, second = sandbox.run(source, b"", LIMITS).stdout.decode().splitlines()
    assert first == "[] [] 1 1000"
    assert second == "['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH', 'PWD']"


def test_kernel_ends_programs_before_the_run(sandbox):
    assert Path(f"/proc/{zygote_of(sandbox).pid}/oom_score_adj").read_text() == "1000\n"


def test_programs_draw_different_random_numbers(sandbox):
    """Programs are copies of one process, and so are the processes that a program forks."""
    source = "import os, random\nchild = os.fork()\nif child: os.wait()\nprint(random.random())"
    outputs = [sandbox.run(source, b"", LIMITS).stdout for _ in range(2)]
    assert len({number for output in outputs for number in output.split()}) == 4


def test_forked_program_has_new_locks(sandbox):
    """The function that ``threading`` registers for forks runs in forks of the program."""
    source = """
import os, threading
hold = threading.Event()
threading.Thread(target=hold.wait, daemon=True).start()
if os.fork() == 0:
    os._exit(print(threading.active_count(), flush=True) or 0)
os.wait()
print(threading.active_count())
"""
    assert sandbox.run(source, b"", LIMITS).stdout == b"1\n2\n"


def test_what_a_program_leaves_is_gone(sandbox):
    source = "import subprocess\nopen('/tmp/a', 'w').write('x')\nsubprocess.Popen(['sleep', '60'])"
    assert sandbox.run(source, b"", LIMITS).ended.reason == ""
    assert zygote_of(sandbox).children() == []
    assert sandbox.run("import os\nprint(os.listdir('/tmp'))", b"", LIMITS).stdout == b"[]\n"


def test_command_makes_a_file_for_the_next(sandbox):
    made = sandbox.run(SandboxCommand(("/bin/sh", "make"), {"make": b"echo echo hi > made"}, "made"), b"", LIMITS).made
    assert sandbox.run(SandboxCommand(("/bin/sh", "made"), {"made": made}), b"", LIMITS).stdout == b"hi\n"


def test_large_file_reaches_the_next_command(sandbox):
    size = 20 << 20  # more than one message has
    make = SandboxCommand(("/bin/sh", "make"), {"make": f"head -c {size} /dev/urandom > made".encode()}, "made")
    made = sandbox.run(make, b"", LIMITS).made
    assert made is not None and len(made) == size
    assert (
        sandbox.run(SandboxCommand(("/usr/bin/wc", "-c", "made"), {"made": made}), b"", LIMITS).stdout
        == b"%d made\n" % size
    )


def test_command_that_makes_nothing_is_seen(sandbox):
    assert sandbox.run(SandboxCommand(("/bin/sh", "-c", "true"), {}, "made"), b"", LIMITS).made is None


def test_failed_command_has_its_exit_code(sandbox):
    output = sandbox.run(SandboxCommand(("/bin/sh", "-c", "exit 7"), {}), b"", LIMITS)
    assert (output.ended.code, output.ended.reason) == (7, CRASHED)


def test_calls_return_plain_data(sandbox):
    with sandbox.serve(ADD + "class Solution:\n    def twice(self, x): return (x, [x])\n", LIMITS) as program:
        assert program.call("add", [1]) == 2
        assert program.call("Solution.twice", [{"a": None}]) == ({"a": None}, [{"a": None}])
        with pytest.raises(ProgramRaised, match="TypeError"):
            program.call("add", [None])
        assert program.call("add", [2, 3]) == 5


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def f():\n    while True: pass", CPU),
        ("def f():\n    import os\n    os._exit(0)", CRASHED),
        ("def f():\n    return 'x' * 10**6", OUTPUT),
        ("def f():\n    return ' ' * 10**10", MEMORY),
        ("import os\nos.close(3)\ndef f(): return 1", CRASHED),
        ("def f(: pass", CRASHED),
    ],
)
def test_failed_call_has_its_reason(sandbox, source, reason):
    with sandbox.serve(source, LIMITS) as program, pytest.raises(ProgramRaised) as raised:
        program.call("f", [], most=1000)
    assert raised.value.reason == reason


def test_each_call_has_its_own_limit(sandbox):
    source = "import time\ndef f():\n    end = time.process_time() + 0.3\n    while time.process_time() < end: pass\n"
    with sandbox.serve(source, LIMITS) as program:
        assert [program.call("f", []) for _ in range(4)] == [None] * 4


def judged(sandbox, source, tests, **settings):
    return sandbox.test(source, UnitTests(tests, **settings), LIMITS)


def test_unit_tests_call_the_program(sandbox):
    assert judged(sandbox, ADD, "assert add(1) == 2\nassert add(1, b=3) == 4").passed
    result = judged(sandbox, ADD, "assert add(1) == 3, 'not three'")
    assert (result.passed, result.reason, result.why) == (False, WRONG, "AssertionError: not three")


def test_helpers_come_from_the_prompt(sandbox):
    lying = ADD + "def helper(x): return add(*x)\n"
    tests = "assert add(1, 1) == helper((1, 1))"
    assert judged(sandbox, lying, tests, function="add", trusted=("def helper(x): return sum(x)",)).passed
    wrong = lying.replace("a + b", "7")
    assert not judged(sandbox, wrong, tests, function="add", trusted=("def helper(x): return sum(x)",)).passed


def test_builtins_of_the_tests_are_their_own(sandbox):
    lying = "import builtins\ndef f(): return 2\ndef set(x): return 0\nbuiltins.set = set\n"
    assert not judged(sandbox, lying, "assert set([f()]) == set([1])").passed


def test_exceptions_of_the_program_reach_the_tests(sandbox):
    source = "class Mine(KeyError): pass\ndef f(): raise Mine('x')\n"
    tests = "try:\n    f()\nexcept KeyError:\n    pass\nelse:\n    raise AssertionError\n"
    assert judged(sandbox, source, tests).passed


def test_objects_of_the_program_can_be_passed_back(sandbox):
    source = "class Pair:\n    def __init__(self, a): self.a = a\n    def get(self): return self.a\n"
    source += "def f(pairs): return pairs[0].a\n"
    assert judged(sandbox, source, "p = Pair(3)\nassert f([p]) == 3 and p.get() == 3 and p.a == 3").passed


CASE = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(add(1), 2)\n"
MAIN = "if __name__ == '__main__':\n    "
NAMES = ["math.isclose(add(1), 2)", "np.isclose(add(1), 2)", "add(1) == EXPECTED", "abs(add(1)) == max(EXPECTED, 1)"]


@pytest.mark.parametrize(
    "tests",
    ["def test_add():\n    assert add(1) == 2", CASE, f"{CASE}{MAIN}unittest.main()", f"{MAIN}assert add(1) == 2"],
)
def test_tests_that_are_only_defined_are_run(sandbox, tests):
    assert judged(sandbox, ADD, tests).passed
    assert not judged(sandbox, "def add(a): return 999", tests).passed


def test_tests_that_call_nothing_are_an_error(sandbox):
    with pytest.raises(DataError, match="called nothing of the program"):
        judged(sandbox, ADD, "if len('x') > 1:\n    assert add(1) == 2")


LYING = """
def add(a): return 999
class math: isclose = staticmethod(lambda *a: True)
class np: isclose = staticmethod(lambda *a: True)
EXPECTED = 999
"""


@pytest.mark.parametrize("test", NAMES)
def test_program_defines_no_names_of_the_tests(sandbox, test):
    assert not judged(sandbox, LYING, f"assert {test}").passed


def test_modules_of_the_tests_need_no_import(sandbox):
    assert judged(sandbox, ADD, "assert math.isclose(add(1), 2)").passed


def test_helpers_come_from_an_unfinished_prompt(sandbox):
    stub = "def encode(s):\n    return s[::-1]\n\ndef decode(s):\n"
    settings = {"function": "decode", "trusted": (stub,)}
    source, tests = "def encode(s): return s\ndef decode(s): return s\n", "assert decode(encode('abc')) == 'abc'"
    assert not judged(sandbox, source, tests, **settings).passed
    assert judged(sandbox, "def decode(s): return s[::-1]\n", tests, **settings).passed


PILE = """
class Pile:
    def __init__(self): self.items = [1]
    def __len__(self): return len(self.items)
    def __getitem__(self, key): return self.items[key]
    def __iter__(self): return iter(self.items)
def count(n): yield from range(n)
def endless():
    while True: yield 'x' * 1000
def stops(): raise StopIteration
class Plain: pass
"""


def test_objects_of_the_program_take_attributes(sandbox):
    source = "class Node:\n    def __init__(self, x): self.x, self.left = x, None\ndef left(n): return n.left.x\n"
    assert judged(sandbox, source, "n = Node(1)\nn.left = Node(2)\nassert left(n) == n.left.x == 2").passed


def test_objects_of_the_program_are_iterated_and_indexed(sandbox):
    tests = "p = Pile()\nassert len(p) == p[0] == 1 and list(p) == [1] and p and Plain()\n"
    tests += "assert list(count(3)) == [0, 1, 2] and next(count(1)) == 0 and not list(count(0))\n"
    assert judged(sandbox, PILE, tests).passed


@pytest.mark.parametrize(
    "tests", ["list(endless())", "for x in Plain(): pass", "len(Plain())", "[x for x in map(stops, [1])]", "Pile()[5]"]
)
def test_useless_objects_of_the_program_pass_nothing(sandbox, tests):
    assert not judged(sandbox, PILE, tests).passed


@pytest.mark.parametrize("end", ["import os\n    os._exit(0)", "raise SystemExit(0)", "import os\n    os.kill(1, 9)"])
def test_program_that_ends_passes_nothing(sandbox, end):
    tests = "try:\n    f()\nexcept BaseException:\n    pass\nassert True\n"
    result = judged(sandbox, f"def f():\n    {end}\n", tests)
    assert result.passed is ("SystemExit" in end or "kill" in end)  # those do not end it


def test_dead_zygote_is_an_error_and_replaced():
    with Sandbox() as sandbox:
        sandbox.run("", b"", LIMITS)
        zygote_of(sandbox).kill()
        with pytest.raises(SandboxError, match="sandbox: "):
            sandbox.run("", b"", LIMITS)
        assert sandbox.zygote.restarts == 1
        assert sandbox.run("print(1)", b"", LIMITS).stdout == b"1\n"


def test_zygote_that_dies_in_a_run_is_an_error():
    with Sandbox() as sandbox, pytest.raises(SandboxError, match="sandbox: "):  # noqa: SIM117
        with sandbox.serve(ADD, LIMITS) as program:
            assert program.call("add", [1]) == 2
            zygote_of(sandbox).parent().kill()


def test_killed_program_is_an_error():
    """As the kernel kills it if the machine has no memory left."""
    with (
        Sandbox() as sandbox,
        pytest.raises(SandboxError, match="killed from outside"),
        sandbox.serve(ADD, LIMITS) as it,
    ):
        assert it.call("add", [1]) == 2
        zygote_of(sandbox).kill()
        it.call("add", [1])


def test_closed_sandbox_leaves_no_processes():
    sandbox = Sandbox()
    with sandbox:
        sandbox.run("", b"", LIMITS)
        processes = psutil.Process(sandbox.zygote.pid).children(recursive=True)
    _, alive = psutil.wait_procs(processes, 5.0)
    assert alive == []


AS_ORDINARY_USER = """
import os
from realsys.reward.sandbox.settings import RunLimits
from realsys.reward.sandbox.sandbox import Sandbox, UnitTests
assert os.geteuid() == 1000
source = "import os\\nprint(os.getuid(), os.listdir('/tmp'), os.path.exists('/root/.ssh'), flush=True)\\nos.fork()"
with Sandbox() as sandbox:
    print(sandbox.run(source, b"", RunLimits()).stdout)
    print(sandbox.test("def f(): return 1", UnitTests("assert f() == 1"), RunLimits()).passed)
"""


def test_ordinary_user_has_a_sandbox():
    """In a user namespace of the test, so that this user can read the interpreter wherever it is."""
    command = ["unshare", "--user", "--map-user=1000", "--map-group=1000", sys.executable, "-c", AS_ORDINARY_USER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60.0)
    assert (done.stdout, done.stderr) == ("b'1000 [] False\\n'\nTrue\n", "")


WITHOUT_NAMESPACES = """
from realsys.errors import SandboxError
from realsys.reward.sandbox.settings import RunLimits
from realsys.reward.sandbox.sandbox import Sandbox
try:
    with Sandbox() as sandbox:
        sandbox.run("print(1)", b"", RunLimits())
except SandboxError as error:
    print(error)
"""


def test_machine_without_user_namespaces_is_told_what_to_allow():
    shell = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "sh",
        "-c",
        shell,
        "sh",
        sys.executable,
        "-c",
        WITHOUT_NAMESPACES,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60.0)
    assert done.stdout.startswith("sandbox: did not start: "), done
    assert "`sysctl user.max_user_namespaces` must not be 0" in done.stdout and done.stdout.count("\n") == 1


def test_no_isolation_keeps_the_limits():
    with Sandbox(IsolationSettings("none")) as sandbox:
        assert sandbox.run("print(1)", b"", LIMITS).stdout == b"1\n"
        assert sandbox.run("while True: pass", b"", LIMITS).ended.reason == CPU
        assert sandbox.test(ADD, UnitTests("assert add(1) == 2"), LIMITS).passed


@pytest.mark.parametrize("body", ["time.sleep(16)", "while time.monotonic() < begin + 16: os.write(1, b'x' * 4096)"])
def test_daemon_without_isolation_delays_nothing(body):
    daemon = f"    begin = time.monotonic()\n    {body}\n    os._exit(0)\n"
    source = "import os, time\nprint(1, flush=True)\nif not os.fork():\n    os.setsid()\n" + daemon
    with Sandbox(IsolationSettings("none")) as sandbox:
        output = sandbox.run(source, b"", RunLimits(cpu_s=0.5, wall_s=0.5))
        assert output.stdout.startswith(b"1\n")
        assert output.ended.wall_s < 10.0
        assert sandbox.run("print(2)", b"", LIMITS).stdout == b"2\n"
