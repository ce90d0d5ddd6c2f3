"""The door of launchers, the launcher ``local``, and what the launcher refuses before anything is written."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from realsys.config.compose import compose, given_fields
from realsys.config.machine import Machine
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.schema_cluster import ClusterConfig, NameStoreConfig
from realsys.errors import ConfigError
from realsys.launch.fit import fit
from realsys.launch.launchers.contract import Launcher, check_launcher, make_launcher
from realsys.launch.process_plan import agent_command

HERE = Machine(cpus=4, memory_bytes=64 << 30)


class InAllocation(Launcher):
    """A launcher that knows its nodes."""

    @classmethod
    def settings(cls, config: Config) -> Mapping[str, tuple[Any, str]]:
        reason = "the allocation has them"
        return {"cluster.nodes": (3, reason), "cluster.gpus_per_node": (8, reason)}

    async def start(self, agent: Sequence[str], say: Callable[[str], None]) -> None:
        pass


class Refusing(InAllocation):
    @classmethod
    def check(cls, config: Config) -> None:
        raise ConfigError("cluster.launcher", "Refusing", "there is no allocation")


class Unfinished(Launcher):
    pass


def config_of(name: str, **fields: object) -> Config:
    return Config(cluster=ClusterConfig(launcher=f"{__name__}:{name}", **fields))


def test_launcher_sets_the_nodes_that_it_knows() -> None:
    config, lines = fit(config_of("InAllocation"), set(), HERE)
    assert (config.cluster.nodes, config.cluster.gpus_per_node) == (3, 8)
    assert lines[0] == "set cluster.nodes=3: the allocation has them"


def test_given_nodes_win_over_those_of_the_launcher() -> None:
    config, _ = fit(config_of("InAllocation", nodes=2), {"cluster.nodes"}, HERE)
    assert config.cluster.nodes == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of("Unfinished"), "is not a launcher: the class lacks start"),
        (config_of("Refusing"), "there is no allocation"),
        (Config(cluster=ClusterConfig(launcher="slrum")), "unknown launcher: use one of local"),
        (Config(cluster=ClusterConfig(launcher="ray", nodes=2, cpu_nodes=1)), "the nodes of a Ray trial are equal"),
        (Config(cluster=ClusterConfig(spare_nodes=1)), "there are no other machines: set cluster.nodes too"),
        (
            Config(cluster=ClusterConfig(nodes=1, spare_nodes=1, name_store=NameStoreConfig(backend="etcd"))),
            "other nodes cannot reach it: name etcd's address, or set cluster.name_store.start=true",
        ),
    ],
)
def test_wrong_launcher_is_one_line(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_launcher(config)


def test_local_launcher_shows_the_command_of_an_agent() -> None:
    config, paths, said = Config(cluster=ClusterConfig(nodes=2, spare_nodes=1)), TrialPaths(Path("/s/a b")), list[str]()
    launcher = make_launcher(config, paths)
    asyncio.run(launcher.start(agent_command(paths), said.append))
    assert launcher.machines == 3 and not launcher.problem()
    [line] = said
    assert line.startswith("start on 2 machines, and 1 more as spares: env PYTHONPATH=/")
    assert line.endswith(
        f"{sys.executable} -P -m realsys.launch.cli node-agent --trial-dir '/s/a b' --node $(hostname)"
    )


def test_cluster_group_leaves_its_fields_open(tmp_path: Path) -> None:
    """A group with the name of a section is no section that the user has set."""
    (tmp_path / "cluster").mkdir()
    text = "# @package _global_\ndefaults:\n  - override /name_store: etcd\ncluster:\n  name_store:\n    start: true\n"
    (tmp_path / "cluster" / "ours.yaml").write_text(text)
    overrides = ["experiment=arith", "cluster=ours", "cluster.host=10.0.0.1"]
    cluster = compose(overrides, config_dir=tmp_path).cluster
    assert (cluster.host, cluster.name_store.backend, cluster.name_store.start) == ("10.0.0.1", "etcd", True)
    given = {field for field in given_fields(overrides, config_dir=tmp_path) if field.startswith("cluster.")}
    assert given == {"cluster.launcher", "cluster.host", "cluster.name_store.start"}


def test_example_starts_agents_with_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script stands in for ssh: it shows what it was told, and ends with code 255."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\necho $1: $2 >> {tmp_path}/said\nexit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("HOSTS", "hosta hostb hostc")
    monkeypatch.syspath_prepend(Path(__file__).parents[4] / "docs" / "examples")
    config = Config(cluster=ClusterConfig(launcher="launcher:Ssh", nodes=1, spare_nodes=1))
    check_launcher(config)
    launcher = make_launcher(config, TrialPaths(Path("/s/t")))

    async def body() -> str:
        await launcher.start(["agent"], print)
        await asyncio.gather(*(shell.wait() for shell in launcher.shells))  # stop would end them before they write
        await launcher.stop()
        return launcher.problem()

    assert asyncio.run(body()) == "ssh ended with code 255 on every host"
    assert sorted((tmp_path / "said").read_text().splitlines()) == [f"host{x}: agent --node host{x}" for x in "ab"]
    with pytest.raises(ConfigError, match="cluster.nodes=4: the variable HOSTS names 3"):
        check_launcher(Config(cluster=ClusterConfig(launcher="launcher:Ssh", nodes=4)))
