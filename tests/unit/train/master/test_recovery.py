"""The start of training, and the records of the step log that hold after a recovery."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import xxhash

from realsys.cluster.files import FileInfo
from realsys.config.allocation import ParallelLayout
from realsys.errors import CheckpointError
from realsys.manager.messages import DataPosition
from realsys.observe.step_log import StepTail, read_steps, surviving, undone
from realsys.train.checkpoint import checkpoint_files as files
from realsys.train.checkpoint.checkpoint_files import CheckpointState, RankIndex, read_state, verify
from realsys.train.master.checkpoints import commit, prepare
from realsys.train.master.recovery import TrainingStart, decide, evaluated, find_start, has_trained, recovered_record
from realsys.train.master.step_statistics import StepLog

STEM = files.rank_stem("actor", 0, 1)


def saved(root: Path, step: int) -> Path:
    """A complete checkpoint of one rank, with unique content."""
    tmp = prepare(root, step)
    content = f"tensors of step {step}".encode() * 100
    index = RankIndex(
        "actor", step, ParallelLayout(), 0, {}, None, {}, FileInfo(len(content), xxhash.xxh3_64_hexdigest(content)), []
    )
    (tmp / files.data_file(STEM)).write_bytes(content)
    (tmp / files.index_file(STEM)).write_bytes(msgspec.json.encode(index))
    return commit(tmp, CheckpointState(step, step, 1, 4, DataPosition(0, [], 9, 1), {}, {}, "", 0.0), [STEM])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_new_trial_starts_from_resume_or_nothing(tmp_path: Path) -> None:
    assert find_start(tmp_path / "checkpoints", "") == TrainingStart(None, -1)
    other = saved(tmp_path / "other", 7)
    assert find_start(tmp_path / "checkpoints", str(other)) == TrainingStart(other, 7)


def test_own_newest_checkpoint_wins_over_resume(tmp_path: Path) -> None:
    other = saved(tmp_path / "other", 7)
    root = tmp_path / "checkpoints"
    for step in (8, 9):
        newest = saved(root, step)
    (root / "step-00000010.tmp").mkdir()
    assert find_start(root, str(other)) == TrainingStart(newest, 9, own=True)


@pytest.mark.parametrize("what", ["flipped tensors", "truncated tensors", "flipped index", "no state", "flipped state"])
def test_damaged_newest_checkpoint_is_set_aside(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and the checkpoint before it is taken."""
    older, newest = saved(tmp_path, 4), saved(tmp_path, 6)
    data, index, state = (newest / name for name in (files.data_file(STEM), files.index_file(STEM), files.STATE))
    match what:
        case "flipped tensors":
            flip(data)
        case "truncated tensors":
            data.write_bytes(data.read_bytes()[:-1])
        case "flipped index":
            flip(index)
        case "flipped state":
            flip(state)
        case "no state":
            state.unlink()
    start = find_start(tmp_path, "")
    assert (start.checkpoint, start.step, start.own) == (older, 4, True)
    if what == "no state":
        assert not start.damaged, "it was never complete, or is half removed"
        return
    assert list(start.damaged) == [newest] and "step-00000006" in start.damaged[newest]
    assert any(record.levelname == "ERROR" and str(newest) in record.message for record in caplog.records)
    assert not newest.exists() and newest.with_name("step-00000006.damaged").is_dir()
    again = saved(tmp_path, 6)  # the step is trained again
    assert verify(again) == read_state(again)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000006"]


def test_only_damaged_checkpoints_refuse_the_start(tmp_path: Path) -> None:
    for step in (4, 6):
        flip(saved(tmp_path, step) / files.data_file(STEM))
    with pytest.raises(
        CheckpointError, match=r"no checkpoint of this trial can be used: .*00000006.*00000004"
    ) as caught:
        find_start(tmp_path, "")
    assert caught.value.permanent, "a restart would find the same"
    assert "\n" not in str(caught.value)
    assert len(files.complete_checkpoints(tmp_path)) == 2, "nothing was moved"


def test_no_older_checkpoint_is_read_than_is_needed(tmp_path: Path) -> None:
    looked: list[str] = []

    def examine(path: Path) -> CheckpointState:
        looked.append(path.name)
        if path.name == "c":
            raise CheckpointError("torn")
        return CheckpointState(2, 2, 1, 4, DataPosition(0, [], 9, 1), {}, {}, "", 0.0)

    start = decide([(1, Path("a")), (2, Path("b")), (3, Path("c"))], "other", examine)
    assert start == TrainingStart(Path("b"), 2, own=True, damaged={Path("c"): "torn"})
    assert looked == ["c", "b"]


