"""DataManager and demonstrations: no process group."""

import gc
import threading
import weakref
from collections import Counter
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.algorithm.minibatches import sequence_refs
from realsys.algorithm.sequence_buffer import SequenceBuffer
from realsys.algorithm.token_losses import mask_group
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.data.arith import write_char_tokenizer
from realsys.data.learning import LearningRow
from realsys.errors import ConfigError, StreamError
from realsys.model_calls import ClearRequest, Empty, KeepDroppedRequest
from realsys.observe.dropped_groups import DroppedWriter, group_files, read_group
from realsys.train.recording import TooOldGroups
from realsys.train.requests import ClientRows
from realsys.train.step_gate import GateState, PauseStepRequest, SettleRequest, StepAbandoned, StepGate, decide
from realsys.train.worker.call_service import LearningSource, ModelWorkerService, WorkerParts
from realsys.train.worker.data_manager import DataManager, array_size, version_tokens, without_older
from realsys.types import ARRAY_KEYS, Episode, Group, SampleMeta, Ticket, register_key
from tests.support.processes.config_trees import changed
from tests.support.training.played_master import Message, PlayedMaster
from tests.support.training.sample_records import make_ref, make_row


def make_group(ticket_id, sizes, attempt=0):
    episodes = [
        Episode(
            [
                make_row(
                    np.arange(3 + n, dtype=np.int32),
                    np.full(n, -1.5, np.float32),
                    np.arange(n, dtype=np.int32) + 4,
                    "stop" if n < 4 else "length",
                )
            ],
            5.0,
        )
        for n in sizes
    ]
    return Group(Ticket(ticket_id, attempt, 0, version=2), episodes, "rollout_worker/0")


def test_a_group_is_stored_and_described():
    data = DataManager(worker=3)
    arrived = data.add_group(make_group("t7", [2, 5]))
    first, second = arrived.samples
    assert (first.sample_id, first.length, first.loss_tokens) == ("t7.0/0.0", 5, 2)
    assert (first.version_min, first.version_max, first.truncated, first.owner) == (4, 5, False, 3)
    assert (second.sample_id, second.loss_tokens, second.version_max, second.truncated) == ("t7.0/1.0", 5, 8, True)
    np.testing.assert_array_equal(data.get("t7.0/1.0", "tokens"), np.arange(8))


def test_versions_of_keys_are_stored_if_read():
    """A row without them attended to keys of its own versions."""
    group = make_group("t1", [3, 2])
    group.episodes[0].rows[0].kv_versions = np.array([3, 3, 6], np.int32)
    data, other = DataManager(0), DataManager(1)
    data.kv_versions = True
    arrived = data.add_group(group)
    assert arrived is not None and [meta.kept_tokens for meta in arrived.samples] == [2, 0]
    assert data.get("t1.0/0.0", "kv_versions").tolist() == [3, 3, 6]
    assert data.get("t1.0/1.0", "kv_versions").tolist() == [4, 5]
    data.mask_older(["t1.0/0.0"], 5)
    assert data.get("t1.0/0.0", "kv_versions").tolist() == [3, 6]
    other.add_group(group)
    assert not other.has("t1.0/0.0", "kv_versions")


def test_temperatures_are_stored_if_read():
    """0 in a row stands for the temperature of the trial, as does a row without any."""
    group = make_group("t1", [3, 2])
    group.episodes[0].rows[0].temperatures = ((0.5, 1), (0.0, 2))
    data, other = DataManager(0), DataManager(1)
    data.temperature = 0.75
    data.add_group(group)
    other.add_group(group)
    assert data.get("t1.0/0.0", "temperatures").tolist() == [0.5, 0.75, 0.75]
    assert data.get("t1.0/1.0", "temperatures").tolist() == [0.75, 0.75]
    data.mask_older(["t1.0/0.0"], 5)
    assert data.get("t1.0/0.0", "temperatures").tolist() == [0.75, 0.75]
    assert not other.has("t1.0/0.0", "temperatures")


