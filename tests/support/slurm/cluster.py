"""A SLURM of virtual nodes on this machine: real daemons as plain child processes, no service, no munge.

slurmctld ──┬─ slurmd -N vn0 ── slurmstepd ── tasks
            └─ slurmd -N vn1 ... each with its own port and its own (fake) GPUs
"""

import contextlib
import getpass
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.support.polling import poll
from tests.support.processes.ports import lasting_ports

BOUND_S = 60.0
NODES, GPUS, CPUS, MEMORY_MB = 4, 2, 32, 64_000
CONF = """\
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
# the lifetime of a credential is also the time for which a job that is queued again waits
AuthInfo=cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
PlugStackConfig={folder}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
KillWait=30
InactiveLimit=0
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,bf_max_time=5,batch_sched_delay=0
SlurmctldTimeout=30
SlurmdTimeout=30
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs={cpus} Boards=1 SocketsPerBoard=1 \
CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory={memory} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=cpu Nodes=ALL MaxTime=INFINITE State=UP
"""


class VirtualSlurm:
    """One controller and its nodes, ``vn0`` and so on. ``env`` lets SLURM's programs find it."""

    def __init__(self, folder: Path) -> None:
        self.nodes = [f"vn{number}" for number in range(NODES)]
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._folder = folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> list[int]:
        """Start everything; returns the pids of the daemons once all nodes are idle."""
        self._write_conf()
        self._start("slurmctld", "-c")
        for node in self.nodes:
            self._start("slurmd", "-N", node)
        self.until(lambda: self.call("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(NODES), "idle nodes")
        return [daemon.pid for daemon in self._daemons.values()]

    def _write_conf(self) -> None:
        folder, ports = self._folder, lasting_ports(1 + NODES)
        for name in ("state", "spool", "dev"):
            (folder / name).mkdir()
        for gpu in range(GPUS):  # SLURM wants character devices; /dev/null is one
            os.mknod(folder / "dev" / f"gpu{gpu}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        values = {
            "host": socket.gethostname(),
            "user": getpass.getuser(),
            "folder": folder,
            "controller": ports[0],
            "nodes": ",".join(self.nodes),
            "ports": ",".join(map(str, ports[1:])),
            "cpus": CPUS,
            "memory": MEMORY_MB,
            "gpus": GPUS,
        }
        (folder / "slurm.conf").write_text(CONF.format(**values))
        (folder / "plugstack.conf").write_text("")
        devices = f"{folder}/dev/gpu[0-{GPUS - 1}]"
        gres = f"AutoDetect=off\nNodeName={','.join(self.nodes)} Name=gpu File={devices}\n"
        (folder / "gres.conf").write_text(gres)

    def _start(self, program: str, *arguments: str) -> None:
        name = arguments[-1] if program == "slurmd" else program
        with (self._folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                [program, "-D", *arguments],
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    # ---- programs of SLURM

    def call(self, *argv: str, check: bool = True) -> str:
        """Run a program of SLURM; returns its output."""
        done = subprocess.run(
            argv, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=BOUND_S, check=False
        )
        assert done.returncode == 0 or not check, f"{argv}: {done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """Return the state of a job; "" if SLURM does not know it."""
        return self.first_line(job, "%T")

    def first_line(self, job: str, fields: str) -> str:
        """Return what squeue shows of a job, of its first component if it is heterogeneous."""
        shown = self.call("squeue", "-h", "-t", "all", "-j", job, "-o", fields, check=False).splitlines()
        return shown[0].strip() if shown else ""

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = BOUND_S) -> None:
        poll(condition, what, timeout_s, self.report)

    def report(self) -> str:
        """Everything there is to read about the cluster."""
        parts = [self.call("sinfo", "-N", "-l", check=False), self.call("squeue", "-l", check=False)]
        parts += [f"== {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self._folder.glob("*.out"))]
        return "\n".join(parts)

    # ---- nodes

    def kill_daemon(self, node: str) -> None:
        """SIGKILL to the slurmd of a node, and tell the controller. The tasks of the node keep running."""
        daemon = self._daemons[node]
        daemon.kill()
        daemon.wait(BOUND_S)
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=killed")

    def kill_node(self, node: str) -> None:
        """SIGKILL to everything on a node, as when its power fails: no process sees another one end."""
        tasks = self.tasks(node)
        steps = {step.pid for task in tasks for step in task.parents() if "slurmstepd" in step.name()}
        # Children first: the kernel wakes a stopped process, with SIGHUP, when its parent has ended.
        tasks.sort(key=lambda task: len(task.parents()), reverse=True)
        pids = [*(task.pid for task in tasks), *steps, self._daemons[node].pid]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        self.kill_daemon(node)

    def restore(self, node: str) -> None:
        """Start the slurmd of a node again."""
        if self._daemons[node].poll() is not None:
            self._start("slurmd", "-N", node)
        idle = ("sinfo", "-h", "-n", node, "-t", "idle", "-o", "%D")
        self.until(lambda: self.call(*idle).strip() == "1", f"node {node} idle")

    def tasks(self, node: str) -> list[psutil.Process]:
        """Return the processes that SLURM has started on a node, and theirs."""
        return [process for process in self._ours() if self._variable(process, "SLURMD_NODENAME") == node]

    def _ours(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            if self._variable(process, "SLURM_CONF") == self.env["SLURM_CONF"]:
                yield process

    def _steps(self) -> Iterator[psutil.Process]:
        """Yield the slurmstepds, which have no environment: their sockets are in our folder."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                sockets = process.net_connections("unix") if process.name() == "slurmstepd" else []
                if any(str(self._folder) in str(each.laddr) for each in sockets):
                    yield process

    def _variable(self, process: psutil.Process, name: str) -> str:
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE:
                return process.environ().get(name, "")
        return ""

    # ---- the end

    def clear(self) -> list[int]:
        """End all jobs and restore all nodes. Returns the pids of the daemons."""
        self.call("scancel", "--full", "--signal=KILL", f"--user={getpass.getuser()}", check=False)
        self.call("scancel", f"--user={getpass.getuser()}", check=False)
        lost = [node for node in self.nodes if self._daemons[node].poll() is not None]
        for task in (task for node in lost for task in self.tasks(node)):
            with contextlib.suppress(psutil.NoSuchProcess):
                task.kill()
        for node in self.nodes:
            self.restore(node)
        self.until(lambda: not self.call("squeue", "-h").strip(), "no jobs")
        return [daemon.pid for daemon in self._daemons.values()]

    def stop(self) -> None:
        """End everything. No process is left."""
        for daemon in self._daemons.values():
            daemon.terminate()
        for daemon in self._daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
        for process in [*self._ours(), *self._steps()]:
            if process.pid != os.getpid():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        for daemon in self._daemons.values():
            daemon.wait(BOUND_S)
