"""The `realsys` command as a process of its own: how it ends, whatever happens to it, and what it leaves.

Small scripts stand in for the workers; what is waited for is a line, the end of a process, or a lock of the kernel.
"""

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from realsys.cluster.network import bind_tcp
from realsys.config.paths import TrialPaths
from realsys.launch.trial_folder import TrialLock, running_launcher
from realsys.launch.words import own_command
from tests.support.processes.ports import lasting_ports

pytestmark = pytest.mark.processes

BOUND_S = 120.0
REPOSITORY = Path(__file__).parents[3]
#: the command, with these scripts in the place of the workers, and the real name store if there is one of its own
DRIVER = """
import json, os, resource, sys
import realsys.launch.run
from realsys.launch.cli import main
from realsys.launch.process_plan import ProcessSpec, plan

given = json.loads(os.environ["GIVEN"])
TRAINING = ("model_worker", "master_worker")

def scripts(config, paths, machine, run_id, python_path):
    specs = [spec for spec in plan(config, paths, machine, run_id, python_path) if spec.kind == "name_store"]
    for kind, body in given["scripts"].items():
        argv = (sys.executable, "-c", body.replace("ROOT", repr(str(paths.root))))
        specs.append(ProcessSpec(kind, 0, argv, paths.logs / f"{kind}-0.log", "end" if kind in TRAINING else "restart"))
    return specs

realsys.launch.run.plan = scripts
if not given["draws"]:  # half of the time of a run here
    realsys.launch.conclude.draw_curves = lambda *_: None
if given["largest_file"]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (given["largest_file"], given["largest_file"]))
sys.exit(main(sys.argv[1:]))
"""
SMALL = ["train_size=20", "eval_size=5", "demo_size=0"]
RUN = ["run", "experiment=arith", *(f"data.arith.{field}" for field in SMALL), "evaluation.problems=5"]
RUN += ["warmup.steps=0", "--trial", "t", "--plain"]
ONE_STEP = """
import json, os, signal, time
from realsys.cluster.process import die_with_parent
die_with_parent()
def log(**record):
    with open(ROOT + "/steps.jsonl", "a") as file:
        file.write(json.dumps({**record, "time": time.time()}) + "\\n")
log(kind="phase", phase="train")
log(kind="train", step=1, total=9, accuracy=0.5)
"""
DONE = "log(kind='phase', phase='done')"
FOREVER = ONE_STEP + "signal.pause()"
SHOWN = "step 1/9"


class Command:
    """The process, and what it has said so far."""

    def __init__(self, process, paths):
        self.process, self.paths = process, paths
        assert process.stdout is not None and process.stderr is not None
        self.stdout, self.stderr = process.stdout, process.stderr
        self.said: list[str] = []

    def until(self, text, *, of_errors=False):
        """Read its lines up to the one that has the text; fails when it ends before."""
        too_late = threading.Timer(BOUND_S, self.process.kill)
        too_late.start()
        try:
            for line in self.stderr if of_errors else self.stdout:
                self.said.append(line)
                if text in line:
                    return
        finally:
            too_late.cancel()
            too_late.join()
        self.process.wait(BOUND_S)
        pytest.fail(f"ended with {self.process.returncode} before it said {text!r}: {self.said} {self.stderr.read()}")

    def end(self):
        """Exit code, and the errors that were not read yet."""
        _, errors = self.process.communicate(timeout=BOUND_S)
        return self.process.returncode, errors


@pytest.fixture
def start(tmp_path):
    started: list[subprocess.Popen[str]] = []

    def begin(*overrides, scripts=None, modules=None, largest_file=0):
        """``modules``: a folder that is looked into before the packages that are installed; then curves are drawn."""
        path = os.pathsep.join(map(str, [*([modules] if modules else []), REPOSITORY]))
        scripts = scripts or {"master_worker": FOREVER}
        given = {"scripts": scripts, "largest_file": largest_file, "draws": modules is not None}
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, *RUN, *overrides],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "GIVEN": json.dumps(given), "OMP_NUM_THREADS": "1"},
        )
        started.append(process)
        return Command(process, TrialPaths(tmp_path / "runs" / "arith" / "t"))

    yield begin
    for process in started:
        process.kill()
        process.wait(BOUND_S)
        for stream in (process.stdout, process.stderr):
            stream.close()


# ---- Ctrl-C


@pytest.fixture
def slow_matplotlib(tmp_path):
    """A matplotlib that takes for ever to be imported, as it seems to on a machine that is busy."""
    folder = tmp_path / "modules" / "matplotlib"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("import sys, signal\nprint('drawing', file=sys.stderr)\nsignal.pause()\n")
    return folder.parent


def test_ctrl_c_reports_before_drawing(start, slow_matplotlib):
    """A second Ctrl-C ends the drawing."""
    command = start(modules=slow_matplotlib)
    command.until(SHOWN)
    command.process.send_signal(signal.SIGINT)
    again = f"{shlex.join(own_command())} resume runs/arith/t"
    lost = "1 trained step is lost: there is no checkpoint"
    command.until(f"stopped by SIGINT; {lost}", of_errors=True)
    command.until(f"to continue: {again}", of_errors=True)
    assert json.loads(command.paths.summary.read_text())["status"] == "interrupted"
    command.until("drawing", of_errors=True)
    TrialLock(command.paths.lock, "t", retry_timeout_s=0.0).close()  # what it said can be done at once
    command.process.send_signal(signal.SIGINT)
    assert command.end() == (130, "realsys: curves.png is not drawn\n")


