"""One SLURM of virtual nodes for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.conftest import shared_servers
from tests.support.slurm.cluster import VirtualSlurm


@pytest.fixture(scope="session")
def shared_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualSlurm]:
    cluster = VirtualSlurm(tmp_path_factory.mktemp("slurm"))
    try:
        shared_servers.update(cluster.start())
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def slurm(shared_slurm: VirtualSlurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualSlurm]:
    """The cluster without jobs and with all nodes; programs of SLURM find it."""
    for name, value in shared_slurm.env.items():
        monkeypatch.setenv(name, value)
    yield shared_slurm
    shared_servers.update(shared_slurm.clear())
