"""The settings for kinds of clusters that a user copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from realsys.config.compose import compose
from realsys.launch.slurm.launcher import check_slurm

SLURM = Path(__file__).parents[4] / "slurm"


@pytest.mark.parametrize("name", sorted(path.stem for path in (SLURM / "cluster").glob("*.yaml")))
def test_settings_of_a_cluster_are_accepted(name: str) -> None:
    words = ["experiment=arith", f"cluster={name}", "cluster.nodes=2", "fileroot=/shared/runs"]
    config = compose(words, config_dir=SLURM)
    assert config.cluster.launcher == "slurm" and config.cluster.nodes == 2 and config.cluster.name_store.start
    check_slurm(config)


def test_own_cluster_needs_no_more_than_a_name() -> None:
    assert compose(["experiment=arith", "cluster=slurm"]).cluster.launcher == "slurm"
