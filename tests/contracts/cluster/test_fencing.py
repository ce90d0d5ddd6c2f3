"""A MasterWorker that was suspended beyond its lease publishes nothing when it wakes up.

A real process: it is suspended right before the publication, and may go on only when its lease has lapsed. So whichever
of its threads runs first, no version may be seen. `tests/unit/cluster/test_fence_order.py` has every other act.
"""

import signal

import pytest

from realsys.cluster.process import read_errors
from realsys.weights.disk import manifest
from tests.support.processes.fenced_bodies import DONE
from tests.support.processes.tester_trial import Trial

LEASE_S = 5.0  # a test waits for its end; it must outlive the start of a worker on a slow machine


@pytest.fixture
def trial(tmp_path, request):
    made = Trial(tmp_path, lease_s=LEASE_S if request.node.callspec.params["suspended"] else 600.0)
    yield made
    made.close()


@pytest.mark.parametrize("suspended", [False, True])
def test_master_publishes_only_with_its_lease(trial, suspended):
    process = trial.run("from tests.support.processes.fenced_bodies import run; run()")
    trial.ready()
    if suspended:
        trial.suspend(process)
    process.stdin.write("go\n")
    process.stdin.flush()
    if suspended:
        process.send_signal(signal.SIGCONT)
    trial.ends(process, 75 if suspended else 0)
    assert [record.type for record in read_errors(trial.paths.errors)] == ["Fenced"] * suspended
    versions = manifest.complete_versions(trial.paths.weights())
    published = trial.store.get_subtree(trial.names.model_version())
    assert (len(versions), len(published)) == ((0, 0) if suspended else (1, 1))
    assert (trial.paths.root / DONE).exists() is not suspended