def test_tokens_of_a_teacher_are_stored_if_read():
    """Masking takes all entries of a token; rows without as many as the loss reads are refused."""
    group = make_group("t1", [3])
    row = group.episodes[0].rows[0]
    data, other = DataManager(0, 2), DataManager(1)
    data.teacher = True
    with pytest.raises(StreamError, match="has 0 tokens of a teacher at each loss token, but train.ppo.loss reads 2"):
        data.add_group(group)
    row.teacher = (np.arange(6, dtype=np.int32).reshape(3, 2), np.full((3, 2), -1, np.float32))
    data.add_group(group)
    other.add_group(group)
    assert data.get("t1.0/0.0", "teacher_tokens").tolist() == [0, 1, 2, 3, 4, 5]
    data.mask_older(["t1.0/0.0"], 5)
    assert data.get("t1.0/0.0", "teacher_tokens").tolist() == [2, 3, 4, 5]
    assert data.get("t1.0/0.0", "teacher_logprobs").tolist() == [-1] * 4
    assert not other.has("t1.0/0.0", "teacher_tokens")


def episodes_of(*rows):
    return Group(Ticket("t2", 0, 0), [Episode(list(rows), 1.0)], "rollout_worker/0")


ROW = make_row(np.arange(5, dtype=np.int32), np.full(3, -1, np.float32), np.full(3, 7, np.int32))


@pytest.mark.parametrize(
    ("bound", "value", "good", "bad", "problem"),
    [
        # looked up in the embedding it would end the training side
        ("vocabulary", 8, make_group("t1", [5]), make_group("t2", [5, 6]), "rollout_worker/0 has token 8, .* has 8"),
        ("row_limit", 7, make_group("t1", [4]), make_group("t2", [5]), "a row of 8 tokens, .*microbatch_tokens is 7"),
        ("episode_limit", 9, episodes_of(ROW), episodes_of(ROW, ROW), "an episode of 10 tokens"),
    ],
)
def test_group_beyond_a_bound_is_refused(bound, value, good, bad, problem):
    data = DataManager(3)
    setattr(data, bound, value)
    good.ticket = Ticket("t1", 0, 0)
    assert data.add_group(good) is not None
    with pytest.raises(StreamError, match=f"model_worker/3: group t2 .*{problem}"):
        data.add_group(bad)
    assert len(data) == 1


def client_rows(*tokens):
    """Rows in the loss from their third token on."""
    rows = ClientRows({}, {}, {}, {})
    for number, own in enumerate(tokens):
        name = f"call 7/{len(tokens) - number}"
        rows.tokens[name] = np.array(own, np.int32).tobytes()
        rows.loss_mask[name] = (np.arange(len(own)) >= 2).tobytes()
        rows.logprobs[name] = np.full(len(own) - 2, -1.5, np.float32).tobytes()
        rows.advantages[name] = np.arange(len(own) - 2, dtype=np.float32).tobytes()
    return rows


def test_rows_of_a_client_are_stored_in_their_order():
    """Each is an episode. What they begin with is computed once if they are one group."""
    data = DataManager(3)
    metas = data.add_rows(client_rows([5, 6, 7, 8], [5, 6], [5, 6, 9]))
    assert [meta.sample_id for meta in metas] == ["call 7/3", "call 7/2", "call 7/1"]
    assert [meta.ticket_id for meta in metas] == [meta.sample_id for meta in metas]
    assert [(meta.length, meta.loss_tokens, meta.owner) for meta in metas] == [(4, 2, 3), (2, 0, 3), (3, 1, 3)]
    refs = sequence_refs([metas])
    assert [ref.episode for ref in refs] == [0, 1, 2] and all(ref.last for ref in refs)
    assert [ref.shared for ref in refs] == [[(0, 2)]] * 3
    assert data.get("call 7/3", "tokens").tolist() == [5, 6, 7, 8]
    assert data.get("call 7/3", "loss_mask").tolist() == [False, False, True, True]
    assert data.get("call 7/3", "behav_logprobs").tolist() == [-1.5, -1.5]
    assert data.get("call 7/3", "advantages").tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("bound", "problem"), [("vocabulary", "has token 9, .* has 9"), ("row_limit", "10 tokens, .* 9")]
)
def test_row_of_a_client_beyond_a_bound_is_refused(bound, problem):
    data = DataManager(3)
    setattr(data, bound, 9)
    assert data.add_rows(client_rows(range(8)))
    with pytest.raises(StreamError, match=f"model_worker/3: row call 7/1 of a client .*{problem}"):
        data.add_rows(client_rows([1, 2], range(10)))
    assert len(data) == 1


