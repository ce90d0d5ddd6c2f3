"""Results of an evaluation: a file, and a table for people."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.telemetry.steps import read_steps


def write_results(config: Config, paths: TrialPaths) -> list[dict[str, Any]]:
    records = [r for r in read_steps(paths.steps) if r["kind"] == "eval"]
    (paths.root / "results.json").write_text(json.dumps(records, indent=2))
    return records


def print_table(console: Console, records: list[dict[str, Any]]) -> None:
    console.print(records)
