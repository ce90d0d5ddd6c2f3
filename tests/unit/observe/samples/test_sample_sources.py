"""Samples of a trial folder: steps, evaluations, and groups that were not trained."""

import itertools
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from realsys.data.arith import write_char_tokenizer
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import ConfigError, RecordError
from realsys.observe.dropped_groups import read_group
from realsys.observe.evaluation_records import (
    EvalSample,
    append_sample,
    collect,
    read_result,
    read_samples,
    stored_evaluations,
    write_result,
)
from realsys.observe.samples import catalogue as catalogue_module
from realsys.observe.samples.catalogue import Catalogue
from realsys.observe.samples.filters import Filter, SampleRow, choose
from realsys.observe.samples.step_samples import CONTEXT, token_kinds, token_versions, turns, version_spans
from realsys.train.record_files import worker_file
from tests.support.processes.config_trees import changed
from tests.support.view.shown_trial import HOSTILE, STEPS, sample_trial, write_dropped, write_step


@pytest.fixture
def paths(tmp_path):
    return sample_trial(tmp_path)


def test_catalogue_lists_every_source(paths):
    listed = Catalogue(paths).sources()
    assert [source.name for source in listed] == [f"step:{STEPS}", f"eval:after-{STEPS}", "dropped"]
    assert listed[1].label == "after-40: accuracy 74.0% ± 4.0 (96 problems)"


def test_step_sample_has_reference_and_turns(paths):
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


def test_reference_of_moved_data_is_unknown(paths):
    shutil.rmtree(paths.data)
    view = Catalogue(paths).open(f"step:{STEPS}").view("0000000001.0/1.0")
    assert view.reference is None and "cannot be read" in view.note


