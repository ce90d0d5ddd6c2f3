"""The table of processes that a dry run prints."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from realsys.launch.process_plan import ProcessSpec
from realsys.launch.run import process_table

SHARDS = ("actor@d0t0p0", "ref@d0t0p0", "critic@d0t0p0", "reward@d0t0p0")


def test_narrow_table_cuts_nothing() -> None:
    env = {"OMP_NUM_THREADS": "16"}
    kinds = ("generation_server", "model_worker")
    specs = [ProcessSpec(kind, 0, (), Path(), "restart_training", ", ".join(SHARDS), env) for kind in kinds]
    out = io.StringIO()
    Console(file=out, width=80).print(process_table(specs))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for part in ("generation_server/0", "model_worker/0", "threads", "cpu", "the trainer restarts", *SHARDS):
        assert part in text, part
