"""Rows of JSON files, tables, folders and generated tasks."""

import builtins
import json
import sys
import tracemalloc
from random import Random

import pytest

from realsys.config.schema_data import absolute_source, source_problem
from realsys.data.sources import source_files, source_rows
from realsys.data.sources.verifiers_tasks import surroundings
from realsys.errors import DataError
from tests.support.data.data_rows import DAPO, GSM8K, VERL, jsonl
from tests.support.needs import need_package

ROWS = [{"n": i, "text": f"row {i}", "inner": {"list": [i, None]}} for i in range(150)]


def read(path, split="train", **arguments):
    return list(source_rows(str(path), split, arguments))


@pytest.fixture(scope="module")
def arrow():
    need_package("pyarrow")
    import pyarrow

    return pyarrow


def parquet(arrow, path, rows):
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(arrow.Table.from_pylist(rows), path)
    return path


def stream(arrow, path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = arrow.Table.from_pylist(rows)
    with arrow.OSFile(str(path), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=64)
    return path


def test_json_lines_have_their_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"a": 2}\nnot json\n["a"]\n{"a": "\xff"}')
    found = read(path)
    assert [(row.where, row.values) for row in found[:2]] == [(f"{path}:1", {"a": 1}), (f"{path}:3", {"a": 2})]
    assert [row.where for row in found if row.problem] == [f"{path}:{n}" for n in (4, 5, 6)]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("rows.csv", "prompt,answer\n", r"\.csv files are not read"),
        ("rows.json", '{\n  "data": []\n}\n', "rows.json:1: an object over several lines"),
    ],
)
def test_other_format_is_named_once(tmp_path, name, content, problem):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=problem):
        read(tmp_path / name)


def test_null_keys_of_messages_and_tools_are_left_out(tmp_path, arrow):
    """A table gives all objects of a column the same keys."""
    import pyarrow.parquet

    tools = [{"name": "add", "of": {"a": 1}}, {"name": "find", "of": {"city": 2}}]
    rows = [{"tools": [tool], "info": tool["of"]} for tool in tools]
    pyarrow.parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet")[0].values == {"tools": [tools[0]], "info": {"a": 1, "city": None}}


def test_json_array_is_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"a": 1}, 5], indent=1))
    first, second = read(path)
    assert (first.where, first.values) == (f"{path}:row 1", {"a": 1}) and "object" in second.problem
    path.write_text("[{]")
    with pytest.raises(DataError, match=r"a\.json: .*must be one JSON array"):
        read(path)


def test_parquet_and_arrow_rows(tmp_path, arrow):
    for path in (parquet(arrow, tmp_path / "a.parquet", ROWS), stream(arrow, tmp_path / "a.arrow", ROWS)):
        found = read(path)
        assert [row.values for row in found] == ROWS
        assert found[-1].where == f"{path}:row 150"
    table = arrow.Table.from_pylist(ROWS)
    with arrow.OSFile(str(tmp_path / "f.arrow"), "wb") as sink, arrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert [row.values for row in read(tmp_path / "f.arrow")] == ROWS


def test_large_table_is_streamed(tmp_path, arrow):
    """32 MB in one row group that do not compress pass with a few MB of Python objects and of Arrow's memory."""
    path = parquet(arrow, tmp_path / "big.parquet", [{"text": Random(i).randbytes(400).hex()} for i in range(40_000)])
    before = arrow.total_allocated_bytes()
    tracemalloc.start()
    allocated = max(arrow.total_allocated_bytes() for _ in source_rows(str(path), "train", {})) - before
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 16 << 20 and peak < 8 << 20 and allocated < 8 << 20


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_damaged_table_is_a_data_error(tmp_path, arrow, name):
    (tmp_path / name).write_bytes(b"PAR1 not a table")
    with pytest.raises(DataError, match=f"{name}: cannot be read after row 0"):
        read(tmp_path / name)
    whole = stream(arrow, tmp_path / "b.arrow", ROWS).read_bytes()
    (tmp_path / "b.arrow").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cannot be read after row"):
        read(tmp_path / "b.arrow")


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] in ("pyarrow", "reasoning_gym"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"pip install 'realsys\[data\]'"):
        read(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"pip install 'realsys\[reasoning-gym\]'"):
        read("reasoning_gym:chain_sum")


