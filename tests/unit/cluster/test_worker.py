"""The life of a worker process, with real processes and the file backend."""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading

import pytest

from realsys.cluster.process import read_errors
from tests.support.processes.tester_trial import BOUND_S, PRELUDE, Trial

pytestmark = pytest.mark.processes

#: a lease whose end the test waits for; elsewhere no slow machine is to outlive it
LAPSES = pytest.mark.parametrize("trial", [{"lease_s": 3.0}], indirect=True, ids=["short lease"])
#: time for the exit handlers that no slow machine outlives
LONG_EXIT = pytest.mark.parametrize("trial", [{"stop_timeout_s": 600.0}], indirect=True, ids=["long exit"])


@pytest.fixture
def trial(tmp_path, request):
    made = Trial(tmp_path, **getattr(request, "param", {}))
    yield made
    made.close()


def test_body_gets_its_context_and_leaves_nothing(trial):
    body = """
    quick()
    ctx.set_state("serving")
    assert ctx.stop.wait(600)
    assert (ctx.kind, ctx.index, ctx.name, ctx.token) == ("tester", 3, "tester/3", "secret")
    """
    process = trial.start(body.strip(), index=3)
    assert trial.ready()
    heartbeat = trial.names.heartbeat("tester/3")
    trial.until(heartbeat, lambda tree: '"state": "serving"' in tree.get(heartbeat, ""))
    value = json.loads(trial.store.get(heartbeat))
    assert (value["kind"], value["index"], value["pid"]) == ("tester", 3, process.pid)
    process.terminate()
    log = trial.ends(process, 0)
    assert "tester/3 INFO" in log and "SIGTERM: stopping" in log
    assert trial.store.get_subtree(trial.names.root) == {}
    assert read_errors(trial.paths.errors) == []


def test_garbage_collector_leaves_out_the_modules(trial):
    """A full collection stops the event loop: it must not walk what stays anyway."""
    body = """
    import gc
    assert gc.get_freeze_count() > 10 * len(gc.get_objects()), (gc.get_freeze_count(), len(gc.get_objects()))
    """
    trial.ends(trial.start(body.strip()), 0)


def test_password_of_etcd_is_not_inherited(trial):
    """Verifiers, agents and engines run other people's code."""
    body = """
    import subprocess
    inner = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    assert "REALSYS_ETCD" not in inner, inner
    """
    trial.ends(trial.start(body.strip(), REALSYS_ETCD_PASSWORD="a secret"), 0)


@pytest.mark.needs("etcd")
def test_worker_with_etcd_is_fenced_and_cleans_up(tmp_path, etcd_server):
    trial = Trial(tmp_path, lease_s=3.0, backend="etcd", address=etcd_server.address)
    try:
        paused = trial.start("quick(); threading.Event().wait()")
        first = trial.ready()
        trial.suspend(paused)
        paused.send_signal(signal.SIGCONT)
        trial.ends(paused, 75)
        successor = trial.start("quick(); ctx.stop.wait(600)")
        assert trial.ready() > first
        successor.terminate()
        trial.ends(successor, 0)
        assert trial.store.get_subtree(trial.names.root) == {}
    finally:
        trial.close()


def test_exception_in_body_leaves_only_an_error_file(trial):
    process = trial.start("quick(); raise RewardError('verifier 4 hung')")
    log = trial.ends(process, 1)
    assert "RewardError: verifier 4 hung" in log and "Traceback" in log
    (record,) = read_errors(trial.paths.errors)
    assert (record.worker, record.pid, record.type, record.message) == (
        "tester/0",
        process.pid,
        "RewardError",
        "verifier 4 hung",
    )
    assert "raise RewardError" in record.traceback or "in body" in record.traceback
    assert (trial.paths.errors / f"tester-0-{process.pid}.json").exists()
    assert trial.store.get_subtree(trial.names.root) == {}


def test_rank_that_cannot_use_its_gpu_exits_two(trial):
    """A rank on the CPU among ranks on GPUs would make all of them wait."""
    body = "from realsys.train.megatron.device import prepare_device; prepare_device(0, 1)"
    log = trial.ends(trial.start(body, CUDA_VISIBLE_DEVICES="77"), 2)
    assert "DeviceError: this process was given a GPU and cannot use it" in log and "CUDA_VISIBLE_DEVICES=77" in log
    (record,) = read_errors(trial.paths.errors)
    assert (record.type, record.exit_code, record.permanent) == ("DeviceError", 2, True)