def test_damaged_row_is_named_and_others_are_shown(paths):
    path = paths.records / f"step-{STEPS:08d}" / worker_file(0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # the last element of the last array
    path.write_bytes(data)
    source = Catalogue(paths).open(f"step:{STEPS}")
    assert source.view("0000000000.0/0.0").turns[1].text == "#3"
    with pytest.raises(RecordError, match=r"of sample 0000000001\.0/1\.0 is not what was written"):
        source.view("0000000001.0/1.0")


def test_evaluation_completion_is_shown(paths):
    source = Catalogue(paths).open(f"eval:after-{STEPS}")
    assert [row.correct for row in source.rows()] == [True, False, False]
    view = source.view("1/0")
    assert [turn.text for turn in view.turns] == ["5+1=", HOSTILE] and view.reference == "6"


def test_failed_group_shows_its_error(paths):
    source = Catalogue(paths).open("dropped")
    assert [row.outcome for row in source.rows()][1] == "equal_rewards"
    failed = source.view("0000000081.0/0")
    assert failed.row.reward is None and dict(failed.facts)["error"] == f"RewardError: {HOSTILE}"
    assert [turn.text for turn in failed.turns] == ["1+2=", "#3"]


def test_too_old_group_shows_versions_and_staleness(paths):
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


def test_group_is_read_once(paths, monkeypatch):
    """With many workers the files have up to a GiB: a list or a sample must not read them all again."""
    read: list[Path] = []

    def counted(path):
        read.append(path)
        return read_group(path)

    monkeypatch.setattr(catalogue_module, "read_group", counted)
    catalogue = Catalogue(paths)
    for _ in range(3):
        source = catalogue.open("dropped")
        assert len(source.rows()) == 3 and source.view("0000000081.0/0")
    assert len(read) == 4  # three for the list, one for the sample
    write_dropped(paths, catalogue.tokenizer)
    assert len(catalogue.open("dropped").rows()) == 3, "the copies have the same names"
    assert len(read) == 7


def test_group_that_left_has_no_text(paths):
    """Its worker removes old groups during a search, which goes on."""
    source = Catalogue(paths).open("dropped")
    shutil.rmtree(paths.dropped)
    assert source.text("0000000081.0/0") == ""
    assert source.rows() == []


def test_first_list_reads_a_bounded_number_of_bytes(paths, monkeypatch):
    monkeypatch.setattr(catalogue_module, "MOST_BYTES", 1)
    assert [row.group for row in Catalogue(paths).open("dropped").rows()] == ["0000000081"]


def test_step_that_is_trained_again_is_read_again(paths):
    catalogue = Catalogue(paths)
    before = catalogue.open(f"step:{STEPS}")
    assert catalogue.open(f"step:{STEPS}") is before
    shutil.rmtree(paths.records)
    with pytest.raises(RecordError, match="not recorded"):
        catalogue.open(f"step:{STEPS}")
    write_step(paths, catalogue.tokenizer, changed().model_dump(mode="json"))
    after = catalogue.open(f"step:{STEPS}")
    assert after is not before and len(after.rows()) == 4


def test_repeated_evaluation_is_read_again(paths):
    catalogue, folder = Catalogue(paths), paths.evaluations / f"after-{STEPS}"
    name = f"eval:after-{STEPS}"
    assert catalogue.open(name).view("2/0").turns[0].text == "5+2="
    write_result(folder, read_samples(folder)[2:], read_result(folder))
    source = catalogue.open(name)
    assert [row.sample_id for row in source.rows()] == ["2/0"] and source.view("2/0").turns[0].text == "5+2="


@pytest.mark.parametrize("content", [b"{", b'{"set": "\xff"}'])
def test_damaged_evaluation_hides_no_other_source(paths, content):
    (paths.evaluations / f"after-{STEPS}" / "result.json").write_bytes(content)
    catalogue = Catalogue(paths)
    listed = catalogue.sources()
    assert [source.kind for source in listed] == ["step", "eval", "dropped"]
    assert listed[1].label == "after-40: its result cannot be read"
    with pytest.raises(RecordError, match=r"result\.json: cannot be read"):
        catalogue.open(listed[1].name)


def test_completion_with_damaged_bytes_is_named(paths):
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
def test_unknown_source_or_sample_is_refused(paths, name, problem):
    with pytest.raises(RecordError, match=problem):
        Catalogue(paths).open(name).view("nobody")


# ---- Filters of samples, and the bound of a search


ROWS = [
    SampleRow("a/0", "a", 1, 1.0, True, 10, staleness=0, advantage=0.5),
    SampleRow("a/1", "a", 1, 0.0, False, 40, truncated=True, finish_reason="length", staleness=3, advantage=-0.9),
    SampleRow("b/0", "b", 2, 0.5, None, 20, staleness=1),
    SampleRow("c/0", "c", 3, None, None, 5, outcome="failed"),
]


class Rows:
    title = "rows"

    def rows(self):
        return ROWS

    def text(self, sample_id):
        return f"The ANSWER of {sample_id}"

    def view(self, sample_id):
        raise AssertionError("a list needs no tokens")


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ({}, ["a/0", "a/1", "b/0", "c/0"]),
        ({"verdict": "wrong"}, ["a/1"]),
        ({"verdict": "correct"}, ["a/0"]),
        ({"verdict": "unjudged"}, ["b/0", "c/0"]),
        ({"truncated": "1"}, ["a/1"]),
        ({"reward_min": "0.5"}, ["a/0", "b/0"]),
        ({"reward_min": "0", "reward_max": "0.5"}, ["a/1", "b/0"]),
        ({"stale_min": "1", "stale_max": "2"}, ["b/0"]),
        ({"tokens_min": "20"}, ["a/1", "b/0"]),
        ({"text": "answer of A"}, ["a/0", "a/1"]),
        ({"group": "b"}, ["b/0"]),
        ({"order": "longest"}, ["a/1", "b/0", "a/0", "c/0"]),
        ({"order": "shortest", "limit": "1"}, ["c/0"]),
        ({"order": "reward"}, ["a/1", "b/0", "a/0", "c/0"]),
        ({"order": "stalest", "offset": "1", "limit": "1"}, ["b/0"]),
        ({"order": "advantage"}, ["a/1", "a/0", "b/0", "c/0"]),
    ],
)
def test_filter_chooses_and_orders(query, ids):
    found = choose(Rows(), Filter.of(query))
    assert [row.sample_id for row in found.rows] == ids and found.total == 4