# ---- the step log


def records(*steps: object) -> list[dict[str, object]]:
    """``5``: train step 5; ``"w3"``: warm-up; ``"e5"``: evaluation; ``"u5"``: used up; ``"back4"``: recovered."""
    found: list[dict[str, object]] = []
    for step in steps:
        if isinstance(step, int):
            found.append({"kind": "train", "step": step})
        elif str(step).startswith("back"):
            found.append(recovered_record(TrainingStart(None, int(str(step)[4:])), "0001"))
        else:
            kind = {"w": "warmup", "e": "eval", "u": "used_up"}[str(step)[0]]
            found.append({"kind": kind, "step": int(str(step)[1:]), "eval_id": str(step)})
    return found


def shown(found: list[dict[str, object]]) -> list[object]:
    return [r["step"] if r["kind"] == "train" else f"{str(r['kind'])[0]}{r['step']}" for r in found]


@pytest.mark.parametrize(
    ("log", "left"),
    [
        (["w1", "w2", "e0", 1, 2, 3, "e2", "back2", 3, 4], ["w1", "w2", "e0", 1, 2, "e2", "r2", 3, 4]),
        (["w1", "w2", 1, "back-1", "w1", "w2", "e0", 1], ["r-1", "w1", "w2", "e0", 1]),
        (["w1", "e0", 1, 2, "e2", "back0", 1], ["w1", "e0", "r0", 1]),
        ([1, 2, 3, 4, "back2", 3, "back1", 2, 3], [1, "r2", "r1", 2, 3]),
        ([51, 52, "back50", 51], ["r50", 51]),
        ([1, "u2", "back1", 2, "u3"], [1, "r1", 2, "u3"]),
    ],
)
def test_what_a_later_recovery_undid_is_left_out(tmp_path: Path, log: list[object], left: list[object]) -> None:
    path = tmp_path / "steps.jsonl"
    writer = StepLog(path)
    try:
        for record in records(*log):
            writer.append(record)
        assert shown(read_steps(path)) == left
    finally:
        writer.close()


def test_follower_of_the_log_sees_the_recovery(tmp_path: Path) -> None:
    """It keeps the same records as a reader that starts afterwards."""
    path, tail, state = tmp_path / "steps.jsonl", StepTail(tmp_path / "steps.jsonl"), list[dict[str, object]]()
    writer = StepLog(path)
    try:
        for record in records("w1", 1, 2, 3, "back1", 2, "e2", 3, "back2", 3):
            writer.append(record)
            for new in tail.read():
                state = [old for old in state if not undone(old, new)] if new["kind"] == "recovered" else [*state, new]
        assert shown(state) == ["w1", 1, 2, "e2", 3]
        assert [r for r in read_steps(path) if r["kind"] != "recovered"] == state
    finally:
        writer.close()


def test_phases_and_records_without_a_step_stay() -> None:
    log = [{"kind": "phase", "phase": "train"}, {"kind": "train"}, {"kind": "train", "step": None}]
    assert list(surviving(lambda: [*log, {"kind": "recovered", "step": 0}]))[:3] == log
    assert next(surviving(lambda: [{"kind": "train", "step": 1}, {"kind": "recovered"}])) == {
        "kind": "train",
        "step": 1,
    }


def test_evaluation_by_undone_weights_is_undone() -> None:
    """It was due after step 2, and its completions are of version 3."""
    kept, lost = ({"kind": "eval", "eval_id": f"step-{k}", "step": k, "version": k + 1} for k in (1, 2))
    assert list(surviving(lambda: [kept, lost, {"kind": "recovered", "step": 2}]))[:-1] == [kept]


def test_undone_evaluations_and_steps_do_not_count() -> None:
    log = records("e0", 1, 2, "e2")
    assert evaluated(log, "e0", 0) and evaluated(log, "e2", 2) and not evaluated(log, "e2", 3) and has_trained(log)
    rewound = list(surviving(lambda: [*log, *records("back0")]))
    assert evaluated(rewound, "e0", 0) and not evaluated(rewound, "e2", 2) and not has_trained(rewound)