def test_group_of_other_trainer_incarnation_is_not_stored():
    """Its ticket is issued again."""
    data = DataManager(0)
    data.trainer_incarnation = "0002"
    early, again = make_group("t1", [2, 2]), make_group("t1", [5, 5], attempt=1)
    early.ticket = msgspec.structs.replace(early.ticket, trainer_incarnation="0001")
    again.ticket = msgspec.structs.replace(again.ticket, trainer_incarnation="0002")
    assert data.add_group(early) is None and len(data) == 0 and data.refused == 1
    arrived = data.add_group(again)
    assert arrived is not None and {sample.trainer_incarnation for sample in arrived.samples} == {"0002"}
    assert data.add_group(early) is None and len(data.get("t1.1/0.0", "tokens")) == 8


def test_a_group_that_arrives_twice_is_told_once():
    data = DataManager(0)
    assert data.add_group(make_group("t1", [2, 2])) is not None
    assert data.add_group(make_group("t1", [5, 5])) is None
    assert len(data.get("t1.0/0.0", "tokens")) == 5


def test_later_of_two_stored_attempts_is_trained():
    """The first one is in a batch, or its notice is on the way, or it is forgotten: the worker cannot know."""
    data, buffer = DataManager(0), SequenceBuffer()
    first, second = data.add_group(make_group("t1", [2, 2])), data.add_group(make_group("t1", [5, 5], attempt=1))
    assert first is not None and second is not None, "it would never arrive, and be re-issued for ever"
    assert len(data.get("t1.0/0.0", "tokens")) == 5 and len(data.get("t1.1/0.0", "tokens")) == 8
    buffer.add(first.samples)
    data.clear(sample.sample_id for sample in buffer.add(second.samples).clear)
    [members] = buffer.take(1).groups
    assert [member.sample_id for member in members] == ["t1.1/0.0", "t1.1/1.0"]
    assert [member.length for member in members] == [len(data.get(m.sample_id, "tokens")) for m in members]
    assert len(data) == 2, "of the first nothing is left"


def test_attempt_during_training_leaves_batch_unchanged():
    data, buffer = DataManager(0), SequenceBuffer()
    first = data.add_group(make_group("t1", [2, 2]))
    buffer.add(first.samples)
    assert buffer.take(1).groups
    second = data.add_group(make_group("t1", [5, 5], attempt=1))
    data.clear(sample.sample_id for sample in buffer.add(second.samples).clear)
    assert len(data.get("t1.0/0.0", "tokens")) == 5, "the length in the plan"
    data.clear(sample.sample_id for sample in buffer.take(1).clear)
    assert not data.has("t1.1/0.0", "tokens")


def test_clear_frees_the_arrays_and_leaves_the_rest():
    data = DataManager(0)
    data.add_group(make_group("t1", [2, 2]))
    data.put("t1.0/0.0", {"prox_logprobs": np.zeros(2)})
    alive = weakref.ref(data.get("t1.0/0.0", "tokens"))
    held = data.nbytes
    data.clear(["t1.0/0.0", "nobody/0"])
    gc.collect()
    assert alive() is None
    assert 0 < data.nbytes < held
    assert len(data) == 1
    with pytest.raises(KeyError, match="model_worker/0 has no tokens of sample t1.0/0.0: the sample is unknown"):
        data.get("t1.0/0.0", "tokens")


def test_clear_with_keys_frees_those_arrays_only():
    data = DataManager(0)
    data.add_group(make_group("t1", [2, 2]))
    data.put("t1.0/0.0", {"prox_logprobs": np.zeros(2)})
    alive = weakref.ref(data.get("t1.0/0.0", "prox_logprobs"))
    data.clear(["t1.0/0.0", "t1.0/1.0", "nobody/0"], ["prox_logprobs", "versions"])
    gc.collect()
    assert alive() is None
    assert [key for key in ARRAY_KEYS if data.has("t1.0/0.0", key)] == ["tokens", "loss_mask", "behav_logprobs"]
    assert len(data) == 2
    data.clear(["t1.0/0.0"], ["tokens", "loss_mask", "behav_logprobs"])
    assert len(data) == 1  # nothing of it is left, so it is not counted as held
    data.clear(["t1.0/1.0"])
    assert (len(data), data.nbytes) == (0, 0)


