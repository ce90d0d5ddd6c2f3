"""Fork servers of a node: the executor forks workers once their modules are imported, and executes them otherwise."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

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


def test_forked_and_executed_workers_are_alike(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NODE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    forked, executed, left = json.loads(done.stdout)
    first, second = json.loads(forked), json.loads(executed)
    assert first | {"random": 0} == second | {"random": 0} and left == []
    assert first["random"] != second["random"]
    assert done.stderr.count("so programs are executed: it has ended") == 1
