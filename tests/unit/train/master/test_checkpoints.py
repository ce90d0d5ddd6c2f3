"""The master's side of checkpoints: when, atomicity, which are kept. Workers write real files; no torch."""

import asyncio
import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import xxhash

from realsys.cluster import commit_folder
from realsys.cluster.files import FileInfo
from realsys.cluster.topology import Mesh
from realsys.config.allocation import ParallelLayout
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import CheckpointError, RemoteError
from realsys.manager.messages import DataPosition
from realsys.model_calls import Empty
from realsys.observe.step_log import StepTail, read_steps, surviving, undone
from realsys.train.checkpoint import checkpoint_files as files
from realsys.train.checkpoint.checkpoint_files import (
    CHECKPOINT,
    CheckpointState,
    RankIndex,
    complete_checkpoints,
    find_checkpoint,
    read_state,
    verify,
)
from realsys.train.master.checkpoints import Checkpoints, CheckpointSources, commit, prepare
from realsys.train.master.recovery import TrainingStart, decide, evaluated, find_start, has_trained, recovered_record
from realsys.train.master.step_statistics import StepLog

MESHES = {"actor": Mesh(ParallelLayout(data=2), (0, 1)), "critic": Mesh(ParallelLayout(), (2,))}
POSITION = DataPosition(12, [4, 7], 20, 1)
MODEL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 40}


class Workers:
    """Ranks that write their files in ``finish_checkpoint``, or with ``eager`` in ``save_checkpoint``."""

    def __init__(self, *, eager=False):
        self.calls: list[str] = []
        self.eager = eager
        self.wrote: Callable[[Path], None] = lambda path: None  # after each file
        self._directory = Path()

    async def save_checkpoint(self, payload):
        self.calls.append(f"save {payload.role} {payload.step}")
        self._directory = Path(payload.directory)
        if self.eager:
            self.write(payload.role, payload.step)
        return [Empty()]

    async def finish_checkpoint(self, payload):
        self.calls.append(f"finish {payload.role} {payload.step}")
        if not self.eager:
            self.write(payload.role, payload.step)
        return [Empty()]

    async def load_checkpoint(self, payload):
        self.calls.append(f"load {payload.role} {Path(payload.directory).name}")
        return [Empty()]

    def write(self, role, step):
        layout = MESHES[role].layout
        for rank in range(layout.world_size):
            stem, content = files.rank_stem(role, rank, layout.world_size), f"{role} {rank} {step}".encode()
            info = FileInfo(len(content), xxhash.xxh3_64_hexdigest(content))
            index = RankIndex(role, step, layout, rank, {}, None, {}, info, [])
            for name, data in ((files.data_file(stem), content), (files.index_file(stem), msgspec.json.encode(index))):
                (self._directory / name).write_bytes(data)
                self.wrote(self._directory / name)


def make(tmp_path, workers, **settings):
    model = tmp_path / "start_model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL | SIZES))
    config = Config.model_validate({"checkpoint": settings, "train": {"batch_groups": 4}})

    async def position():
        workers.calls.append("position")
        return POSITION

    sources = CheckpointSources(meshes=MESHES, workers=workers, position=position, kl=lambda: {"coef": 0.25})
    return Checkpoints(config, TrialPaths(tmp_path), sources)


async def train(checkpoints, first, last):
    for step in range(first, last + 1):
        await checkpoints.after_step(step)
    await checkpoints.finish(stopped=False)


def listed(tmp_path):
    return [step for step, _ in complete_checkpoints(tmp_path / "checkpoints")]


def test_newest_checkpoints_are_kept(tmp_path):
    """One checkpoint every two steps; the newest two are kept."""
    workers = Workers(eager=True)
    checkpoints = make(tmp_path, workers, every_steps=2, keep=2, at_end=False)
    asyncio.run(train(checkpoints, 1, 7))
    assert listed(tmp_path) == [4, 6]
    assert checkpoints.latest == tmp_path / "checkpoints" / "step-00000006"
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]