def test_array_size_follows_from_span_of_key():
    sizes = {key: array_size(make_ref("s", length=9, prompt=4), key, 3) for key in ARRAY_KEYS}
    whole, loss, with_end = 9, 5, 6
    assert sizes == {
        "tokens": whole,
        "loss_mask": whole,
        "behav_logprobs": loss,
        "versions": loss,
        "kv_versions": loss,
        "temperatures": loss,
        "token_rewards": loss,
        "prox_logprobs": loss,
        "ref_logprobs": loss,
        "values": with_end,
        "advantages": loss,
        "returns": loss,
        "teacher_tokens": 3 * loss,
        "teacher_logprobs": 3 * loss,
    }


def test_samples_come_and_go_while_others_are_read():
    """The I/O thread stores groups while the request loop reads, adds to and clears samples."""
    data, groups, start = DataManager(0), 200, threading.Barrier(3)

    def arrive(first):
        start.wait()
        for i in range(first, first + groups):
            data.add_group(make_group(f"t{i}", [2, 3]))

    threads = [threading.Thread(target=arrive, args=(first,)) for first in (0, groups)]
    for thread in threads:
        thread.start()
    data.put("old", {"tokens": np.zeros(4)})
    start.wait()
    for i in range(2 * groups):
        data.put("old", {"prox_logprobs": np.full(1, i)})
        assert data.get("old", "prox_logprobs").tolist() == [i]
        assert data.nbytes >= 20
        data.clear(["old"], ["prox_logprobs"])
    for thread in threads:
        thread.join()
    assert len(data) == 1 + 2 * 2 * groups
    data.clear(f"t{i}.0/{k}.0" for i in range(2 * groups) for k in range(2))
    assert len(data) == 1


def test_stored_arrays_release_the_received_frame():
    frame = np.zeros(1000, np.int32)
    alive = weakref.ref(frame)
    group = make_group("t1", [2])
    group.episodes[0].rows[0].tokens = frame[:5]
    data = DataManager(0)
    data.add_group(group)
    del frame, group
    gc.collect()
    assert alive() is None


def test_a_missing_key_is_named():
    data = DataManager(1)
    data.put("s", {"tokens": np.zeros(3)})
    with pytest.raises(KeyError, match="model_worker/1 has no prox_logprobs of sample s: it has tokens"):
        data.get("s", "prox_logprobs")
    with pytest.raises(KeyError):
        data.put("s", {"nonsense": np.zeros(3)})


def test_rows_of_episode_are_separate_samples():
    data = DataManager(0)
    data.token_rewards = True
    rows = [
        make_row(np.arange(5, dtype=np.int32), np.full(3, -1, np.float32), np.full(3, 7, np.int32)),
        make_row(np.arange(9, dtype=np.int32), np.full(2, -1, np.float32), np.full(2, 8, np.int32), "length"),
    ]
    rows[0].rewards = ((2, 0.5), (4, 1.0))
    group = Group(Ticket("t1", 0, 0), [Episode(rows, 2.0, True, {"turns": 2.0})], "rollout_worker/0")
    arrived = data.add_group(group)
    first, second = arrived.samples
    assert [first.sample_id, second.sample_id] == ["t1.0/0.0", "t1.0/0.1"]
    assert (first.group_rows, first.episode_tokens, first.loss_tokens, second.loss_tokens) == (2, 5, 3, 2)
    assert first.truncated and second.truncated, "the episode was cut off, whichever row it was in"
    assert (first.row_truncated, second.row_truncated) == (False, True)
    assert (first.reward, first.correct, first.metrics) == (second.reward, second.correct, second.metrics)
    assert data.get("t1.0/0.0", "token_rewards").tolist() == [0.5, 0.0, 1.0]
    assert data.get("t1.0/0.1", "token_rewards").tolist() == [0.0, 0.0]


