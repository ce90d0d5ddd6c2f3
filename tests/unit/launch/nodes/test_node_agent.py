"""The agent of a node as a process: killed, suspended, replaced, signalled, without its coordinator."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from realsys.cluster.process import ErrorRecord
from realsys.cluster.stream.security import ensure_keys
from realsys.config.paths import TrialPaths
from realsys.launch.nodes.orders import Address, write_address
from tests.support.polling import poll
from tests.support.processes.agents import BOUND_S, SHOWN, WORKER, AgentTrial, start_agent
from tests.support.processes.supervised import log, stop, waits_for

pytestmark = pytest.mark.processes
LEASE_S = 3.0


@pytest.fixture
def trial(tmp_path):
    """The master runs on node a, the rank on node b."""
    made = AgentTrial(tmp_path, LEASE_S)
    made.recover = True
    return made


def two_nodes(trial):
    rank = replace(trial.spec("model_worker", 0, SHOWN), node="b")
    return [rank, trial.spec("master_worker", 0, WORKER)]


NAMES = ["model_worker/0", "master_worker/0"]


def pids_of_rank(trial):
    return [int(line) for line in log(trial, "model_worker/0")]


def ended(pid):
    """True if the process has ended, also if its parent was killed and init has not collected it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_killed_agent_restarts_the_trainer(trial):
    """Its process dies with it; another agent of the node takes the next start."""

    async def kill(supervisor):
        trial.agents["b"].kill()
        trial.start_agent("b")
        await trial.ready(*NAMES)
        stop(supervisor)

    outcome = trial.run(*two_nodes(trial), until=NAMES, then=kill)
    assert outcome.status == "interrupted" and not outcome.killed
    assert [death.name for death in outcome.restarted] == ["model_worker/0"]
    assert trial.notes[0].startswith("model_worker/0 was lost with its node b: its agent joined again; restart 1/2")
    first, second = pids_of_rank(trial)
    assert first != second and ended(first)
    assert trial.agents["b"].returncode == 0


def test_lost_node_without_another_agent_ends_run(trial):
    def kill(_):
        trial.remote["b"].join_s = 2.0  # not from the start, when all agents have to join
        trial.agents["b"].kill()

    outcome = trial.run(*two_nodes(trial), until=NAMES, then=kill)
    assert outcome.status == "failed"
    assert trial.notes[0].startswith("model_worker/0 was lost with its node b: nothing was heard from its agent for ")
    assert outcome.reason.startswith("model_worker/0 cannot be started: no agent for node b joined within 2 s ")
    assert outcome.no_machine


def test_agent_suspended_beyond_its_lease_starts_afresh(trial):
    """Its processes may live on while it is suspended; when it wakes up they end before it takes orders again."""

    class Notes(list[str]):
        def append(self, note):
            super().append(note)
            if "was lost" in note:
                trial.agents["b"].send_signal(signal.SIGCONT)

    async def suspend(supervisor):
        trial.agents["b"].send_signal(signal.SIGSTOP)
        await trial.ready(*NAMES)
        stop(supervisor)

    trial.notes = Notes()
    outcome = trial.run(*two_nodes(trial), until=NAMES, then=suspend)
    assert outcome.status == "interrupted" and len(outcome.restarted) == 1
    assert "nothing was heard from its agent for" in trial.notes[0]
    first, second = pids_of_rank(trial)
    assert first != second and ended(first)
    assert "all processes have ended" in trial.output("b").read_text()


def test_replaced_agent_ends_its_processes(trial):
    old: list[subprocess.Popen[bytes]] = []

    async def start_another(supervisor):
        old.append(trial.agents["b"])
        trial.start_agent("b")
        await trial.ready(*NAMES)
        stop(supervisor)

    outcome = trial.run(*two_nodes(trial), until=NAMES, then=start_another)
    assert outcome.status == "interrupted" and len(outcome.restarted) == 1
    assert old[0].returncode == 1 and trial.agents["b"].returncode == 0
    assert "another agent named b took this one's place" in trial.output("b").read_text()
    assert ended(pids_of_rank(trial)[0])