def test_last_step_is_saved_once(tmp_path):
    workers = Workers()
    asyncio.run(train(make(tmp_path, workers, every_steps=3), 1, 4))
    assert listed(tmp_path) == [3, 4]
    other = tmp_path / "other"
    other.mkdir()
    workers = Workers()
    asyncio.run(train(make(other, workers, every_steps=2), 1, 2))
    assert workers.calls.count("save actor 2") == 1 and listed(other) == [2]


def test_nothing_is_written_unless_it_is_asked_for(tmp_path):
    workers = Workers()
    asyncio.run(train(make(tmp_path, workers, at_end=False), 1, 3))
    assert workers.calls == [] and not (tmp_path / "checkpoints").exists()


def test_state_has_the_facts_of_the_trial(tmp_path):
    """Everything that a later trial needs to continue."""
    asyncio.run(train(make(tmp_path, Workers(), every_steps=5), 5, 5))
    state = read_state(tmp_path / "checkpoints" / "step-00000005")
    assert (state.step, state.version, state.seed, state.batch_groups, state.kl) == (5, 5, 1, 4, {"coef": 0.25})
    assert state.position == POSITION
    assert {role: s.layout for role, s in state.roles.items()} == {"actor": "d2p1m1", "critic": "d1p1m1"}
    # By hand: the config's hidden size, and heads of 16 / 4; a critic has one output.
    assert state.roles["actor"].sizes["hidden"] == 16 and state.roles["actor"].sizes["head_dim"] == 4
    assert state.roles["actor"].sizes["outputs"] == 40 and state.roles["critic"].sizes["outputs"] == 1
    assert len(state.files) == 6
    for name, info in state.files.items():
        content = (tmp_path / "checkpoints" / "step-00000005" / name).read_bytes()
        assert info == FileInfo(len(content), xxhash.xxh3_64_hexdigest(content))


def test_training_waits_only_when_next_is_due(tmp_path):
    workers = Workers()
    checkpoints = make(tmp_path, workers, every_steps=3)

    async def run():
        await checkpoints.after_step(3)
        await checkpoints.after_step(4)
        await checkpoints.after_step(5)
        assert "finish actor 3" not in workers.calls and checkpoints.latest is None, "nobody waited"
        await checkpoints.after_step(6)
        saved = workers.calls.index("save actor 6")
        assert workers.calls.index("finish actor 3") < workers.calls.index("finish critic 3") < saved
        assert listed(tmp_path) == [3]
        await checkpoints.finish(stopped=False)

    asyncio.run(run())
    assert listed(tmp_path) == [3, 6]


def test_step_that_finds_all_files_completes(tmp_path):
    checkpoints = make(tmp_path, Workers(eager=True), every_steps=3)

    async def run():
        await checkpoints.after_step(3)
        assert listed(tmp_path) == []
        await checkpoints.after_step(4)
        assert listed(tmp_path) == [3]

    asyncio.run(run())


def test_failed_rank_ends_the_run_next_step(tmp_path):
    """The disk is full in the second checkpoint: the error names it, and the first one stays."""
    workers = Workers(eager=True)
    checkpoints = make(tmp_path, workers, every_steps=1, keep=1)

    async def refuse(payload):
        raise RemoteError("model_worker/1: checkpoint x: cannot be written: No space left on device")

    async def run():
        await checkpoints.after_step(1)
        workers.eager = False
        await checkpoints.after_step(2)
        (tmp_path / "checkpoints" / "step-00000002.tmp" / "actor-00002-of-00002.failed").touch()
        workers.finish_checkpoint = refuse  # type: ignore[method-assign]
        with pytest.raises(CheckpointError) as caught:
            await checkpoints.after_step(3)
        message = str(caught.value)
        assert message.startswith("master_worker: the checkpoint of step 2 failed: model_worker/1: ")
        assert "No space left on device" in message and "step-00000001" in message and "\n" not in message

    asyncio.run(run())
    assert listed(tmp_path) == [1] and find_checkpoint(tmp_path).name == "step-00000001"