def test_lines_to_learn_are_loaded_as_episodes_of_their_own(tmp_path, monkeypatch):
    class Fixed:
        def rows(self, split, index):
            assert split == "eval"
            return [LearningRow([1, 2, index, 9], [False, False, True, True]), LearningRow([1, 9], [False, True])]

    monkeypatch.setattr("realsys.train.worker.call_service.learning_data", lambda *_: Fixed())
    monkeypatch.setattr("realsys.train.worker.call_service.TextTokenizer", lambda _model: None)
    data = DataManager(2)
    source = LearningSource(Config(), TrialPaths(tmp_path), data)
    chosen, rejected = source.load("eval", {"eval.0": 5, "eval.1": 6})[2:]
    assert data.get(chosen.sample_id, "tokens").tolist() == [1, 2, 6, 9]
    assert data.get(chosen.sample_id, "loss_mask").tolist() == [False, False, True, True]
    assert [(meta.sample_id, meta.row) for meta in (chosen, rejected)] == [
        ("eval.1/0.0", 0),
        ("eval.1/0.1", 1),
    ]
    assert {(m.ticket_id, m.episode, m.group_rows, m.episode_tokens, m.owner) for m in (chosen, rejected)} == {
        ("eval.1", 0, 2, 3, 2)
    }
    assert (chosen.length, chosen.loss_tokens, rejected.length, rejected.loss_tokens) == (4, 2, 2, 1)


def test_warm_up_without_demonstrations_is_config_error(tmp_path):
    config = Config.model_validate({"data": {"kind": "jsonl", "train": "t.jsonl"}})
    write_char_tokenizer(TrialPaths(tmp_path).start_model)
    with pytest.raises(ConfigError, match=r"data\.demos"):
        LearningSource(config, TrialPaths(tmp_path), DataManager(0)).load("train", {"train/0.0": 0})


def test_custom_dataflow_key_is_stored_and_fixed():
    try:
        for _ in range(2):  # twice is fine: every process imports the module that declares it
            register_key("entropies", "float32", "loss")
        with pytest.raises(ValueError, match=r"entropies.*already declared"):
            register_key("entropies", "int32", "loss")
        with pytest.raises(ValueError, match=r"scores.*metadata"):
            register_key("scores", "float32", "loss")
        assert "scores" not in ARRAY_KEYS
        data = DataManager(0)
        data.put("t/0", {"entropies": np.array([0.5, 1.5])})
        assert data.get("t/0", "entropies").dtype == np.float32
    finally:
        ARRAY_KEYS.pop("entropies", None)


def test_only_held_arrays_outlive_clearing():
    data = DataManager(0)
    data.add_group(make_group("t1", [2, 2]))
    data.add_group(make_group("t2", [2]))
    wanted = {"tokens": ["t1.0/0.0", "t1.0/1.0"], "values": ["t1.0/0.0"], "returns": ["t1.0/0.0"]}
    (origin,) = data.hold(wanted)
    assert (origin.ticket.ticket_id, origin.worker, len(origin.episodes)) == ("t1", "rollout_worker/0", 2)
    data.put("t1.0/0.0", {"values": np.ones(3), "prox_logprobs": np.zeros(2)})  # one that is held, and one that is not
    data.clear(["t1.0/0.0"], ["tokens", "values"])
    data.clear(["t1.0/0.0", "t1.0/1.0"])
    held = data.release()
    assert list(held) == [("t1.0/0.0", "tokens"), ("t1.0/1.0", "tokens"), ("t1.0/0.0", "values")]  # returns never came
    np.testing.assert_array_equal(held["t1.0/0.0", "values"], np.ones(3))
    assert data.release() == {}
    data.clear(["t2.0/0.0"])
    assert data.hold({"tokens": ["t2.0/0.0"]}) == [] and data.release() == {}
    assert data.nbytes == 0


def test_a_new_hold_forgets_the_one_before():
    data = DataManager(0)
    data.add_group(make_group("t1", [2]))
    data.hold({"tokens": ["t1.0/0.0"]})
    data.hold({"versions": ["t1.0/0.0"]})
    assert list(data.release()) == [("t1.0/0.0", "versions")]