def test_signal_to_agent_stops_the_run_in_order(trial):
    """A batch system signals all nodes: the rank must be there for the checkpoint of its master."""
    rank = waits_for("SIGTERM") + "print('rank ends', flush=True)"
    master = waits_for("SIGTERM") + f"print(open({str(trial.folder / 'model_worker-0.log')!r}).read() or 'rank lives')"
    specs = [replace(trial.spec("model_worker", 0, rank), node="b"), trial.spec("master_worker", 0, master)]

    def ask(_):
        for _ in range(3):
            trial.agents["b"].send_signal(signal.SIGTERM)

    outcome = trial.run(*specs, until=NAMES, then=ask, stop_timeout_s=30.0)
    assert (outcome.status, outcome.reason) == ("interrupted", "stopped by SIGTERM") and not outcome.killed
    assert log(trial, "master_worker/0") == ["rank lives"] and log(trial, "model_worker/0") == ["rank ends"]
    assert trial.agents["b"].returncode == 0


def test_error_of_another_host_is_not_this_process(trial):
    """Two machines use the same pid. The bad input of one of them is not why the other one's process died."""

    def errors():
        return [ErrorRecord(1.0, *RANK, pid, "elsewhere", "DataError", "bad", "", 2) for pid in pids_of_rank(trial)]

    async def kill(supervisor):
        os.kill(supervisor.running()["model_worker/0"], signal.SIGKILL)
        await trial.ready(*NAMES)
        stop(supervisor)

    outcome = trial.run(*two_nodes(trial), until=NAMES, then=kill, errors=errors)
    assert outcome.status == "interrupted" and len(outcome.restarted) == 1
    assert "was killed by SIGKILL" in trial.notes[0]


RANK = ("model_worker", 0)

# ---- without a coordinator

#: runs a rank on node b, until it is killed
COORDINATOR = """
import asyncio, os, sys
from pathlib import Path
from realsys.config.device_plan import Needs
from realsys.config.paths import TrialPaths
from realsys.launch.nodes.orders import ProcessOrder
from realsys.launch.nodes.coordinator import Terms, open_nodes

root, log, script, lease_s = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])

async def body():
    async with open_nodes({"b": Needs.of([])}, TrialPaths(root), Terms("127.0.0.1", lease_s, 60.0)) as nodes:
        await nodes["b"].ready(60.0)
        process = nodes["b"].start(ProcessOrder((sys.executable, "-c", script), {}, log, 1 << 20), lambda ended: None)
        await asyncio.sleep(3600)

asyncio.run(body())
"""
#: ignores SIGTERM, and so the death of its parent; it says that it lives as long as its standard output is open
ALONE = "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
ALONE += "open(FIFO, 'w').write(str(os.getpid()))\nwhile True: signal.pause()"


def test_processes_end_with_their_coordinator(tmp_path):
    """Within the lease, and also those that ignore SIGTERM. The agent waits for another coordinator, then ends."""
    fifo, output = tmp_path / "fifo", tmp_path / "agent.txt"
    os.mkfifo(fifo)
    script = ALONE.replace("FIFO", repr(str(fifo)))
    argv = [sys.executable, "-c", COORDINATOR, str(tmp_path), str(tmp_path / "log"), script, str(LEASE_S)]
    coordinator = subprocess.Popen(argv)
    agent = start_agent(tmp_path, "b", output, wait_s=BOUND_S)
    try:
        rank = psutil.Process(int(fifo.read_text()))  # waits for the rank
        coordinator.kill()
        rank.wait(BOUND_S)
        assert agent.poll() is None, "it waits for another coordinator"
        again = subprocess.Popen(argv)
        try:
            rank = psutil.Process(int(fifo.read_text()))
        finally:
            again.kill()
            again.wait(BOUND_S)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(BOUND_S) == 128 + signal.SIGTERM
        rank.wait(0.0)
    finally:
        for process in (coordinator, agent):
            process.kill()
            process.wait(BOUND_S)
    assert "the coordinator is gone: all processes have ended" in output.read_text()


def test_agent_of_one_run_leaves_the_next(tmp_path):
    """With --once: an agent that SLURM did not end must not take a node in the next run of its job."""
    output = tmp_path / "agent.txt"
    argv = [sys.executable, "-c", COORDINATOR, str(tmp_path), str(tmp_path / "log"), SHOWN, str(LEASE_S)]
    coordinator = subprocess.Popen(argv)
    agent = start_agent(tmp_path, "b", output, BOUND_S, "--once")
    try:
        poll((tmp_path / "log").exists, "a process of the agent", BOUND_S)
        coordinator.kill()
        write_address(tmp_path / "coordinator.json", Address("tcp://127.0.0.1:1", "next", LEASE_S, "127.0.0.1", "", 1))
        assert agent.wait(BOUND_S) == 1
    finally:
        for process in (coordinator, agent):
            process.kill()
            process.wait(BOUND_S)
    assert "another coordinator runs the trial" in output.read_text()


