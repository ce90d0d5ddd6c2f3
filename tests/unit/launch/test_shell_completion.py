"""Completion in a shell: fields, values, trials, logs."""

import os
import shutil
import subprocess
import sys

import pytest

from realsys.config.paths import TrialPaths, write_config
from realsys.config.schema import Config
from realsys.launch.cli import main

pytestmark = pytest.mark.needs(package="argcomplete")


def completions(line, folder):
    """Return what the shell is told to offer behind ``line``."""
    answer = folder / "answer"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    env = {**os.environ, **asked, "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    subprocess.run([sys.executable, "-m", "realsys"], env=env, cwd=folder, timeout=60, check=False)
    return answer.read_text().split()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("realsys sta", ["status"]),
        ("realsys run train.optimizer.l", ["train.optimizer.lr="]),
        ("realsys run name_store=", ["name_store=etcd", "name_store=file"]),
        ("realsys swe", ["sweep"]),
        ("realsys sweep name_store=etcd,", ["name_store=etcd,etcd", "name_store=etcd,file"]),
        ("realsys run recover=", ["recover=auto", "recover=off", "recover=resume"]),
        ("realsys resume mat", ["math/t"]),
        ("realsys logs roll", ["rollout_worker/12"]),
        ("realsys run --tri", ["--trial"]),
    ],
)
def test_shell_is_offered(line, offered, tmp_path):
    paths = TrialPaths(tmp_path / "runs" / "math" / "t")
    paths.logs.mkdir(parents=True)
    write_config(Config(trial="t"), paths.config)
    (paths.logs / "rollout_worker-12.log").touch()
    assert sorted(completions(line, tmp_path)) == offered


def test_script_is_valid_bash(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, "-c", 'eval "$1"; complete -p realsys', "-", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "realsys" in done.stdout