# ---- Tokens that are too old leave the loss of their row, and nothing else changes


def test_masked_tokens_leave_loss_and_stay_in_context():
    data = DataManager(0)
    versions, logprobs = np.array([1, 1, 2, 3], np.int32), np.arange(4, dtype=np.float32)
    mask = np.array([False, True, True, False, True, True])
    data.put("a", {"tokens": np.arange(6), "loss_mask": mask, "behav_logprobs": logprobs, "versions": versions})
    data.put("a", {"token_rewards": np.array([1, 0, 2, 4], np.float32)})
    data.mask_older(["a"], 2)
    assert data.get("a", "tokens").tolist() == [0, 1, 2, 3, 4, 5]
    assert data.get("a", "loss_mask").tolist() == [False, False, False, False, True, True]
    assert data.get("a", "behav_logprobs").tolist() == [2, 3] and data.get("a", "versions").tolist() == [2, 3]
    assert data.get("a", "token_rewards").tolist() == [2, 4], "the reward before all that is left is lost"


def test_reward_of_masked_token_moves_to_the_one_before():
    """A later turn may be sampled by an older server."""
    arrays = {
        "loss_mask": np.ones(3, bool),
        "versions": np.array([2, 1, 2], np.int32),
        "token_rewards": np.array([1, 5, 2], np.float32),
    }
    assert without_older(arrays, 2)["token_rewards"].tolist() == [6, 2]


@given(
    versions=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    context=st.lists(st.booleans(), max_size=12),
    oldest=st.integers(0, 6),
)
def test_no_older_token_is_left_in_loss(versions, context, oldest):
    """Master and worker make the same choice: from the counts of a row, and from its arrays."""
    mask = np.array([False, *context[: len(versions)], *([True] * len(versions))])
    mask[np.flatnonzero(mask)[len(versions) :]] = False
    arrays = {
        "loss_mask": mask,
        "versions": np.array(versions, np.int32),
        "behav_logprobs": np.arange(len(versions), dtype=np.float32),
        "token_rewards": np.ones(len(versions), np.float32),
    }
    left = without_older(arrays, oldest)
    fresh = [k for k, version in enumerate(versions) if version >= oldest]
    assert left["behav_logprobs"].tolist() == fresh, "nothing else leaves"
    assert left["loss_mask"].sum() == len(fresh) == len(left["versions"]) == len(left["token_rewards"])
    assert not np.any(left["loss_mask"] & ~mask)
    low, high = min(versions), max(versions)
    meta = SampleMeta("t.0/0.0", "t", 0, len(mask), len(versions), 1.0, False, low, high, 0)
    meta.version_tokens = version_tokens(arrays["versions"])
    rows = mask_group([meta], oldest)
    assert sum(row.loss_tokens for row in rows) == len(fresh)
    assert all(row.version_min >= oldest for row in rows)


# ---- A ModelWorker keeps a group that was too old on disk, before it clears its samples


TICKET = Ticket("0000000007", 1, 3, version=2, n=2)


def row(*versions, reason="stop"):
    count = len(versions)
    return make_row(
        np.arange(2 + count, dtype=np.int32), -np.ones(count, np.float32), np.array(versions, np.int32), reason
    )


def arrived(data):
    """Add a group of two episodes; the first has two rows."""
    episodes = [Episode([row(3, 4), row(5)], 1.0, True), Episode([row(2, 2, reason="length")], 0.0, False)]
    notice = data.add_group(Group(TICKET, episodes, "rollout_worker/1"))
    return notice.samples


def test_too_old_group_is_kept_with_versions(tmp_path):
    data, writer = DataManager(0), DroppedWriter(tmp_path, "model_worker/0", 4)
    samples = arrived(data)
    TooOldGroups(data, writer).keep(KeepDroppedRequest("masked", 9, samples))
    data.clear([sample.sample_id for sample in samples])
    writer.flush()
    [file] = group_files(tmp_path)
    assert file.path.parent.name == "model_worker-0"
    group = read_group(file.path)
    assert (group.ticket, group.worker) == (TICKET, "rollout_worker/1")
    assert (group.reason, group.next_version, group.reference) == ("masked", 9, None)
    first, second = group.episodes
    assert (first.number, first.reward, first.correct, first.tokens, first.versions) == (0, 1.0, True, 3, (3, 5))
    assert (second.number, second.correct, second.finish_reason, second.versions) == (1, False, "length", (2, 2))
    assert [kept.arrays()["versions"].tolist() for kept in first.rows] == [[3, 4], [5]]