def test_soft_limit_of_open_files_is_raised(trial):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))  # the child inherits it
    try:
        process = trial.start("import resource; assert len(set(resource.getrlimit(resource.RLIMIT_NOFILE))) == 1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    trial.ends(process, 0)


def test_first_failure_is_written_before_the_exit(trial):
    """Its file waits for the disk while the main thread fails because of it."""
    slow = (
        "import realsys.cluster.worker as w; write = w.write_error; writing, disk = (threading.Event() for _ in '12');"
    )
    slow += "w.write_error = lambda *given: (writing.set(), disk.wait(0.3), write(*given));"
    fail = "threading.Thread(target=lambda: [].pop()).start(); writing.wait(30); raise RewardError('late')"
    process = trial.start(slow + fail)
    _, log = process.communicate(timeout=BOUND_S)
    assert process.returncode == 1, log
    [record] = read_errors(trial.paths.errors)
    assert record.type == "IndexError" and "RewardError: late" in log


def test_dead_thread_ends_the_process(trial):
    """The main thread waits for what the thread was to deliver: it would wait for ever."""
    body = """
    quick()
    def fail(): raise ValueError("io thread broke")
    threading.Thread(target=fail, name="io").start()
    threading.Event().wait()
    """
    process = trial.start(body.strip())
    assert "thread 'io' failed" in trial.ends(process, 1)
    (record,) = read_errors(trial.paths.errors)
    assert (record.type, record.message) == ("ValueError", "io thread broke")
    assert trial.store.get_subtree(trial.names.root) == {}


@LAPSES
def test_paused_process_fences_itself(trial):
    """Longer than its lease it was dead to everyone; its work has been given to others."""
    process = trial.start("quick(); threading.Event().wait()")
    trial.ready()
    trial.suspend(process)
    process.send_signal(signal.SIGCONT)
    log = trial.ends(process, 75)
    (record,) = read_errors(trial.paths.errors)
    assert record.type == "Fenced" and "must stop" in record.message and "fenced" in log


def test_short_pause_does_no_harm(trial):
    process = trial.start("show_beats(); quick(); ctx.stop.wait(600)")
    trial.ready()
    process.send_signal(signal.SIGSTOP)
    assert not threading.Event().wait(0.3)
    process.send_signal(signal.SIGCONT)
    trial.until_beat()
    process.terminate()
    trial.ends(process, 0)


@LAPSES
def test_restarted_worker_takes_over_from_a_killed_one(trial):
    first = trial.start("quick(); threading.Event().wait()")
    incarnation = trial.ready()
    first.kill()
    first.wait()
    second = trial.start("quick(); ctx.stop.wait(600)")
    key = f"{trial.names.root}/ready"
    trial.until(key, lambda tree: tree.get(key, "") > incarnation)
    # Past the lapse of the first one's lease the key is still the second one's.
    assert not threading.Event().wait(trial.config.cluster.lease_s + 0.1)
    assert json.loads(trial.store.get(trial.names.heartbeat("tester/0")))["pid"] == second.pid
    second.terminate()
    trial.ends(second, 0)


def test_older_process_at_the_same_index_fences_itself(trial):
    """After a requeue the old one may still run; its lease is in good order, so only the newer heartbeat tells it."""
    old = trial.start("quick(); threading.Event().wait()")
    trial.ready()
    new = trial.start("quick(); ctx.stop.wait(600)")
    assert "taken over by incarnation" in trial.ends(old, 75)
    assert new.poll() is None
    new.terminate()
    trial.ends(new, 0)


def test_stop_ends_a_wait_in_the_name_store(trial):
    process = trial.start("quick(); ctx.store.wait('t/never', 600, 'the master')")
    trial.ready()
    process.send_signal(signal.SIGINT)
    assert "stopped while waiting for the master" in trial.ends(process, 143)
    assert read_errors(trial.paths.errors) == []


def test_body_that_stops_early_has_not_failed(trial):
    """Not 0: the launcher must not take the run for finished."""
    process = trial.start("quick(); ctx.stop.wait(600); raise SystemExit(143)")
    trial.ready()
    process.terminate()
    trial.ends(process, 143)
    assert read_errors(trial.paths.errors) == []
    unasked = trial.start("quick(); raise SystemExit(143)")
    trial.ends(unasked, 143)
    assert len(read_errors(trial.paths.errors)) == 1, "nobody had asked it to stop"


def test_second_sigterm_changes_nothing(trial):
    body = """
    told = []
    first = threading.Event()
    ctx.on_stop(lambda: (told.append("before"), first.set()))
    quick()
    assert ctx.stop.wait(600) and first.wait(600)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
    ctx.on_stop(lambda: told.append("after"))
    assert told == ["before", "after"]
    """
    process = trial.start(body.strip())
    trial.ready()
    process.terminate()
    trial.ends(process, 0)


def test_shielded_worker_leaves_sigterm_to_its_agent(trial):
    """SLURM sends SIGTERM to every process of a job; the agent sends SIGINT when it is the turn of this one."""
    process = trial.start("quick(); assert ctx.stop.wait(600)", REALSYS_SHIELDED="1")
    trial.ready()
    process.terminate()
    trial.logged(process, "left to the node agent")
    process.send_signal(signal.SIGINT)
    assert "SIGINT: stopping" in trial.ends(process, 0)


def test_signal_inside_wait_does_not_deadlock(trial):
    """Event.set() in a handler deadlocks when the signal hits inside Event.wait()."""
    body = """
    quick()
    while not ctx.stop.wait(0.00001): pass
    """
    process = trial.start(body.strip())
    trial.ready()
    process.terminate()
    trial.ends(process, 0)


@LAPSES
def test_orphan_does_not_outlive_its_grace(trial):
    """Its parent is killed and its body ignores ``stop``: no process is left to kill it."""
    child = [sys.executable, "-c", PRELUDE.format(body="quick(); threading.Event().wait()")]
    child += ["--trial-dir", str(trial.paths.root), "--index", "0"]
    code = f"import subprocess, threading; subprocess.Popen({child!r}); threading.Event().wait()"
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        trial.ready()
        pid = json.loads(trial.store.get(trial.names.heartbeat("tester/0")))["pid"]
        descriptor = os.pidfd_open(pid)
    finally:
        parent.kill()
        parent.wait()
    ended, _, _ = select.select([descriptor], [], [], BOUND_S)
    os.close(descriptor)
    assert ended
    trial.gone(trial.names.root)


def test_worker_of_a_dead_launcher_does_not_start(trial):
    process = trial.start("quick()", REALSYS_PARENT_PID="1")
    assert "nothing to work for" in trial.ends(process, 1)


@LONG_EXIT
def test_finished_worker_waits_for_no_thread(trial):
    lingering = "threading.Thread(target=threading.Event().wait, name='lingering').start()"
    process = trial.start(f"import atexit; atexit.register(lambda: logging.info('handled')); {lingering}")
    log = trial.ends(process, 0)
    assert log.index(" exit 0") < log.index(" handled") and "still here" not in log


def test_endless_exit_handler_does_not_hold_worker(trial):
    process = trial.start("import atexit; atexit.register(threading.Event().wait)")
    assert "done, but still here after 0.5 s" in trial.ends(process, 0)


def test_stacks_are_dumped_on_sigusr1(trial):
    process = trial.start("quick(); ctx.stop.wait(600)")
    trial.ready()
    process.send_signal(signal.SIGUSR1)
    trial.logged(process, "Thread 0x")
    process.terminate()
    trial.ends(process, 0)


@LAPSES
def test_hanging_name_store_is_fenced_by_the_clock(trial):
    """A beat that hangs inside the store cannot notice that the lease is over."""
    body = """
    def hang(lease): threading.Event().wait()
    ctx.lease.store.renew_lease = hang
    threading.Event().wait()
    """
    assert "no heartbeat for the whole lease" in trial.ends(trial.start(body.strip()), 75)


def test_unreadable_config_is_reported_like_any_failure(trial):
    trial.paths.config.write_text("{")
    trial.ends(trial.start("quick()"), 2)
    (record,) = read_errors(trial.paths.errors)
    assert record.type == "ConfigError" and str(trial.paths.config) in record.message and record.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [(["--index", "0"], "--trial-dir"), (["--trial-dir", "/nowhere", "--index", "0"], "no such directory")],
)
def test_wrong_arguments_end_before_slow_imports(arguments, problem):
    code = (
        "import sys, atexit; atexit.register(lambda: print('pydantic' in sys.modules));"
        "from realsys.cluster.worker import worker_main; worker_main('tester', print)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=BOUND_S)
    assert (done.returncode, done.stdout.strip()) == (2, "False") and problem in done.stderr
