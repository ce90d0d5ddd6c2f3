"""Processes of `realsys serve` are killed during the calls of a client: no call is lost, and none is applied twice."""

import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from realsys.train.checkpoint.checkpoint_files import RankIndex, decode_index
from tests.support.jobs.jobs import BOUND_S, LiveJob, realsys
from tests.tinker.conftest import Service

pytestmark = [pytest.mark.system, pytest.mark.needs(package="tinker_cookbook")]

#: steps, and kills
STEPS = int(os.environ.get("REALSYS_KILLS", "4"))
SEED = int(os.environ.get("REALSYS_DAY", "1"))
STEPPER = "tests.support.tinker.steps"
PROCESSES = ("master_worker/0", "model_worker/0", "model_worker/1", "generation_server/0", "gserver_manager/0")


def trained(service: Service, name: str, *, killed: bool = False) -> dict[str, str]:
    """Train a new model; return the checksums of its state: of its adapter, and of its optimizer."""
    bound_s = BOUND_S * (1 + STEPS // 8)
    service.loop(STEPPER, name, steps=STEPS, killed=killed, bound_s=bound_s).completed()
    model, _ = (service.folder / name / "saved").read_text().removeprefix("tinker://").split("/weights/")
    folder = service.live.root / "clients" / model.replace(":", "-")
    found = {}
    state = max(folder.glob("weights-*"), key=lambda each: int(each.name.rpartition("-")[2]))
    for path in sorted(state.glob("*-of-*.json")):
        index: RankIndex = decode_index(path.read_bytes(), path)
        pieces = [piece for piece in index.pieces if piece.kind != "generator"]
        found |= {f"{index.rank} {piece.kind} {piece.name} {piece.start}": piece.checksum for piece in pieces}
    assert any("exp_avg" in name for name in found), "the state of the optimizer is in it"
    return found


def kill_at_steps(live: LiveJob, folder: Path, ended: threading.Event) -> list[str]:
    """Kill a process a random time after the beginning of each step, until ``ended``; return those killed."""
    rng, killed = random.Random(SEED), []
    while not ended.wait(0.01):
        begun = (folder / "calls").stat().st_size if (folder / "calls").exists() else 0
        if begun > len(killed) and not ended.wait(rng.uniform(0.0, 0.3)):
            name = rng.choice(PROCESSES)
            os.kill(live.until(partial(live.pid, name), f"{name} runs"), signal.SIGKILL)
            killed.append(name)
            with (folder / "kills").open("ab") as file:
                file.write(b".")
    return killed


def test_killed_service_ends_as_an_undisturbed_one(service: Service):
    undisturbed = trained(service, "undisturbed")
    ended, killed_folder = threading.Event(), service.folder / "killed"
    killed_folder.mkdir()
    (killed_folder / "kills").touch()
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill_at_steps, service.live, killed_folder, ended)
        try:
            disturbed = trained(service, "killed", killed=True)
        finally:
            ended.set()
    killed = killing.result()
    assert len(killed) == STEPS
    print(f"killed: {', '.join(killed)}")
    assert disturbed == undisturbed
    audited = realsys("audit", service.live.root)
    assert audited.returncode == 0, audited.stdout