def test_finished_run_reports_before_drawing(start, slow_matplotlib):
    command = start(scripts={"master_worker": ONE_STEP + DONE}, modules=slow_matplotlib)
    command.until("summary.json, curves.png")
    command.until("drawing", of_errors=True)
    command.process.send_signal(signal.SIGINT)
    assert command.end() == (0, "realsys: curves.png is not drawn\n")


@pytest.mark.parametrize("errors_too", [False, True])
def test_ctrl_c_stops_in_order_without_output_reader(start, errors_too):
    """`realsys run | tee log`: the terminal's Ctrl-C goes to both. With 2>&1 nobody hears a word."""
    asked = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(143)); signal.pause()"
    command = start(scripts={"master_worker": FOREVER, "rollout_worker": asked})
    command.until(SHOWN)
    command.stdout.close()
    if errors_too:
        command.stderr.close()
    command.process.send_signal(signal.SIGINT)
    if not errors_too:
        command.until("stopped by SIGINT; 1 trained step is lost: there is no checkpoint", of_errors=True)
    assert command.process.wait(BOUND_S) == 130
    assert json.loads(command.paths.summary.read_text())["status"] == "interrupted"


def test_a_run_whose_reader_is_gone_goes_on(start, tmp_path):
    """A restart that cannot be shown is a restart all the same."""
    die, back = tmp_path / "die", tmp_path / "back"
    with fifo(die) as dying, fifo(back) as coming:
        worker = f"import os\nopen({str(back)!r}, 'w').write('.'); open({str(die)!r}).read(1); os._exit(1)"
        command = start(scripts={"master_worker": FOREVER, "rollout_worker": worker})
        command.until(SHOWN)
        command.stdout.close()
        for _ in range(2):  # it is started, dies, and is started again
            assert select.select([coming], [], [], BOUND_S)[0], "the worker did not come back"
            os.read(coming, 1)
            os.write(dying, b".")
        command.process.send_signal(signal.SIGTERM)
        command.until("stopped by SIGTERM", of_errors=True)
        assert command.process.wait(BOUND_S) == 143


@contextlib.contextmanager
def fifo(path):
    """A pipe with a name, open here for both ways: nobody waits for the other end."""
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# ---- the disk


def test_full_disk_at_start_is_one_line(start):
    """A limit on the size of a file stands in for it: the first one that is too large cannot be written."""
    command = start(largest_file=300)
    code, errors = command.end()
    assert code == 2 and errors.count("\n") == 1, errors
    assert errors.startswith("realsys: config: fileroot=") and "cannot be made ready: " in errors
    assert not command.paths.root.exists()


@pytest.mark.parametrize(
    ("end", "code"), [(DONE, 0), ("os.kill(os.getppid(), signal.SIGINT); signal.pause()", 130), ("os._exit(3)", 1)]
)
def test_unwritable_summary_does_not_hide_the_outcome(start, end, code):
    blocked = f"{ONE_STEP}os.makedirs(ROOT + '/summary.json/x')\n{end}"
    command = start(scripts={"master_worker": blocked})
    found, errors = command.end()
    assert found == code and "Traceback" not in errors
    assert "realsys: cannot write the summary: " in errors
    assert {
        0: "",
        130: "stopped by SIGINT; 1 trained step is lost: there is no checkpoint\n  to continue: ",
        1: "the run failed: master_worker/0",
    }[code] in errors


# ---- two launchers, and one that is killed


def test_one_of_two_simultaneous_launchers_runs(start):
    both = {command.process.pid: command for command in (start(), start())}
    loser = both.pop(first_to_end(list(both)))
    code, errors = loser.end()
    assert code == 2 and errors.count("\n") == 1 and errors.startswith("realsys: config: trial='t': "), errors
    [winner] = both.values()
    winner.until(SHOWN)
    winner.process.send_signal(signal.SIGINT)
    assert winner.end()[0] == 130


def first_to_end(pids):
    with contextlib.ExitStack() as stack:
        descriptors = {os.pidfd_open(pid): pid for pid in pids}
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        ended, _, _ = select.select(descriptors, [], [], BOUND_S)
        assert ended, "one of them must have been refused"
        return descriptors[ended[0]]


@pytest.mark.needs("etcd")
def test_killed_launcher_leaves_nothing_running(start):
    """No process, no lock and no name store is left."""
    address = f"127.0.0.1:{lasting_ports(1)[0]}"
    own = ["name_store=etcd", "cluster.name_store.start=true", f"cluster.name_store.address={address}"]
    command = start(*own)
    command.until(SHOWN)
    assert running_launcher(command.paths.lock) == command.process.pid
    children = psutil.Process(command.process.pid).children(recursive=True)
    assert "etcd" in {child.name() for child in children} and len(children) == 3  # the trackers, too
    command.process.kill()
    command.process.wait(BOUND_S)
    _, left = psutil.wait_procs(children, timeout=BOUND_S)
    assert not left
    TrialLock(command.paths.lock, "t", retry_timeout_s=0.0).close()
    host, _, port = address.rpartition(":")
    bind_tcp(host, int(port)).close()
    again = start(*own)
    again.until("starting again from the beginning")
    again.until(SHOWN)
    again.process.send_signal(signal.SIGTERM)
    assert again.end()[0] == 143
