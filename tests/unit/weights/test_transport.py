"""The door ``weights.transport``: the example outside the package carries real versions to a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from realsys.config.machine import Machine
from realsys.config.rules import check
from realsys.config.schema import Config
from realsys.errors import ConfigError, Fenced, WeightsError
from realsys.generation.weight_folder import FolderWriter
from realsys.launch.cli import main
from realsys.weights.contract import (
    Committed,
    PublisherParts,
    Share,
    WriterParts,
    build_transport,
)
from realsys.weights.disk.stage import DiskReader
from realsys.weights.disk.transport import DiskPublisher
from tests.support.data.data_rows import FEW_ROWS
from tests.support.processes.config_trees import changed
from tests.support.streams.weight_trials import BOUND_S, Trial

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"
MACHINE = Machine(cpus=8, memory_bytes=64 << 30)


@pytest.fixture
def mirrored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    (tmp_path / "copies").mkdir()
    return changed("weights.transport=transport:Mirror", f"weights.transport_args={{folder: {tmp_path / 'copies'}}}")


@pytest.fixture
def trial(tmp_path: Path, mirrored: Config) -> Iterator[Trial]:
    made = Trial(tmp_path, build_transport(mirrored))
    yield made
    made.store.close()


def flip(folder: str) -> None:
    """Change one bit of a tensor."""
    file = next(Path(folder).glob("model-*"))
    content = bytearray(file.read_bytes())
    content[-10] ^= 4
    file.write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_published_copy_is_served(trial: Trial, tmp_path: Path) -> None:
    with trial.engine() as engine:
        for version in (0, 1):
            published = trial.publish(version)
            assert published.transport == "transport:Mirror"
            assert Path(published.locator).parent == tmp_path / "copies"
            result = engine.update(published.locator, version).result(BOUND_S)
            assert result.success, result.message
            assert (engine.version, engine.model_path) == (version, published.locator)
            assert result.counts["bytes"] == sum(t.nbytes for t in trial.base.values())


def test_damaged_copy_is_refused_until_rewritten(trial: Trial) -> None:
    locator = trial.publish(0).locator
    flip(locator)
    failing = {"failures": 1, "version": None}
    with trial.engine() as engine:
        refused = engine.update(locator, 0).result(BOUND_S)
        assert not refused.success and "corrupt" in refused.message and engine.version == -1
        asyncio.run(trial.publisher.repair({"version": 0, "servers": [failing]}))
        assert engine.update(locator, 0).result(BOUND_S).success


def test_old_copies_go_with_their_versions(trial: Trial, tmp_path: Path) -> None:
    for version in range(4):
        locator = trial.publish(version).locator
    needed = names(trial.root)
    assert names(tmp_path / "copies") == needed and "v00000001.0001" not in needed
    with closing(trial.transport.reader(trial.parts)) as reader:
        staged = reader.stage(locator, 3)
        assert all(torch.equal(staged.tensors[name], tensor) for name, tensor in trial.tensors(3).items())


def test_copy_is_written_as_folder(trial: Trial, tmp_path: Path) -> None:
    """SGLang loads such a folder. A damaged version leaves none."""
    locator, target = trial.publish(0).locator, tmp_path / "served"
    folders = FolderWriter(DiskReader(), trial.model)
    made = folders.write(locator, 0, target)
    assert made.directory == target and {"read_s", "verify_s", "write_s"} <= made.timings.keys()
    assert names(target) == ["config.json", "generation_config.json", "model.safetensors"]
    found = load_file(target / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in trial.tensors(0).items())
    locator = trial.publish(1).locator
    flip(locator)
    with pytest.raises(WeightsError, match="corrupt"):
        folders.write(locator, 1, tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_writer_without_lease_writes_nothing(tmp_path: Path) -> None:
    def fenced() -> None:
        raise Fenced("this worker must stop")

    transport = build_transport(changed())
    plan = transport.publisher(PublisherParts(tmp_path, tmp_path, "0001")).prepare(0, "")
    with pytest.raises(Fenced):
        transport.writer(WriterParts(0, fenced)).write(Share("actor", 0, 0, 1, plan), {"w": torch.zeros(4)})
    assert names(Path(plan.directory)) == []


def test_unreadable_report_names_the_version(tmp_path: Path) -> None:
    publisher = build_transport(changed()).publisher(PublisherParts(tmp_path, tmp_path, "0001"))
    plan = publisher.prepare(3, "")
    with pytest.raises(WeightsError, match="weights v3: the report of a rank cannot be read"):
        publisher.commit(3, 3, plan, [[{"file": "x"}]])


class Wandering(DiskPublisher):
    """Breaks the contract: a version that is committed again is elsewhere."""

    def commit(self, version: int, step: int, plan: Any, reports: Any, *, replace: bool = False) -> Committed:
        made = super().commit(version, step, plan, reports, replace=replace)
        return _elsewhere(made) if replace else made


def _elsewhere(made: Committed) -> Committed:
    return replace(made, locator=made.locator + "-again")


def test_rewritten_version_must_keep_its_locator(trial: Trial) -> None:
    """Servers have been told the first locator, and nothing would tell them another one."""
    trial.publisher._weights = Wandering(PublisherParts(trial.root, trial.model, "0001"), keep=2)
    locator = trial.publish(0).locator
    flip(locator)
    failing = {"failures": 1, "version": None}
    with pytest.raises(WeightsError, match="a transport must keep the locator of a version"):
        asyncio.run(trial.publisher.repair({"version": 0, "servers": [failing]}))


WRONG = {
    "disc": ("weights.transport", "unknown weight transport: use one of disk, group, memory, or package.module:name"),
    "no_such_module:Mirror": ("weights.transport", "no module named 'no_such_module'"),
    "transport:Nothing": ("weights.transport", "has no attribute 'Nothing'"),
    "json:JSONDecoder": ("weights.transport", "the class lacks writer, publisher, reader"),
    "realsys.weights.contract:Transport": ("weights.transport", "cannot be built: TypeError"),
    "transport:Mirror": ("weights.transport_args", "missing a required argument: 'folder'"),
    "disk": ("weights.transport_args", "do not fit disk"),
}


@pytest.mark.parametrize("value", WRONG)
def test_wrong_transport_is_one_clear_line(value: str, mirrored: Config) -> None:
    field, problem = WRONG[value]
    with pytest.raises(ConfigError) as raised:
        check(changed(f"weights.transport={value}", *["weights.transport_args={a: 1}"] * (value == "disk")), MACHINE)
    assert raised.value.field == field and problem in raised.value.problem
    assert raised.value.exit_code == 2 and "\n" not in str(raised.value)


def test_transport_checks_itself_in_the_launcher(
    mirrored: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = ["run", "experiment=arith", *FEW_ROWS, "weights.transport=transport:Mirror"]
    assert main([*run, f"weights.transport_args.folder={tmp_path / 'copies'}", "--dry-run"]) == 0
    capsys.readouterr()
    assert main([*run, f"weights.transport_args.folder={tmp_path / 'nowhere'}"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "weights.transport" in err and "No such file or directory" in err
    assert not (tmp_path / "runs").exists()
