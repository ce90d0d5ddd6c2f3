"""How a trial starts: a pure decision over what was read from the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.launch.start import StoredTrial, _read_ledger, decide_start, describe, newer_data
from realsys.manager.ledger.events import Event, Resumed, RolledBack, Trained
from realsys.manager.ledger.journal import Journal
from realsys.manager.messages import DataPosition
from realsys.train.checkpoint.checkpoint_files import CheckpointState, RoleState
from realsys.train.master.recovery import TrainingStart, TrialStart, read_start, write_start

CONFIG = Config(trial="t")
STATE = CheckpointState(
    5, 5, 1, 512, DataPosition(9, [], 20, 1), {"actor": RoleState({}, "adam", "d1p1m1")}, {}, "", 0.0
)
OWN, OTHER = Path("/runs/t/checkpoints/step-00000005"), Path("/runs/other/checkpoints/step-00000005")
RESUMING = CONFIG.model_copy(update={"resume": str(OTHER)})


@pytest.mark.parametrize(
    ("config", "trial", "start", "line"),
    [
        (CONFIG, StoredTrial(), TrialStart(kind="new"), ""),
        (
            RESUMING,
            StoredTrial(begin=TrainingStart(OTHER, 5), state=STATE),
            TrialStart(kind="resumed", checkpoint=str(OTHER), step=5),
            f"continuing at step 5 from {OTHER}",
        ),
        (
            RESUMING,
            StoredTrial(config=RESUMING, begin=TrainingStart(OTHER, 5), state=STATE, steps=1),
            TrialStart(kind="resumed", checkpoint=str(OTHER), step=5, trained=1),
            f"continuing at step 5 from {OTHER}",
        ),
        (
            RESUMING,
            StoredTrial(
                config=RESUMING, begin=TrainingStart(OWN, 5, own=True), state=STATE, steps=7, has_ledger=True, newest=5
            ),
            TrialStart(kind="recovered", checkpoint=str(OWN), step=5, trained=7),
            "continuing from step-00000005; 7 steps had been trained",
        ),
        (
            CONFIG,
            StoredTrial(config=CONFIG, steps=2),
            TrialStart(kind="recovered", trained=2),
            "starting again from the beginning: there is no complete checkpoint yet",
        ),
    ],
    ids=["new", "resumed", "resumed again", "recovered", "recovered without checkpoint"],
)
def test_start_follows_from_the_disk(
    config: Config, trial: StoredTrial, start: TrialStart, line: str, tmp_path: Path
) -> None:
    decided = decide_start(config, trial)
    assert decided == start and "\n".join(describe(decided)) == line
    assert decided.resumed_from == (str(OTHER) if start.kind == "resumed" else "")
    write_start(decided, tmp_path / "start.json")
    assert read_start(tmp_path / "start.json") == decided


def test_changed_settings_are_listed() -> None:
    other = CONFIG.model_copy(update={"allocation": "serve.d1+d2"})
    assert list(describe(decide_start(other, StoredTrial(config=CONFIG))))[1:] == [
        "changed: allocation='serve.d1+d2' (was 'serve.d1p1m1+d1p1m1')"
    ]


def test_checkpoints_without_a_ledger_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no ledger.jsonl.*: restore it from a copy, or start a new trial with"):
        decide_start(CONFIG, StoredTrial(config=CONFIG, begin=TrainingStart(OWN, 5, own=True), state=STATE))


def ledger_of(path: Path, *versions: int) -> None:
    with Journal(path) as journal:
        for version in versions:
            journal.append([Trained(version, version, [], 0.0)])


@pytest.mark.parametrize("kept", [0, 4])
def test_ledger_that_ends_before_the_checkpoint_is_refused(tmp_path: Path, kept: int) -> None:
    """By the files alone: before, the manager refused it when all workers had started."""
    paths = TrialPaths(tmp_path)
    ledger_of(paths.ledger, *range(1, 6))
    begin = TrainingStart(OWN, 5, own=True)
    assert _read_ledger(CONFIG, paths) == (None, 5)
    decide_start(CONFIG, StoredTrial(config=CONFIG, begin=begin, state=STATE, has_ledger=True, newest=5))
    lines = paths.ledger.read_bytes().splitlines(keepends=True)
    paths.ledger.write_bytes(b"".join(lines[:kept]))
    _, newest = _read_ledger(CONFIG, paths)
    with pytest.raises(
        ConfigError, match=rf"ledger.jsonl ends at version {kept}, before \S*/step-00000005: restore it"
    ):
        decide_start(CONFIG, StoredTrial(config=CONFIG, begin=begin, state=STATE, has_ledger=True, newest=newest))


@pytest.mark.parametrize(
    ("events", "newest"),
    [
        ([Resumed("other/step-5", 5, 5, 20, [], 0.0)], 5),
        ([Trained(3, 3, [], 0.0), RolledBack(2, 2, "b", "", 0.0)], 2),
        ([Trained(3, 3, [], 0.0), RolledBack(-1, 0, "b", "", 0.0), Trained(1, 1, [], 0.0)], 1),
    ],
)
def test_newest_version_follows_roll_backs(tmp_path: Path, events: list[Event], newest: int) -> None:
    paths = TrialPaths(tmp_path)
    with Journal(paths.ledger) as journal:
        journal.append(events)
    assert _read_ledger(CONFIG, paths)[1] == newest


def test_unreadable_decision_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "start.json"
    with pytest.raises(ConfigError, match=r"start.json.*No such file or directory; run the same"):
        read_start(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_start(path)


def test_prompts_changed_after_last_start_are_named(tmp_path: Path) -> None:
    """As many as before, in another order perhaps: the ledger would take them for the old ones."""
    paths, train = TrialPaths(tmp_path), tmp_path / "train.jsonl"
    data = {"kind": "jsonl", "train": str(train), "eval": str(tmp_path / "none.jsonl")}
    config = Config.model_validate({"data": data})
    for path in (train, paths.config):
        path.touch()
    os.utime(train, (1.0, 1.0))
    assert list(newer_data(config, paths)) == []
    os.utime(paths.config, (0.5, 0.5))
    [line] = newer_data(config, paths)
    assert line.startswith("data.train was written after the last start") and str(train) in line
    assert list(newer_data(config.model_copy(update={"data": Config().data}), paths)) == []