def test_search_ends_in_time_and_says_so():
    ticks = itertools.count()
    found = choose(Rows(), Filter(text="answer"), lambda: float(next(ticks)), seconds=2.5)
    assert (found.searched, found.unsearched, found.matched) == (2, 2, 2)


@pytest.mark.parametrize(
    "query",
    [
        {"order": "best"},
        {"reward_min": "x"},
        {"limit": "99999"},
        {"limit": "0"},
        {"offset": "-1"},
        {"verdict": "maybe"},
    ],
)
def test_bad_filter_is_named(query):
    [(field, value)] = query.items()
    with pytest.raises(ConfigError, match=f"config: {field}='?{value}'?: "):
        Filter.of(query)


# ---- Rows as turns of tokens, and as spans of versions


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory: Path = tmp_path_factory.mktemp("model")
    write_char_tokenizer(directory, chat=True)
    return TextTokenizer(directory)


@pytest.mark.parametrize(
    ("versions", "spans"),
    [
        ([3, 3, 4, 4, 7], [(3, "12"), (4, "+5"), (7, "=")]),
        ([2, 2, 2, 2, 2], [(2, "12+5=")]),
        ([0, 1, 2, 3, 4], [(0, "1"), (1, "2"), (2, "+"), (3, "5"), (4, "=")]),
    ],
)
def test_text_is_cut_where_its_version_changes(tokenizer, versions, spans):
    ids = tokenizer.encode_text("12+5=")
    found = list(version_spans(ids, np.array(versions, np.int32), tokenizer))
    assert [(span.version, span.text) for span in found] == spans
    assert [span.tokens for span in found] == [len(text) for _, text in spans]


def test_cut_character_goes_to_its_last_token(tokenizer):
    ids = tokenizer.encode_text("1é2")  # é has two tokens
    found = list(version_spans(ids, np.array([3, 3, 4, 4], np.int32), tokenizer))
    assert [(span.version, span.text) for span in found] == [(3, "1"), (4, "é2")]


def test_spans_decode_every_token_once(tokenizer):
    """A completion of many turns has hundreds of spans: the time must not grow with their number."""
    asked: list[int] = []

    class Counted:
        def token_texts(self, ids):
            asked.append(len(ids))
            return tokenizer.token_texts(ids)

    ids = tokenizer.encode_text("12" * 50)
    spans = list(version_spans(ids, np.arange(100, dtype=np.int32) % 2, Counted()))
    assert len(spans) == 100 and asked == [100]


def test_feedback_between_turns_has_no_version(tokenizer):
    mask = np.array([False, True, True, False, True])
    versions = token_versions(mask, np.array([3, 3, 4], np.int32))
    assert versions.tolist() == [CONTEXT, 3, 3, CONTEXT, 4]
    found = list(version_spans(tokenizer.encode_text("12+5="), versions, tokenizer))
    assert [(span.version, span.text) for span in found] == [(None, "1"), (3, "2+"), (None, "5"), (4, "=")]


def test_empty_text_has_no_spans(tokenizer):
    assert list(version_spans([], np.zeros(0, np.int32), tokenizer)) == []


