"""The table and the file of an evaluation."""

from __future__ import annotations

import json
import shlex
from typing import Any

from realsys.config.paths import TrialPaths
from realsys.launch.commands.evaluate import report, table
from realsys.launch.words import own_command
from realsys.observe.evaluation_records import EvalSample, write_result


def result(name: str = "eval", **more: Any) -> dict[str, Any]:
    shares = {"1": {"value": 0.5, "low": 0.4, "high": 0.6}}
    numbers = {"problems": 16, "samples": 4, "failed": 0, "length_mean": 21.4, "version": 60, "cut_off": 0.25}
    return {"set": name, "complete": True, "incomplete": "", "pass_at": shares, "majority": None, **numbers, **more}


def sample(problem: int, reason: str) -> EvalSample:
    return EvalSample("eval-60", "eval", problem, 0, 0, 60, 60, "p", "c", "r", 1.0, True, reason, 3)


def test_table_has_a_line_per_data_set() -> None:
    lines = table([result(), result("aime", problems=30, cut_off=None)])
    assert [line.split("  ")[0] for line in lines] == ["data set", "eval", "aime"]
    assert "50.0% (40.0 - 60.0)" in lines[1] and "25.0%" in lines[1] and lines[1].endswith("60")
    assert all("\n" not in line for line in lines)


def test_pass_at_k_and_votes_have_columns() -> None:
    both = {"1": {"value": 0.5, "low": 0.4, "high": 0.6}, "8": {"value": 0.9, "low": 0.8, "high": 1.0}}
    lines = table([result(pass_at=both, majority={"value": 0.7, "low": 0.6, "high": 0.8}), result("aime")])
    assert "pass@8" in lines[0] and "majority" in lines[0]
    assert "90.0% (80.0 - 100.0)" in lines[1] and "70.0% (60.0 - 80.0)" in lines[1]


def test_incomplete_evaluation_shows_no_number() -> None:
    lines = table([result(complete=False, incomplete="3 of 64 failed", pass_at={}, failed=3)])
    assert "%" not in lines[1].replace("25.0%", "")
    assert lines[-1] == "eval: incomplete: 3 of 64 failed"


def test_omitted_vote_has_its_reason() -> None:
    lines = table([result(majority_omitted="comparing the final answers took more than 300 s")])
    assert lines[2:] == ["eval: no majority: comparing the final answers took more than 300 s"]


def test_lost_numbers_are_named_below_the_table() -> None:
    lines = table([result(unjudged=1, left_out_k=[8])])
    assert lines[2:] == [
        "eval: 1 of 16 problems left out: all their completions failed",
        "eval: no pass@8: a problem has fewer verdicts",
    ]


def test_report_reads_the_stored_completions(tmp_path, capsys) -> None:
    paths = TrialPaths(tmp_path)
    write_result(paths.evaluations / "eval-60", [sample(0, "length"), sample(1, "stop")], {})
    assert report(paths, tmp_path / "out", {"model": "/m"}, {"eval-60": result(cut_off=None)}) == 0
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert stored["model"] == "/m" and stored["results"][0]["cut_off"] == 0.5
    assert stored["results"][0]["completions"] == 2 and "50.0%" in capsys.readouterr().out


def test_incomplete_result_is_an_exit_code(tmp_path, capsys) -> None:
    found = result(complete=False, incomplete="cancelled by its user", pass_at={})
    assert report(TrialPaths(tmp_path), tmp_path, {}, {"eval-0": found}) == 1
    assert "incomplete: cancelled by its user" in capsys.readouterr().out


def test_command_for_the_completions_can_be_copied(tmp_path, capsys) -> None:
    paths = TrialPaths(tmp_path / "my runs [1]")
    report(paths, tmp_path / "out", {}, {"eval-60": result()})
    words = shlex.split(capsys.readouterr().out.partition("completions  ")[2].splitlines()[0])
    assert words == [*own_command(), "samples", str(paths.root), "--eval", "eval-60"]