def test_group_that_is_not_here_is_left_out(tmp_path):
    samples = arrived(DataManager(0))
    writer = DroppedWriter(tmp_path, "model_worker/0", 4)
    assert TooOldGroups(DataManager(0), writer).keep(KeepDroppedRequest("masked", 9, samples)) == Empty()
    writer.flush()
    assert group_files(tmp_path) == []


def test_service_keeps_a_group_and_clears_it(tmp_path):
    paths, data, nothing = TrialPaths(tmp_path), DataManager(2), cast(Any, None)
    endpoint = PlayedMaster([], threading.Event())
    service = ModelWorkerService(changed(), paths, WorkerParts(2, {}, endpoint, data, nothing, nothing))
    samples = arrived(data)
    service.handle(Message("keep_dropped", KeepDroppedRequest("stale", 4, samples)))
    service.handle(Message("clear", ClearRequest([sample.sample_id for sample in samples])))
    assert endpoint.replies == [Empty(), Empty()] and len(data) == 0
    for thread in threading.enumerate():
        if thread.name == "dropped group":
            thread.join()
    [file] = group_files(paths.dropped)
    assert read_group(file.path).reason == "stale" and file.path.parent.name == "model_worker-2"


# ---- The gate that lets a stop abandon a step: promises, limits, and the decision over all ranks


BOUND_S = 30.0


def gate_after(passes, *, updating=False):
    gate = StepGate()
    gate.begin(3, "actor_train")
    for _ in range(passes):
        assert gate.passes()
    if updating:
        assert gate.passes(updating=True)
    return gate


def start(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_open_gate_lets_everything_pass():
    gate = gate_after(5, updating=True)
    gate.check()
    assert gate.pause(PauseStepRequest()) == GateState(3, {"actor_train": 6}, updating=True)


def test_paused_gate_waits_for_the_decision():
    gate, passed = gate_after(2), Counter[bool]()
    promised = gate.pause(PauseStepRequest()).passed["actor_train"]
    waiting = start(lambda: passed.update([gate.passes()]))
    assert promised == 2 and not passed
    gate.settle(SettleRequest(abandon=False))
    waiting.join(BOUND_S)
    assert passed == {True: 1}


def test_rank_behind_passes_up_to_the_limit():
    behind, ahead = gate_after(1), gate_after(3)
    decision = decide([gate.pause(PauseStepRequest()) for gate in (behind, ahead)], 3)
    for gate in (behind, ahead):
        gate.settle(decision)
    assert [behind.passes() for _ in range(4)] == [True, True, False, False]
    assert not ahead.passes(updating=True)
    for gate in (behind, ahead):
        with pytest.raises(StepAbandoned):
            gate.check()


def test_call_that_no_rank_has_begun_is_abandoned():
    gate = gate_after(4)
    gate.settle(decide([gate.pause(PauseStepRequest())], 3))
    gate.begin(3, "critic_train")
    assert not gate.passes()


def test_step_that_updates_is_finished():
    states = [gate_after(2).pause(PauseStepRequest()), gate_after(2, updating=True).pause(PauseStepRequest())]
    assert decide(states, 3) == SettleRequest(abandon=False)


def test_rank_of_an_earlier_step_does_not_count():
    done = gate_after(6, updating=True).pause(PauseStepRequest())
    assert decide([done], 4) == SettleRequest(abandon=True, limits={})


def test_next_step_begins_without_updates():
    gate = gate_after(2, updating=True)
    gate.begin(4, "actor_train")
    assert gate.pause(PauseStepRequest()) == GateState(4, {}, updating=False)


def test_gate_opens_without_a_decision():
    gate = StepGate(decision_s=0.0)
    gate.pause(PauseStepRequest())
    assert gate.passes()
