"""Commands of the mini-swe-agent example: they write nothing outside of their folder and reach no network."""

import json
import os
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.support.agents.trained import EXAMPLES, FRAMEWORKS, needs_frameworks

pytestmark = pytest.mark.needs("bwrap")

RUN = """
import json, sys
from mini_swe_agent import shell
print(json.dumps([shell(sys.argv[1]).execute({"command": text})["returncode"] for text in sys.argv[2:]]))
"""


@pytest.fixture
def codes():
    """Return a function that runs commands in one folder and returns their exit codes, and the folder."""
    needs_frameworks()
    with tempfile.TemporaryDirectory() as folder:

        def run(*commands):
            environment = os.environ | {"PYTHONPATH": str(EXAMPLES), "SECRET": "1"}
            argv = [FRAMEWORKS, "-c", RUN, folder, *commands]
            ended = subprocess.run(argv, env=environment, capture_output=True, check=True, timeout=120)
            return json.loads(ended.stdout.splitlines()[-1])

        yield run, Path(folder)


def test_command_writes_its_own_folder_only(codes, tmp_path):
    run, folder = codes
    outside = [f"echo 1 > {path}/x" for path in (tmp_path, Path.home(), "", "/usr", "/etc", "/dev/shm")]
    outside += ["echo x > /proc/sys/kernel/hostname", "ls /etc", f"ls {tmp_path}"]
    assert 0 not in run(*outside)
    assert run("echo 1 > x && echo 1 > /tmp/x", "test -e x && ! test -e /tmp/x") == [0, 0]
    assert [path.name for path in folder.iterdir()] == ["x"] and not list(tmp_path.iterdir())


def test_command_sees_no_network_and_no_processes(codes):
    run, _ = codes
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f": < /dev/tcp/127.0.0.1/{server.getsockname()[1]}"
        subprocess.run(["bash", "-c", connect], check=True, timeout=30)
        assert run(connect, f"kill -0 {os.getpid()}", 'test -n "$SECRET"', "true") == [1, 1, 1, 0]
