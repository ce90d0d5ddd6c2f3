"""The step log on a disk that is full: a record is whole or absent. RLIMIT_FSIZE stands in for the full disk."""

import os
import resource
import signal

import pytest

from realsys.errors import RealsysError
from realsys.observe.step_log import StepTail
from realsys.train.master.step_statistics import StepLog

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("room", [0, 7])
def test_record_on_full_disk_leaves_no_trace(tmp_path, room):
    path = tmp_path / "steps.jsonl"
    log = StepLog(path)
    log.append({"kind": "train", "step": 1})
    limit = path.stat().st_size + room
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            log.append({"kind": "train", "step": 2})
        except RealsysError as error:
            os._exit(7 if f"cannot write the step log {path}" in str(error) else 8)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    log.append({"kind": "train", "step": 3})
    log.close()
    tail = StepTail(path)
    assert [record["step"] for record in tail.read()] == [1, 3] and not tail.skipped
