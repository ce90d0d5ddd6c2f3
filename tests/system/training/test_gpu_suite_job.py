"""The command that runs everything that needs a GPU, on a machine without one: skipped, or on the CPU."""

import json
import os

import pytest

from tests.support.gpu.gpu_all_run import check_on_cpu, gpu_all

pytestmark = pytest.mark.system
SGLANG = 8
#: one item a day, by its number in the year (Makefile); REALSYS_EXPLORE=1: all
ITEMS = range(SGLANG) if os.environ.get("REALSYS_EXPLORE") == "1" else [int(os.environ.get("REALSYS_DAY", 0)) % SGLANG]


def test_every_row_says_that_there_is_no_gpu(tmp_path):
    """A benchmark and a file of tests."""
    code, output, rows = gpu_all(tmp_path / "out", "--budget", "280", "--items", "1", "7")
    assert code == 0, output
    assert [(row["name"], row["result"], row["detail"]) for row in rows] == [
        ("varlen", "skipped", "no CUDA device"),
        ("generation_rate", "skipped", "no CUDA device"),
    ]
    assert output.splitlines()[-1].split()[:3] == ["7", "generation_rate", "skipped"]


def test_item_out_of_time_is_a_row(tmp_path):
    code, _, rows = gpu_all(tmp_path / "out", "--budget", "0.1", "--items", "0", "1")
    assert [row["result"] for row in rows] == ["out of time", "not run"] and code == 1


def test_dry_counts_are_those_predicted(tmp_path):
    """FLOPs, bytes of reductions and of the hand-over, and waits of three models; no wait in a micro-batch."""
    code, output, [row] = gpu_all(tmp_path / "out", "--dry")
    assert (code, row["result"]) == (0, "passed"), output
    rows = json.loads((tmp_path / "out" / "dry.rows.json").read_text())
    assert [row["model"] for row in rows if row["what"] == "TFLOP"] == ["0.5b", "1.5b", "7b"]
    assert {row["counted"] for row in rows if row["what"] == "waits of a micro-batch"} == {0}


@pytest.mark.parametrize("item", ITEMS)
def test_item_runs_on_the_cpu(item, tmp_path):
    """A typo must not wait for a GPU."""
    check_on_cpu(item, tmp_path / "out")