def test_turns_carry_the_numbers_of_their_tokens(tokenizer):
    mask = np.array([False, True, True, False, True])
    made = turns(
        {
            "tokens": np.array(tokenizer.encode_text("1é+5")),
            "loss_mask": mask,
            "versions": np.array([3, 4, 4], np.int32),
            "behav_logprobs": np.array([-0.123456, -2.0, -1.0], np.float32),
            "advantages": np.full(3, 0.5, np.float32),
        },
        0,
        tokenizer,
    )
    assert [(turn.kind, turn.text) for turn in made] == [
        ("prompt", "1"),
        ("sampled", "é"),
        ("context", "+"),
        ("sampled", "5"),
    ]
    assert made[1].pieces == ["", "é"]  # two bytes, one character
    assert (made[1].versions, made[1].logprobs, made[1].advantages) == ([3, 4], [-0.1235, -2.0], [0.5])
    assert made[0].versions == [] and made[3].versions == [4]


def test_masked_tokens_begin_a_single_completion():
    mask = np.array([False, False, False, True, True])
    assert token_kinds(mask, 0) == ["prompt"] * 3 + ["sampled"] * 2
    assert token_kinds(mask, 2) == ["prompt", "masked", "masked", "sampled", "sampled"]
    several = np.array([False, True, False, True])
    assert token_kinds(several, 1) == ["prompt", "sampled", "context", "sampled"]


def test_piece_texts_join_to_the_whole(tokenizer):
    for text in ("", "a b\n\tc", "naïve 日本 🙂", "\x00\x1b[2J"):
        ids = tokenizer.encode_text(text)
        assert "".join(tokenizer.token_texts(ids)) == text
    cut = tokenizer.encode_text("日")[:2]
    assert "".join(tokenizer.token_texts(cut)) == tokenizer.decode(cut)


# ---- Completions of evaluations on disk


FIRST = EvalSample("e", "eval", 0, 0, 0, 3, 3, "1+1=", "#2", "2", 5.0, True, "stop", 3, "2")


def of(**changes):
    return msgspec.structs.replace(FIRST, **changes)


def test_only_completions_that_count_are_kept(tmp_path):
    """An attempt that was superseded is in the parts, too, and its worker may be another one."""
    for worker, sample in (
        ("rollout_worker/0", of(attempt=0)),
        ("rollout_worker/1", of(attempt=1, completion="#3")),
        ("rollout_worker/0", of(problem=1, sample=1)),
        ("rollout_worker/0", of(problem=1, sample=0)),
    ):
        append_sample(tmp_path, worker, sample)
    kept = collect(tmp_path, [(1, 1, 0), (0, 0, 1), (1, 0, 0), (7, 0, 0)])
    assert [sample.unit for sample in kept] == [(0, 0, 1), (1, 0, 0), (1, 1, 0)]
    write_result(tmp_path, kept, {"accuracy": 0.5})
    assert read_samples(tmp_path) == kept and read_result(tmp_path) == {"accuracy": 0.5}
    assert {path.name for path in tmp_path.iterdir()} == {"samples.jsonl", "result.json"}
    write_result(tmp_path, collect(tmp_path, [sample.unit for sample in kept]), {})
    assert read_samples(tmp_path) == kept, "the trainer died before it logged the result, and stores it again"


def test_line_that_was_cut_off_is_no_completion(tmp_path):
    append_sample(tmp_path, "w", FIRST)
    with (tmp_path / "parts" / "w.jsonl").open("ab") as part:
        part.write(msgspec.json.encode(of(problem=1))[:-5])
    assert collect(tmp_path, [FIRST.unit, (1, 0, 0)]) == [FIRST]


def test_changed_line_is_named(tmp_path):
    write_result(tmp_path, [FIRST], {})
    (tmp_path / "samples.jsonl").write_bytes(b"{}\n")
    with pytest.raises(RecordError, match=r"samples.jsonl:1: is not a completion"):
        read_samples(tmp_path)


def test_unfinished_evaluation_has_no_samples(tmp_path):
    append_sample(tmp_path / "e", "w", FIRST)
    assert stored_evaluations(tmp_path) == []
    with pytest.raises(RecordError, match="has not ended"):
        read_samples(tmp_path / "e")
    with pytest.raises(RecordError, match="cannot be read"):
        read_result(tmp_path / "e")