def test_saved_folder_is_read(tmp_path, arrow):
    """The files of ``Dataset.save_to_disk`` and ``DatasetDict.save_to_disk``."""
    for split, rows in (("train", ROWS), ("test", ROWS[:3])):
        folder = tmp_path / "saved" / split
        stream(arrow, folder / "data-00000-of-00002.arrow", rows[:2])
        stream(arrow, folder / "data-00001-of-00002.arrow", rows[2:])
        names = [{"filename": f"data-0000{i}-of-00002.arrow"} for i in (0, 1)]
        (folder / "state.json").write_text(json.dumps({"_data_files": names}))
        (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    saved = tmp_path / "saved"
    assert [row.values for row in read(saved)] == ROWS
    assert [row.values for row in read(saved, "eval")] == ROWS[:3] == [row.values for row in read(f"{saved}@test")]
    assert len(read(saved / "train")) == 150
    with pytest.raises(DataError, match="split 'dev' not found, it has test, train"):
        read(f"{saved}@dev")


@pytest.mark.needs(package="datasets")
def test_saved_folder_written_by_datasets(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # its progress bars start a thread
    datasets.disable_progress_bars()
    both = datasets.DatasetDict(train=datasets.Dataset.from_list([VERL] * 3), test=datasets.Dataset.from_list([DAPO]))
    both.save_to_disk(tmp_path / "saved")
    assert [row.values for row in read(tmp_path / "saved")] == [VERL] * 3
    assert [row.values for row in read(tmp_path / "saved", "eval")] == [DAPO]
    both["train"].to_parquet(tmp_path / "repo" / "data" / "train-00000-of-00001.parquet")
    assert [row.values for row in read(tmp_path / "repo")] == [VERL] * 3


def test_saved_folder_cannot_name_other_files(tmp_path):
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "../../etc/passwd"}]}')
    with pytest.raises(DataError, match="file not found in this folder"):
        read(tmp_path)
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match="names no _data_files"):
        read(tmp_path)


def test_repository_folder_is_read_by_split(tmp_path):
    names = ("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test-00000-of-00001.jsonl")
    for name in (*names, ".cache/train.jsonl", "dataset_infos.json", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        jsonl(tmp_path / name, [{"from": name}])
    assert [row.values["from"] for row in read(tmp_path)] == list(names[:2])
    assert [row.values["from"] for row in read(tmp_path, "eval")] == [names[2]]
    assert [path.name for path in source_files(f"{tmp_path}@test", "train")] == ["test-00000-of-00001.jsonl"]


def test_repository_without_splits_is_train(tmp_path):
    jsonl(tmp_path / "part1.jsonl", [GSM8K])
    assert len(read(tmp_path)) == 1
    with pytest.raises(DataError, match="split 'test' not found"):
        read(tmp_path, "eval")


def test_ambiguous_folder_is_refused(tmp_path):
    for name in ("main/train.jsonl", "socratic/train.jsonl"):
        (tmp_path / name).parent.mkdir()
        jsonl(tmp_path / name, [GSM8K])
    with pytest.raises(DataError, match="several data sets: name one of the folders main, socratic"):
        read(tmp_path)
    assert len(read(tmp_path / "main")) == 1
    (tmp_path / "main" / "train.json").write_text("{}")
    with pytest.raises(DataError, match=r"files of several kinds \(\.json, \.jsonl\)"):
        read(tmp_path / "main")
    with pytest.raises(DataError, match="no data files found"):
        (tmp_path / "empty").mkdir()
        read(tmp_path / "empty")


def test_names_of_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a@b").mkdir()
    assert absolute_source("x/y@test") == f"{tmp_path}/x/y@test"
    assert absolute_source("a@b") == f"{tmp_path}/a@b"
    assert absolute_source("reasoning_gym:chain_sum") == "reasoning_gym:chain_sum"
    assert (absolute_source(""), source_problem(f"{tmp_path}@test"), source_problem("reasoning_gym:x")) == ("", "", "")
    assert source_problem("nowhere.jsonl") == "is not a readable file or folder"


@pytest.mark.needs(package="reasoning_gym")
def test_generated_tasks_depend_on_the_seed():
    name = "reasoning_gym:chain_sum"
    one, same, other = read(name, size=4), read(name, size=4, seed=0), read(name, size=4, seed=9)
    held_out = read(name, "eval", size=4)
    assert one == same and not any(row.problem for row in one)
    assert len({row.values["prompt"] for rows in (one, other, held_out) for row in rows}) == 12
    assert one[0].where == f"{name}:row 1" and one[0].values["reasoning_gym"]["name"] == "chain_sum"


@pytest.mark.needs(package="reasoning_gym")
@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [("no_such", {}, "not registered"), ("chain_sum", {"sise": 1}, "TypeError"), ("composite", {}, "data.mixture")],
)
def test_wrong_generated_source_is_one_line(name, arguments, problem):
    with pytest.raises(DataError, match=problem) as caught:
        read(f"reasoning_gym:{name}", **arguments)
    assert "\n" not in str(caught.value)


# ---- Problems of a source ``verifiers:ENV`` before its interpreter has listed a task


SOURCE = "verifiers:no_such_environment"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "source_args.env_python must be the path of an interpreter"),
        ({"env_python": "/no/python"}, "/no/python: not found or not a program"),
        ({"env_python": sys.executable, "sizes": 3}, "source_args sizes: use args, env_python, eval_args, size"),
        ({"env_python": sys.executable}, "cannot list its tasks: ModuleNotFoundError: No module named 'verifiers'"),
    ],
)
def test_wrong_source_names_the_problem(arguments, problem):
    with pytest.raises(DataError, match=problem):
        list(source_rows(SOURCE, "train", arguments))


def test_environment_is_no_file():
    assert absolute_source(SOURCE) == SOURCE and source_problem(SOURCE) == "" and source_files(SOURCE, "eval") == []


def test_programs_of_the_interpreter_come_first():
    assert surroundings("/venv/bin/python")["PATH"].startswith("/venv/bin:")
