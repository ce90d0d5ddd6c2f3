"""Single rows of a recorded step, without loading the step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from realsys.errors import RecordError
from realsys.train import record_files as files
from realsys.train.record_files import RowReader
from tests.unit.train.test_record_files import ORIGIN, arrays, write


def reader(directory: Path) -> RowReader:
    return RowReader(directory, files.read_record(directory))


def test_rows_are_read_bit_by_bit(tmp_path: Path) -> None:
    found = reader(write(tmp_path))
    assert found.origins == {ORIGIN.ticket.ticket_id: ORIGIN}
    for (sample_id, key), array in arrays().items():
        back = found.array(sample_id, key)
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)
    assert found.arrays("00000007/1").keys() == {"tokens", "behav_logprobs", "values"}


def test_flipped_bit_is_named_with_its_sample(tmp_path: Path) -> None:
    directory = write(tmp_path)
    path = directory / files.worker_file(0)
    whole, wanted = path.read_bytes(), np.array([-0.5, -0.25, -1.0], np.float32).tobytes()
    at = whole.index(wanted) + 5
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    found = reader(directory)
    assert found.array("00000007/0", "tokens").tolist() == [5, 6, 7, 8]
    with pytest.raises(RecordError, match="behav_logprobs of sample 00000007/0 is not what was written"):
        found.arrays("00000007/0")


def test_torn_file_is_named(tmp_path: Path) -> None:
    directory = write(tmp_path)
    path = directory / files.worker_file(0)
    whole = path.read_bytes()
    for size in (0, 1, 9, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(RecordError, match=r"worker-00000\.safetensors is corrupt"):
            reader(directory)
    path.unlink()
    with pytest.raises(RecordError, match="cannot be read"):
        reader(directory)


def test_unknown_row_and_array_are_named(tmp_path: Path) -> None:
    found = reader(write(tmp_path))
    with pytest.raises(RecordError, match="sample 'x' is not in this record"):
        found.arrays("x")
    with pytest.raises(RecordError, match="has no array 'advantages'"):
        found.array("00000007/0", "advantages")