def test_unwritable_state_leaves_the_last_checkpoint(tmp_path):
    workers = Workers()
    checkpoints = make(tmp_path, workers, every_steps=1, keep=1)

    def fill_disk(path):
        state = path.parent / "state.json"
        if path.parent.name.startswith("step-00000002") and not state.is_symlink():
            state.symlink_to("/dev/full")

    workers.wrote = fill_disk
    with pytest.raises(CheckpointError, match=r"state\.json cannot be written: No space left on device"):
        asyncio.run(train(checkpoints, 1, 2))
    assert listed(tmp_path) == [1]


def test_truncated_rank_file_is_not_committed(tmp_path):
    workers = Workers()

    def cut(path):
        if path.name == "critic-00001-of-00001.safetensors":
            os.truncate(path, 3)

    workers.wrote = cut
    with pytest.raises(CheckpointError, match=r"critic-00001-of-00001\.safetensors has 3 bytes"):
        asyncio.run(train(make(tmp_path, workers, every_steps=1), 1, 1))
    assert listed(tmp_path) == []


def killed_at(tmp_path, prepare):
    """Checkpoints of steps 1 and 2 in a process that ``prepare`` has killed somewhere in step 2."""
    pid = os.fork()
    if pid == 0:
        try:
            workers = Workers()
            checkpoints = make(tmp_path, workers, every_steps=1, keep=1)
            asyncio.run(train(checkpoints, 1, 1))
            prepare(workers)
            asyncio.run(train(checkpoints, 2, 2))
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes
@pytest.mark.parametrize("files_written", range(1, 7))
def test_kill_between_files_leaves_the_complete_checkpoint(tmp_path, files_written):
    def prepare(workers):
        written: list[Path] = []

        def count(path):
            written.append(path)
            if len(written) == files_written:
                die()

        workers.wrote = count

    killed_at(tmp_path, prepare)
    assert listed(tmp_path) == [1] and find_checkpoint(tmp_path).name == "step-00000001"
    with pytest.raises(CheckpointError, match="was never completed"):
        read_state(tmp_path / "checkpoints" / "step-00000002.tmp")
    asyncio.run(train(make(tmp_path, Workers(), every_steps=1), 2, 2))  # the leftovers are no obstacle
    assert listed(tmp_path) == [1, 2]


@pytest.mark.processes
@pytest.mark.parametrize("where", ["write_durably", "fsync_directory"])
def test_kill_at_commit_leaves_the_complete_checkpoint(tmp_path, where, monkeypatch):
    """Before state.json is written, and between it and the rename."""
    killed_at(tmp_path, lambda _: monkeypatch.setattr(commit_folder, where, die))
    assert listed(tmp_path) == [1]
    assert (tmp_path / "checkpoints" / "step-00000002.tmp" / "state.json").exists() == (where == "fsync_directory")


@pytest.mark.processes
def test_kill_while_pruning_leaves_the_new_checkpoint(tmp_path, monkeypatch):
    def prepare(_):
        monkeypatch.setattr(shutil, "rmtree", die)

    killed_at(tmp_path, prepare)
    assert listed(tmp_path) == [2] and (tmp_path / "checkpoints" / "step-00000001").exists()
    asyncio.run(train(make(tmp_path, Workers(), every_steps=1), 3, 3))
    assert not (tmp_path / "checkpoints" / "step-00000001").exists(), "the half removed one is gone"


def test_checkpoint_that_cannot_be_removed_is_logged(tmp_path, monkeypatch, caplog):
    """A network file system refuses to remove a folder while a reader has a file open."""
    remove, busy = shutil.rmtree, tmp_path / "checkpoints" / "step-00000001"

    def rmtree(path):
        if path == busy:
            raise OSError(39, "Directory not empty", str(path))
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    checkpoints = make(tmp_path, Workers(), every_steps=1, keep=1)
    asyncio.run(train(checkpoints, 1, 3))
    assert listed(tmp_path) == [3] and busy.exists()
    assert any(str(busy) in record.message and record.levelname == "ERROR" for record in caplog.records)
    monkeypatch.undo()
    asyncio.run(train(checkpoints, 4, 4))
    assert not busy.exists() and listed(tmp_path) == [4]


