"""Samples of a trial folder: steps, evaluations, and groups that were not trained."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from realsys.config.paths import TrialPaths
from realsys.errors import RecordError
from realsys.observe.dropped_groups import DroppedGroup, read_group
from realsys.observe.evaluation_records import read_result, read_samples, write_result
from realsys.observe.samples import catalogue
from realsys.observe.samples.catalogue import Catalogue
from realsys.train.record_files import worker_file
from tests.support.processes.config_trees import changed
from tests.support.view.shown_trial import HOSTILE, STEPS, sample_trial, write_dropped, write_step


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


def test_too_old_group_shows_versions_and_staleness(paths: TrialPaths) -> None:
    """The trainer knows no text: the prompt comes from the tokens, the reference answer from the data set."""
    source = Catalogue(paths).open("dropped")
    row = source.rows()[2]
    assert (row.sample_id, row.outcome, row.staleness) == ("0000000079.0/0.0", "too old (masked)", 6)
    assert source.title.startswith("newest groups that were not trained: 1 RewardError")
    view = source.view(row.sample_id)
    assert [(turn.kind, turn.text) for turn in view.turns] == [("prompt", "1+2="), ("sampled", "#3")]
    facts = dict(view.facts)
    assert view.reference == "3" and facts["group"].startswith("masked: all of its tokens")
    assert facts["versions"] == "sampled by v37 to v38; the next batch trains on top of v43: 6 behind"


def test_group_is_read_once(paths: TrialPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many workers the files have up to a GiB: a list or a sample must not read them all again."""
    read: list[Path] = []

    def counted(path: Path) -> DroppedGroup:
        read.append(path)
        return read_group(path)

    monkeypatch.setattr(catalogue, "read_group", counted)
    sources = Catalogue(paths)
    for _ in range(3):
        source = sources.open("dropped")
        assert len(source.rows()) == 3 and source.view("0000000081.0/0")
    assert len(read) == 4  # three for the list, one for the sample
    write_dropped(paths, sources.tokenizer)
    assert len(sources.open("dropped").rows()) == 3, "the copies have the same names"
    assert len(read) == 7


def test_group_that_left_has_no_text(paths: TrialPaths) -> None:
    """Its worker removes old groups during a search, which goes on."""
    source = Catalogue(paths).open("dropped")
    shutil.rmtree(paths.dropped)
    assert source.text("0000000081.0/0") == ""
    assert source.rows() == []


def test_first_list_reads_a_bounded_number_of_bytes(paths: TrialPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "MOST_BYTES", 1)
    assert [row.group for row in Catalogue(paths).open("dropped").rows()] == ["0000000081"]


def test_step_that_is_trained_again_is_read_again(paths: TrialPaths) -> None:
    catalogue = Catalogue(paths)
    before = catalogue.open(f"step:{STEPS}")
    assert catalogue.open(f"step:{STEPS}") is before
    shutil.rmtree(paths.records)
    with pytest.raises(RecordError, match="not recorded"):
        catalogue.open(f"step:{STEPS}")
    write_step(paths, catalogue.tokenizer, changed().model_dump(mode="json"))
    after = catalogue.open(f"step:{STEPS}")
    assert after is not before and len(after.rows()) == 4


def test_repeated_evaluation_is_read_again(paths: TrialPaths) -> None:
    catalogue, folder = Catalogue(paths), paths.evaluations / f"after-{STEPS}"
    name = f"eval:after-{STEPS}"
    assert catalogue.open(name).view("2/0").turns[0].text == "5+2="
    write_result(folder, read_samples(folder)[2:], read_result(folder))
    source = catalogue.open(name)
    assert [row.sample_id for row in source.rows()] == ["2/0"] and source.view("2/0").turns[0].text == "5+2="


@pytest.mark.parametrize("content", [b"{", b'{"set": "\xff"}'])
def test_damaged_evaluation_hides_no_other_source(paths: TrialPaths, content: bytes) -> None:
    (paths.evaluations / f"after-{STEPS}" / "result.json").write_bytes(content)
    catalogue = Catalogue(paths)
    listed = catalogue.sources()
    assert [source.kind for source in listed] == ["step", "eval", "dropped"]
    assert listed[1].label == "after-40: its result cannot be read"
    with pytest.raises(RecordError, match=r"result\.json: cannot be read"):
        catalogue.open(listed[1].name)


def test_completion_with_damaged_bytes_is_named(paths: TrialPaths) -> None:
    path = paths.evaluations / f"after-{STEPS}" / "samples.jsonl"
    path.write_bytes(path.read_bytes().replace(b"5+1=", b"5\xff1="))
    source = Catalogue(paths)
    with pytest.raises(RecordError, match=r"samples\.jsonl: cannot be read"):
        source.open(f"eval:after-{STEPS}").view("1/0")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("step:7", "step 7 is not recorded"),
        ("step:" + 5000 * "9", "samples 'step:9+' not found"),
        *[
            (name, f"samples '{name}' not found")
            for name in ("step:../x", "step:", "eval:../../etc", "eval:", "", "other")
        ],
        *[(name, "'nobody'") for name in (f"step:{STEPS}", f"eval:after-{STEPS}", "dropped")],
    ],
    ids=lambda text: text[:20],
)
def test_unknown_source_or_sample_is_refused(paths: TrialPaths, name: str, problem: str) -> None:
    with pytest.raises(RecordError, match=problem):
        Catalogue(paths).open(name).view("nobody")