def test_agent_without_a_run_names_what_it_waits_for(tmp_path):
    output = tmp_path / "agent.txt"
    agent = start_agent(tmp_path, "b", output, wait_s=0.1)
    assert agent.wait(BOUND_S) == 1  # a batch system must not queue the job again: the launcher may live
    path = tmp_path / "coordinator.json"
    assert output.read_text() == f"realsys: no coordinator in {path}: start the run, or correct --trial-dir\n"


def test_agent_without_the_trial_folder_is_refused(tmp_path):
    """As in a container image into which the folder is not mounted."""
    output, folder = tmp_path / "agent.txt", tmp_path / "missing"
    agent = start_agent(folder, "b", output, wait_s=0.1)
    assert agent.wait(BOUND_S) == 2
    text = output.read_text()
    assert f"--trial-dir='{folder}'" in text
    assert "does not see the folder: add it to cluster.slurm.container.mounts" in text


def test_agent_that_lost_its_coordinator_says_so(tmp_path):
    """The exit code tells a batch system that its job has no launcher."""
    argv = [sys.executable, "-c", COORDINATOR, str(tmp_path), str(tmp_path / "log"), SHOWN, str(LEASE_S)]
    coordinator = subprocess.Popen(argv)
    poll((tmp_path / "coordinator.json").exists, "the address of the coordinator", BOUND_S)
    agent = start_agent(tmp_path, "b", tmp_path / "agent.txt", 4.0, "--once")  # bounds its joining, and the last wait
    try:
        poll((tmp_path / "log").exists, "a process of the agent", BOUND_S)
        coordinator.kill()
        assert agent.wait(BOUND_S) == 3
    finally:
        for process in (coordinator, agent):
            process.kill()
            process.wait(BOUND_S)


def test_agent_does_not_wait_for_a_dead_coordinator_for_ever(tmp_path):
    """A coordinator that was killed leaves its file."""
    ensure_keys(TrialPaths(tmp_path).keys)
    write_address(tmp_path / "coordinator.json", Address("tcp://127.0.0.1:1", "c", LEASE_S, "127.0.0.1", "", 1))
    agent = start_agent(tmp_path, "b", tmp_path / "agent.txt", wait_s=0.5)
    try:
        assert agent.wait(BOUND_S) == 1
    finally:
        agent.kill()
        agent.wait(BOUND_S)


# ---- Fork servers of a node: the executor forks workers once their modules are imported, and executes them otherwise


ROOT = Path(__file__).resolve().parents[4]
NODE = """
import asyncio, json, os, signal, sys
from pathlib import Path
from realsys.launch.nodes import preload
from realsys.launch.nodes.orders import ProcessOrder
from realsys.launch.nodes.local_executor import open_executor

PROGRAM = "tests.support.processes.shown_program"
preload.CONTROL, preload.COMPUTE = (PROGRAM,), ("json",)
preload.start()

async def run(node, log):
    ended = asyncio.get_running_loop().create_future()
    argv = (sys.executable, "-P", "-m", PROGRAM, "word")
    process = node.start(ProcessOrder(argv, {"MINE": "1", "PYTHONPATH": os.getcwd()}, log, 1 << 20), ended.set_result)
    assert (await ended).returncode == 3, log.read_text()
    return log.read_text()

async def main(folder):
    async with open_executor() as node:
        await node.ready(60)
        servers = [server._pid for server in preload._servers]
        forked = await run(node, folder / "forked.log")
        for pid in servers:
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        executed = await run(node, folder / "executed.log")
        print(json.dumps([forked, executed, await node.end(1.0)]))

asyncio.run(main(Path(sys.argv[1])))
"""


def test_forked_and_executed_workers_are_alike(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", NODE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    forked, executed, left = json.loads(done.stdout)
    first, second = json.loads(forked), json.loads(executed)
    assert first | {"random": 0} == second | {"random": 0} and left == []
    assert first["random"] != second["random"]
    assert done.stderr.count("so programs are executed: it has ended") == 1