def test_resuming_loads_every_trained_role(tmp_path):
    workers = Workers()
    checkpoints = make(tmp_path, workers, every_steps=1)
    asyncio.run(train(checkpoints, 1, 1))
    workers.calls.clear()
    state = asyncio.run(checkpoints.load(tmp_path / "checkpoints" / "step-00000001"))
    assert state.step == 1 and workers.calls == ["load actor step-00000001", "load critic step-00000001"]


def test_stopped_run_saves_its_last_step_once(tmp_path):
    async def run(checkpoints):
        for step in (1, 2, 3, 4):
            await checkpoints.after_step(step)
        await checkpoints.finish(stopped=True)

    for name in ("on", "off"):
        (tmp_path / name).mkdir()
        asyncio.run(run(make(tmp_path / name, Workers(), every_steps=3, on_stop=name == "on")))
    assert (listed(tmp_path / "on"), listed(tmp_path / "off")) == ([3, 4], [3])


def test_warmed_up_state_is_saved_before_training(tmp_path):
    """The loaded state is not saved again."""

    async def run():
        workers = Workers()
        checkpoints = make(tmp_path, workers, every_steps=2)
        await checkpoints.first(0)
        assert listed(tmp_path) == [0], "complete: a failure after it does not cost the warm-up"
        await checkpoints.after_step(1)
        await checkpoints.finish(stopped=True)
        assert listed(tmp_path) == [0, 1]
        again = make(tmp_path, workers, every_steps=2, at_end=True)
        await again.load(tmp_path / "checkpoints" / "step-00000001")
        await again.finish(stopped=True)
        await again.finish(stopped=False)
        assert workers.calls.count("save actor 1") == 1

    asyncio.run(run())
    other = tmp_path / "other"
    other.mkdir()
    asyncio.run(make(other, Workers(), every_steps=0, on_stop=False).first(0))
    assert listed(other) == []


@pytest.mark.parametrize("flip", [30, 200, -20])
def test_flipped_bit_in_the_state_is_refused(tmp_path, flip):
    asyncio.run(train(make(tmp_path, Workers(), every_steps=1), 1, 1))
    path = tmp_path / "checkpoints" / "step-00000001" / "state.json"
    content = bytearray(path.read_bytes())
    content[flip] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_state(path.parent)
    assert str(caught.value).startswith(f"{path} is corrupt: ")


def test_another_format_is_refused_with_its_number(tmp_path):
    asyncio.run(train(make(tmp_path, Workers(), every_steps=1), 1, 1))
    directory = tmp_path / "checkpoints" / "step-00000001"
    newer = dataclasses.replace(CHECKPOINT, number=3)
    (directory / "state.json").write_bytes(newer.encode(read_state(directory)))
    with pytest.raises(CheckpointError, match=r"state\.json has format 3, this realsys reads format 2: use an older"):
        read_state(directory)
    (directory / "state.json").write_text('{"checksum": "00", "state": {"step": 1, "format": 1}}')
    with pytest.raises(CheckpointError, match=r"state\.json is corrupt or has an older format, this realsys reads"):
        read_state(directory)


def test_finding_a_checkpoint_says_what_is_wrong(tmp_path):
    with pytest.raises(CheckpointError, match="is not a directory"):
        find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is no checkpoint and no trial"):
        find_checkpoint(tmp_path)
    (tmp_path / "checkpoints" / "step-00000004.tmp").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        find_checkpoint(tmp_path)


# ---- The start of training, and the records of the step log that hold after a recovery


STEM = files.rank_stem("actor", 0, 1)


