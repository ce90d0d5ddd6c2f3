"""Modules that one sample's round trip crosses, and the records it becomes, noted in a run.

    python -m benchmarks.round_trip [--steps 12]

An arith job with one rank, one server and the file name store. A profile hook (``round_trip_hook/sitecustomize.py``)
notes in every process which modules of realsys run between the third step and the third but last: whatever moves
samples and weights, and also what runs beside them, such as heartbeats and status. The launcher, its display and the
trackers are left out: no sample passes through them.

    modules   of realsys, by package
    records   types of which a record was made: dataclasses only
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks._jobs import records, run_job
from benchmarks._table import report

HOOK = Path(__file__).with_name("round_trip_hook")
#: module of a process -> its name in the table
PROCESSES = {
    "realsys.manager.process": "GserverManager",
    "realsys.rollout.worker_loop": "RolloutWorker",
    "realsys.reward.verifier_main": "its verifiers",
    "realsys.generation.server": "GenerationServer",
    "realsys.train.worker.call_service": "ModelWorker",
    "realsys.train.master.session": "MasterWorker",
}


def read(folder: Path, begin: float, end: float) -> dict[str, dict[str, set[str]]]:
    """Return {process: {"modules", "records"}} of what ran between two times."""
    found: dict[str, dict[str, set[str]]] = {}
    for path in folder.glob("*.json"):
        rows = [row for row in json.loads(path.read_text())["rows"] if row[2] >= begin]
        modules = {module for module, _, _ in rows}
        process = next((name for module, name in PROCESSES.items() if module in modules), None)
        if process is not None:
            into = found.setdefault(process, {"modules": set(), "records": set()})
            into["modules"] |= modules
            into["records"] |= {record for _, record, _ in rows if record}
    return found


def by_package(modules: set[str]) -> str:
    packages: dict[str, list[str]] = defaultdict(list)
    for module in sorted(modules):
        _, package, *rest = module.split(".")
        packages[package].append(".".join(rest))
    return "; ".join(f"{package}: {', '.join(filter(None, names))}".rstrip(": ") for package, names in packages.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        (root / "notes").mkdir()
        os.environ |= {"ROUND_TRIP": str(root / "notes"), "PYTHONPATH": str(HOOK)}
        settings = [f"train.total_steps={args.steps}", "train.batch_groups=4", "warmup.steps=20"]
        trial = run_job(root, "noted", [*settings, "allocation=serve.d1+d1", "evaluation.problems=0"])
        times = [step["time"] for step in records(trial, "train")]
        found = read(root / "notes", times[2], times[-3])
    rows: list[dict[str, Any]] = [
        {
            "process": process,
            "count": len(found[process]["modules"]),
            "records": len(found[process]["records"]),
            "modules": by_package(found[process]["modules"]),
        }
        for process in PROCESSES.values()
    ]
    both = {kind: set().union(*(each[kind] for each in found.values())) for kind in ("modules", "records")}
    rows.append({"process": "all", "count": len(both["modules"]), "records": len(both["records"]), "modules": ""})
    report("round_trip", rows, {"steps": args.steps})


if __name__ == "__main__":
    main()
