"""Error files."""

import json
import os

import pytest

from realsys.cluster.process import ErrorRecord, read_errors, record_of, write_error
from realsys.errors import ConfigError


def record(time, index=0, pid=1):
    return ErrorRecord(time, "model_worker", index, pid, "host", "ValueError", f"at {time}", "trace")


def test_records_come_back_earliest_first(tmp_path):
    for time in (3.0, 1.0, 2.0):
        write_error(tmp_path / "errors", record(time, index=int(time)))
    assert [r.time for r in read_errors(tmp_path / "errors")] == [1.0, 2.0, 3.0]


def test_reused_pid_overwrites_no_error_file(tmp_path):
    first = write_error(tmp_path, record(1.0, pid=7))
    second = write_error(tmp_path, record(2.0, pid=7))
    assert first.name == "model_worker-0-7.json" and second != first
    assert [r.message for r in read_errors(tmp_path)] == ["at 1.0", "at 2.0"]
    assert all(p.suffix == ".json" for p in tmp_path.iterdir())


def test_record_names_worker_type_and_place():
    try:
        raise ConfigError("train.lr", -1, "must be > 0\nand more")
    except ConfigError as exc:
        made = record_of("master_worker", 2, exc)
    assert (made.pid, made.worker, made.type, made.exit_code) == (os.getpid(), "master_worker/2", "ConfigError", 2)
    assert made.message == "config: train.lr=-1: must be > 0" and "test_failure.py" in made.traceback
    assert "and more" in made.traceback and "\n" not in str(made)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '"text"'])
def test_foreign_file_hides_no_record(tmp_path, content, caplog):
    write_error(tmp_path, record(1.0))
    (tmp_path / "other.json").write_text(content)
    assert [r.time for r in read_errors(tmp_path)] == [1.0] and "other.json" in caplog.text


def test_later_fields_and_odd_text_are_read(tmp_path):
    path = write_error(tmp_path, ErrorRecord(1.0, "k", 0, 1, "h", "E", "lone \ud800", "t"))
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "new_field": 1}))
    (read,) = read_errors(tmp_path)
    assert read.message == "lone \ud800"


def test_no_folder_means_no_errors(tmp_path):
    assert read_errors(tmp_path / "none") == []
