"""Groups of a RolloutWorker that were not trained, as it offers them to the writer."""

import numpy as np

from realsys.data.prompts import Prompt
from realsys.generation.completion import Completion
from realsys.observe.dropped_groups import DroppedWriter, group_files, read_group
from realsys.rollout.stores import DroppedStore
from realsys.types import Episode, Ticket
from tests.support.training.sample_records import make_row

PROMPT = Prompt("1+2=", "3", [1, 2])
CALL = ([1, 2], Completion(np.array([8, 8], np.int32), -np.ones(2, np.float32), np.array([5, 6], np.int32), "length"))


def stored(tmp_path, reason, **parts):
    writer = DroppedWriter(tmp_path, "rollout_worker/0", 4)
    DroppedStore(writer).add(Ticket("7", 0, 0), PROMPT, reason, **{"episodes": {}, "failed": {}, **parts})  # type: ignore[arg-type]
    writer.flush()
    [file] = group_files(tmp_path)
    return read_group(file.path)


def test_filtered_group_has_prompt_and_reason(tmp_path):
    row = make_row(np.arange(4, dtype=np.int32), -np.ones(3, np.float32), np.array([4, 5, 5], np.int32))
    group = stored(tmp_path, "equal_rewards", episodes={2: Episode([row], 1.0, True)})
    assert (group.worker, group.reason, group.prompt, group.reference) == (
        "rollout_worker/0",
        "equal_rewards",
        "1+2=",
        "3",
    )
    [episode] = group.episodes
    assert (episode.number, episode.reward, episode.tokens, episode.versions) == (2, 1.0, 3, (4, 5))
    assert episode.rows[0].arrays()["versions"].tolist() == [4, 5, 5] and group.next_version is None


def test_failed_episode_has_its_last_call(tmp_path):
    failed = {1: ("RewardError: no verdict", CALL), 2: ("died", None)}
    first, second = stored(tmp_path, "RewardError: x", failed=failed).episodes
    assert first.rows[0].arrays()["tokens"].tolist() == [1, 2, 8, 8] and first.finish_reason == "length"
    assert first.rows[0].arrays()["loss_mask"].tolist() == [False, False, True, True]
    assert (first.error, second.error, second.rows, second.tokens) == ("RewardError: no verdict", "died", [], 0)
