"""Programs on a machine whose processors are busy: they get their time, whatever they are made of."""

import os
import subprocess
import sys

import pytest

from realsys.reward.sandbox.sandbox import Sandbox, SandboxCommand
from realsys.reward.sandbox.settings import WALL, RunLimits
from tests.support.sandbox.attacks import read_attacks

LIMITS = RunLimits(cpu_s=2.0, wall_s=0.7)
SPIN = "import time\nwhile time.process_time() < 0.4: pass\nprint(1)\n"
CHILD = "import os\nif os.fork(): os.wait()\nelse:\n" + "".join(f"    {line}\n" for line in SPIN.splitlines())
THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n" + SPIN
BURNER = [sys.executable, "-c", "import os\nos.nice(10)\nwhile os.getppid() == {pid}: pass"]

pytestmark = pytest.mark.needs("bwrap")


@pytest.fixture
def sandbox():
    """A sandbox on one processor, which two other processes use as well."""
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    command = [word.format(pid=os.getpid()) for word in BURNER]
    burners = [subprocess.Popen(command) for _ in range(2)]
    try:
        with Sandbox() as sandbox:
            yield sandbox
    finally:
        os.sched_setaffinity(0, processors)
        for burner in burners:
            burner.kill()
            burner.wait()


def command(source):
    return SandboxCommand((os.path.realpath(sys.executable), "program.py"), {"program.py": source.encode()})


def test_program_gets_its_time(sandbox):
    for program in (SPIN, CHILD, THREAD, command(SPIN)):
        output = sandbox.run(program, b"", LIMITS)
        assert (output.ended.reason, output.stdout) == ("", b"1\n"), (program, output.ended)
        assert output.ended.wall_s > output.ended.own_s


def test_sleep_is_over_the_limit(sandbox):
    source = "import time\ntime.sleep(60)"
    assert [sandbox.run(each, b"", LIMITS).ended.reason for each in (source, command(source))] == [WALL, WALL]


def test_waiting_for_own_children_is_not_free():
    attack = next(attack for attack in read_attacks() if attack.name == "limits/waits_for_its_own_children")
    with Sandbox() as sandbox:
        ended = sandbox.run(attack.source, b"3\n", RunLimits(cpu_s=1.5, wall_s=1.5)).ended
    assert ended.reason == WALL
    assert ended.waited_s < 0.35 * ended.wall_s