def saved(root, step):
    """A complete checkpoint of one rank, with unique content."""
    tmp = prepare(root, step)
    content = f"tensors of step {step}".encode() * 100
    index = RankIndex(
        "actor", step, ParallelLayout(), 0, {}, None, {}, FileInfo(len(content), xxhash.xxh3_64_hexdigest(content)), []
    )
    (tmp / files.data_file(STEM)).write_bytes(content)
    (tmp / files.index_file(STEM)).write_bytes(msgspec.json.encode(index))
    return commit(tmp, CheckpointState(step, step, 1, 4, DataPosition(0, [], 9, 1), {}, {}, "", 0.0), [STEM])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_new_trial_starts_from_resume_or_nothing(tmp_path):
    assert find_start(tmp_path / "checkpoints", "") == TrainingStart(None, -1)
    other = saved(tmp_path / "other", 7)
    assert find_start(tmp_path / "checkpoints", str(other)) == TrainingStart(other, 7)


def test_own_newest_checkpoint_wins_over_resume(tmp_path):
    other = saved(tmp_path / "other", 7)
    root = tmp_path / "checkpoints"
    for step in (8, 9):
        newest = saved(root, step)
    (root / "step-00000010.tmp").mkdir()
    assert find_start(root, str(other)) == TrainingStart(newest, 9, own=True)


@pytest.mark.parametrize("what", ["flipped tensors", "truncated tensors", "flipped index", "no state", "flipped state"])
def test_damaged_newest_checkpoint_is_set_aside(tmp_path, what, caplog):
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


def test_only_damaged_checkpoints_refuse_the_start(tmp_path):
    for step in (4, 6):
        flip(saved(tmp_path, step) / files.data_file(STEM))
    with pytest.raises(
        CheckpointError, match=r"no checkpoint of this trial can be used: .*00000006.*00000004"
    ) as caught:
        find_start(tmp_path, "")
    assert caught.value.permanent, "a restart would find the same"
    assert "\n" not in str(caught.value)
    assert len(files.complete_checkpoints(tmp_path)) == 2, "nothing was moved"


def test_no_older_checkpoint_is_read_than_is_needed(tmp_path):
    looked: list[str] = []

    def examine(path):
        looked.append(path.name)
        if path.name == "c":
            raise CheckpointError("torn")
        return CheckpointState(2, 2, 1, 4, DataPosition(0, [], 9, 1), {}, {}, "", 0.0)

    start = decide([(1, Path("a")), (2, Path("b")), (3, Path("c"))], "other", examine)
    assert start == TrainingStart(Path("b"), 2, own=True, damaged={Path("c"): "torn"})
    assert looked == ["c", "b"]


# ---- the step log


def records(*steps):
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


def shown(found):
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
def test_what_a_later_recovery_undid_is_left_out(tmp_path, log, left):
    path = tmp_path / "steps.jsonl"
    writer = StepLog(path)
    try:
        for record in records(*log):
            writer.append(record)
        assert shown(read_steps(path)) == left
    finally:
        writer.close()


def test_follower_of_the_log_sees_the_recovery(tmp_path):
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


def test_phases_and_records_without_a_step_stay():
    log = [{"kind": "phase", "phase": "train"}, {"kind": "train"}, {"kind": "train", "step": None}]
    assert list(surviving(lambda: [*log, {"kind": "recovered", "step": 0}]))[:3] == log
    assert next(surviving(lambda: [{"kind": "train", "step": 1}, {"kind": "recovered"}])) == {
        "kind": "train",
        "step": 1,
    }


def test_evaluation_by_undone_weights_is_undone():
    """It was due after step 2, and its completions are of version 3."""
    kept, lost = ({"kind": "eval", "eval_id": f"step-{k}", "step": k, "version": k + 1} for k in (1, 2))
    assert list(surviving(lambda: [kept, lost, {"kind": "recovered", "step": 2}]))[:-1] == [kept]


def test_undone_evaluations_and_steps_do_not_count():
    log = records("e0", 1, 2, "e2")
    assert evaluated(log, "e0", 0) and evaluated(log, "e2", 2) and not evaluated(log, "e2", 3) and has_trained(log)
    rewound = list(surviving(lambda: [*log, *records("back0")]))
    assert evaluated(rewound, "e0", 0) and not evaluated(rewound, "e2", 2) and not has_trained(rewound)
