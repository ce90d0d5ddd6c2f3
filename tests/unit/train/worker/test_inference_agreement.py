"""actor_inf's comparison of log-probs: over the tokens that the trained version sampled, also within mixed answers."""

import math

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from realsys.config.schema import Config
from tests.support.training.ppo_batch import Worker, make_batch, make_models, save_models, whole
from tests.support.training.train_ranks import run_ranks

pytestmark = pytest.mark.processes

REFS, ARRAYS = make_batch()
TRAINED, OLDER = 0, -1  # ``Worker.call`` trains on version 0
CONFIG = Config.model_validate({"train": {"microbatch_tokens": 48}})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    torch.set_num_threads(1)
    return save_models(make_models(), tmp_path_factory.mktemp("models"))


def compare(folders, layout, ranks, behaviour, refs=REFS):
    """Statistics of actor_inf on every rank. ``behaviour``: per sample, what to add to the trainer's log-probs to get
    the recorded ones (``delta``), and ``versions``.
    """

    def body(rank, device):
        worker = Worker(rank, device, CONFIG, whole(layout, "actor"), folders)
        worker.fill(ARRAYS)
        worker.call("actor_inf", "actor", [REFS])
        for sample_id, proximal in worker.spread(REFS, "prox_logprobs").items():
            made = behaviour[sample_id]
            recorded = (proximal["prox_logprobs"] + made["delta"]).astype(np.float32)
            kept = {key: made[key] for key in ("versions", "kv_versions") if key in made}
            worker.data.put(sample_id, {"behav_logprobs": recorded, **kept})
        return worker.call("actor_inf", "actor", [refs]).stats

    return run_ranks(ranks, body, CONFIG)


def answers(current_of):
    """Recorded log-probs are 2 higher on old tokens; on current ones, 0.01 higher and lower in turn."""
    made = {}
    for ref in REFS:
        versions = np.where(current_of(ref.loss_tokens), TRAINED, OLDER).astype(np.int32)
        delta = np.where(versions == TRAINED, 0.01 * (-1.0) ** np.arange(ref.loss_tokens), 2.0)
        made[ref.sample_id] = {"versions": versions, "delta": delta}
    return made


@pytest.mark.parametrize(("layout", "ranks"), [("d1", 1), ("d2", 2), ("p2", 2)])
def test_agreement_compares_current_tokens_in_mixed_completions(folders, layout, ranks):
    """The last four tokens of every answer are current: 14, 3, 1, 9, 21, ... tokens -> 4, 3, 1, 4, 4, 4, 4, 4, 4."""
    made = answers(lambda n: np.arange(n) >= n - 4)
    longest = made[REFS[4].sample_id]
    longest["delta"][-1] = 0.03  # position 20: was +0.01
    current = np.concatenate([own["delta"][own["versions"] == TRAINED] for own in made.values()])
    assert len(current) == 32
    for stats in compare(folders, layout, ranks, made):
        if layout == "p2" and "agreement/tokens" not in stats:
            continue  # the first stage has no log-probs
        assert stats["agreement/tokens"] == 32
        assert stats["agreement/difference_mean"] == pytest.approx((31 * 0.01 + 0.03) / 32, rel=1e-4)
        assert stats["agreement/difference_max"] == pytest.approx(0.03, rel=1e-4)
        assert stats["agreement/ratio"] == pytest.approx(math.exp(-current.mean()), rel=1e-6)
        assert stats["logprob_difference_max"] == pytest.approx(2.0, rel=1e-5), "over all tokens"


def test_tokens_on_kept_keys_are_left_out(folders):
    """The first two tokens of every answer attended to keys of an older version: their log-probs are far apart."""
    made = answers(lambda n: np.ones(n, bool))
    for own in made.values():
        own["kv_versions"] = own["versions"].copy()
        own["kv_versions"][:2] = OLDER
        own["delta"][:2] = 2.0
    kept = sum(min(2, ref.loss_tokens) for ref in REFS)
    [stats] = compare(folders, "d1", 1, made)
    assert stats["agreement/tokens"] == sum(ref.loss_tokens for ref in REFS) - kept
    assert stats["agreement/difference_max"] == pytest.approx(0.01, rel=1e-3)
    assert stats["logprob_difference_max"] == pytest.approx(2.0, rel=1e-5), "over all tokens"


def test_samples_under_a_grammar_are_left_out(folders):
    """The engine's log-probs are those of the tokens that the grammar left."""
    made = answers(lambda n: np.ones(n, bool))
    made[REFS[0].sample_id]["delta"][:] = 2.0
    refs = [replace(REFS[0], constrained=True), *REFS[1:]]
    [stats] = compare(folders, "d1", 1, made, refs)
    assert stats["agreement/tokens"] == sum(ref.loss_tokens for ref in REFS[1:])
    assert stats["agreement/difference_max"] == pytest.approx(0.01, rel=1e-3)
    assert stats["logprob_difference_max"] == pytest.approx(2.0, rel=1e-5), "over all tokens"


def test_batch_without_current_token_has_no_agreement(folders):
    [stats] = compare(folders, "d1", 1, answers(lambda n: np.zeros(n, bool)))
    assert {key: value for key, value in stats.items() if key.startswith("agreement/")} == {"agreement/tokens": 0.0}
