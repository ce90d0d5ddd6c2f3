"""What a dry run prints: the table of processes, the length of the run."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from realsys.launch.process_plan import ProcessSpec
from realsys.launch.run import epochs_text, process_table

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


@pytest.mark.parametrize(
    ("steps", "of_epoch", "text"),
    [
        (60, 312.5, "60, which are 0.19 epochs; one epoch is 312 steps"),
        (100, 17 / 512, "100, which are 3,012 epochs; one epoch is 0.033 steps"),
    ],
)
def test_epochs_of_small_data_have_digits_that_tell(steps: int, of_epoch: float, text: str) -> None:
    assert epochs_text(steps, of_epoch) == text
