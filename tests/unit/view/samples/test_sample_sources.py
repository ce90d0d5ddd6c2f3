"""Samples of a trial folder: steps, evaluations, and groups that were not trained."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from realsys.config.paths import TrialPaths
from realsys.errors import RecordError
from realsys.train.records.record_files import worker_file
from realsys.view.samples.catalogue import Catalogue
from tests.support.view.shown_trial import HOSTILE, STEPS, sample_trial


@pytest.fixture
def paths(tmp_path: Path) -> TrialPaths:
    return sample_trial(tmp_path)


def test_catalogue_lists_every_source(paths: TrialPaths) -> None:
    listed = Catalogue(paths).sources()
    assert [source.name for source in listed] == [f"step:{STEPS}", f"eval:after-{STEPS}", "dropped"]
    assert listed[1].label == "after-40: accuracy 74.0% ± 4.0 (96 problems)"


def test_step_sample_has_reference_and_turns(paths: TrialPaths) -> None:
    source = Catalogue(paths).open(f"step:{STEPS}")
    view = source.view("0000000001.0/1.0")
    assert [(turn.kind, turn.text) for turn in view.turns] == [
        ("prompt", "what is 3+4 ?"),
        ("sampled", "#6"),
        ("context", "wrong, try again"),
        ("sampled", "#7"),
    ]
    assert (view.reference, view.row.correct, view.row.staleness) == ("7", True, 2)
    assert [turn.versions for turn in view.turns if turn.kind == "sampled"] == [[37], [38]]


def test_reference_of_moved_data_is_unknown(paths: TrialPaths) -> None:
    shutil.rmtree(paths.data)
    view = Catalogue(paths).open(f"step:{STEPS}").view("0000000001.0/1.0")
    assert view.reference is None and "cannot be read" in view.note


def test_damaged_row_is_named_and_others_are_shown(paths: TrialPaths) -> None:
    path = paths.records / f"step-{STEPS:08d}" / worker_file(0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # the last element of the last array
    path.write_bytes(data)
    source = Catalogue(paths).open(f"step:{STEPS}")
    assert source.view("0000000000.0/0.0").turns[1].text == "#3"
    with pytest.raises(RecordError, match=r"of sample 0000000001\.0/1\.0 is not what was written"):
        source.view("0000000001.0/1.0")


def test_evaluation_completion_is_shown(paths: TrialPaths) -> None:
    source = Catalogue(paths).open(f"eval:after-{STEPS}")
    assert [row.correct for row in source.rows()] == [True, False, False]
    view = source.view("1/0")
    assert [turn.text for turn in view.turns] == ["5+1=", HOSTILE] and view.reference == "6"


def test_failed_group_shows_its_error(paths: TrialPaths) -> None:
    source = Catalogue(paths).open("dropped")
    assert [row.outcome for row in source.rows()][1] == "equal_rewards"
    failed = source.view("0000000081.0/0")
    assert failed.row.reward is None and dict(failed.facts)["error"] == f"RewardError: {HOSTILE}"
    assert [turn.text for turn in failed.turns] == ["1+2=", "#3"]


@pytest.mark.parametrize("name", ["step:7", "step:../x", "eval:../../etc", "eval:", "", "other", "step:"])
def test_unknown_source_is_refused(paths: TrialPaths, name: str) -> None:
    with pytest.raises(RecordError):
        Catalogue(paths).open(name)


@pytest.mark.parametrize("name", [f"step:{STEPS}", f"eval:after-{STEPS}", "dropped"])
def test_unknown_sample_is_refused(paths: TrialPaths, name: str) -> None:
    with pytest.raises(RecordError, match="'nobody'"):
        Catalogue(paths).open(name).view("nobody")
