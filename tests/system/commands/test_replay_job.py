"""A step of a real run, shown and repeated from what the run recorded of it."""

import json
import shutil

import msgspec
import numpy as np
import pytest
import xxhash

from realsys.cluster.files import FileInfo
from realsys.config.paths import TrialPaths
from realsys.train import record_files as files
from realsys.train.checkpoint.checkpoint_files import complete_checkpoints
from tests.support.jobs.jobs import realsys

pytestmark = pytest.mark.system


def everything(root):
    """Size and time of change of all that is in a folder."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in root.rglob("*")}


@pytest.fixture
def copy(job, tmp_path):
    """The trial, to be damaged."""
    root = tmp_path / "recorded"
    shutil.copytree(job.root, root)
    return TrialPaths(root)


def flip_a_proximal_logprob(directory):
    """One bit of the last array of log-probs, with all checksums made to fit; its sample."""
    record = files.read_record(directory)
    arrays, origins = files.read_arrays(directory, record)
    sample_id = max(sample_id for (sample_id, key), array in arrays.items() if key == "prox_logprobs" and len(array))
    flipped = arrays[sample_id, "prox_logprobs"].copy()
    flipped.view(np.uint32)[0] ^= 1
    content = files.encode_worker_file(0, record.step, {**arrays, (sample_id, "prox_logprobs"): flipped}, origins)
    (directory / files.worker_file(0)).write_bytes(content)
    info = FileInfo(len(content), xxhash.xxh3_64_hexdigest(content))
    changed = msgspec.structs.replace(record, files={files.worker_file(0): info})
    (directory / files.BATCH).write_bytes(files.RECORD.encode(changed))
    return sample_id


def test_replayed_steps_are_bit_equal(job):
    assert [step for step, _ in complete_checkpoints(job.paths.checkpoints)] == [2, 4]
    before = everything(job.root)
    middle, last = realsys("replay", job.root, "--step", 4), realsys("replay", job.root)
    for done, steps in ((middle, ["3", "4"]), (last, ["5"])):
        assert done.returncode == 0, done.stdout + done.stderr
        rows = [line.split() for line in done.stdout.splitlines() if line.rstrip().endswith("bit-equal")]
        assert [(row[0], row[1]) for row in rows] == [(step, "32") for step in steps], done.stdout
        assert done.stderr == ""
    assert "step-00000002" in middle.stdout and "step-00000004" in last.stdout
    assert everything(job.root) == before, "a replay only reads the trial"


def test_replay_finds_a_flipped_bit_behind_good_checksums(copy):
    sample_id = flip_a_proximal_logprob(files.record_of_step(copy.records, 3))
    done = realsys("replay", copy.root, "--step", 4)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"step 3, first difference: array prox_logprobs of sample {sample_id}: recorded" in done.stdout
    assert "159/160" in done.stdout and "NOT EQUAL" in done.stdout
    assert "\n 4 " not in done.stdout, "what follows would only show the consequences"


def test_damaged_record_is_named_before_the_replay_starts(copy):
    path = files.record_of_step(copy.records, 3) / files.worker_file(0)
    _, arrays = files.read_worker_file(path.parent, 0)
    (sample_id, key), array = next((item, a) for item, a in arrays.items() if item[1] == "behav_logprobs" and len(a))
    content = bytearray(path.read_bytes())
    content[content.index(array.tobytes()) + 1] ^= 0x10
    path.write_bytes(content)
    for command in ("replay", "samples"):
        done = realsys(command, copy.root, "--step", 3)
        assert done.returncode == 2
        problem = f"{key} of sample {sample_id} is not what was written"
        assert done.stderr == f"realsys: {path} is corrupt: {problem}; choose another step\n"


def test_samples_shows_texts_versions_and_origins(job):
    done = realsys("samples", job.root, "--step", 3, "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 32 and len({row["ticket_id"] for row in rows}) == 8
    assert [row["sample_id"] for row in rows] == [
        f"{row['ticket_id']}.{row['attempt']}/{k % 4}.0" for k, row in enumerate(rows)
    ]
    for row in rows:
        assert row["prompt"].endswith("=") and row["completion"] == "".join(span["text"] for span in row["spans"])
        assert all(0 <= span["version"] <= 2 for span in row["spans"])
        assert row["staleness"] == 2 - min(span["version"] for span in row["spans"])
        tokens = sum(span["tokens"] for span in row["spans"])
        assert sum(count for _, count in row["route"]) == tokens > 0
        assert {server for server, _ in row["route"]} == {"generation_server/0"}
        assert row["worker"].startswith("rollout_worker/") and row["seconds"] > 0 and row["seed"] > 0
        # no mean is taken off the rewards and nothing divides them: an advantage is the reward, clipped and scaled
        assert row["advantage"] == row["reward"] and row["logprob_difference"] > 0
        assert row["correct"] == (row["reward"] > 0) and row["truncated"] == (row["finish_reason"] == "length")
    shown = realsys("samples", job.root, "--step", 3, "--ticket", rows[4]["ticket_id"])
    assert shown.returncode == 0, shown.stderr
    text = shown.stdout
    assert f"ticket {rows[4]['ticket_id']} attempt 0: prompt {rows[4]['prompt_index']}, seed {rows[4]['seed']}" in text
    assert rows[4]["prompt"] in text
    for row in rows[4:8]:
        assert all(f"[v{span['version']}]{span['text']}" in text for span in row["spans"])
    assert rows[0]["ticket_id"] not in text


def test_replay_takes_the_settings_of_its_step(job, copy):
    """Not with those that the trial was started again with."""
    config = json.loads(copy.config.read_text())
    config["train"]["ppo"] |= {"minibatches": 2, "eps_clip": 0.01}
    config["train"]["ppo"]["advantage"] |= {"mean": "group", "std": "batch"}
    config["allocation"] = "sglang.d1p1m1+d2p1m1"
    copy.config.write_text(json.dumps(config))
    for arguments in (["--step", 3], ["--step", 3, "--json"]):
        before, after = realsys("samples", job.root, *arguments), realsys("samples", copy.root, *arguments)
        assert after.returncode == 0 and after.stdout == before.stdout
    done = realsys("replay", copy.root, "--step", 4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("bit-equal") == 2


def test_replay_needs_a_checkpoint_with_equal_settings(copy):
    directory = files.record_of_step(copy.records, 3)
    record = files.read_record(directory)
    record.config["train"]["ppo"]["minibatches"] = 7
    (directory / files.BATCH).write_bytes(files.RECORD.encode(record))
    done = realsys("replay", copy.root, "--step", 4)
    problem = "step 3 was trained with other settings than step 4, and there is no checkpoint between them"
    assert done.returncode == 2 and problem in done.stderr and "train.ppo.minibatches=7" in done.stderr


CANNOT = "cannot be replayed: that needs a checkpoint before it, and records of the steps between"


def test_bad_arguments_are_one_line_and_code_2(job, tmp_path):
    records, checkpoints = job.paths.records, job.paths.checkpoints
    nowhere = f"realsys: config: TRIAL_DIR='{tmp_path}': is not the folder of a trial: correct the path\n"
    for arguments, expected in (
        (["replay", job.root, "--step", 9], f"realsys: {records}: step 9 is not recorded; there is 1-5\n"),
        (
            ["replay", job.root, "--step", 2],
            f"realsys: {checkpoints}: step 2 {CANNOT}; 3-5 can be (checkpoint.keep, checkpoint.every_steps)\n",
        ),
        (["replay", tmp_path], nowhere),
        (["samples", tmp_path], nowhere),
        (["samples", job.root, "--step", 0], f"realsys: {records}: step 0 is not recorded; there is 1-5\n"),
    ):
        done = realsys(*arguments)
        assert (done.returncode, done.stderr) == (2, expected)
    done = realsys("samples", job.root, "--ticket", "nobody")
    assert done.returncode == 2 and "step 5 has not trained ticket 'nobody': it has 00" in done.stderr


def test_missing_record_is_named(copy):
    shutil.rmtree(files.record_of_step(copy.records, 3))
    done = realsys("replay", copy.root, "--step", 4)
    problem = f"step 4 {CANNOT}; 5 can be (checkpoint.keep, checkpoint.every_steps)"
    assert (done.returncode, done.stderr) == (2, f"realsys: {copy.checkpoints}: {problem}\n")
