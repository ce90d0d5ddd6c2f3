"""SimpleEngine: ends of completions, what ``complete`` may return, aborts and updates between completions."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from realsys.errors import GenerationError, WeightsError
from realsys.generation.backend import Change, EngineParts
from realsys.generation.lent import LentEngine
from realsys.generation.protocol import SamplingParams
from realsys.generation.threaded import SimpleEngine
from tests.support.processes.config_trees import changed
from tests.support.serving.generation_models import VOCAB, make_model, make_tokenizer

BOUND = 20.0
EOS = VOCAB - 1


class Scripted(SimpleEngine):
    """Returns ``reply``, and can be held inside ``complete``."""

    def __init__(self, parts):
        super().__init__(parts, capacity=4)
        self.reply: tuple[list[int], list[float]] = ([1, 2, 3], [-0.5, -1.0, -1.5])
        self.asked: list[SamplingParams] = []
        self.loaded: list[dict] = []
        self.entered = threading.Semaphore(0)
        self.go = threading.Event()
        self.go.set()

    def complete(self, input_ids, params):
        self.asked.append(params)
        self.entered.release()
        assert self.go.wait(BOUND)
        return self.reply

    def load_weights(self, tensors):
        self.loaded.append(dict(tensors))

    def release_weights(self):
        self.loaded.clear()


def load(path, version):
    if path == "/bad":
        raise WeightsError("/bad holds version 8")
    return SimpleNamespace(tensors={"w": version}, timings={"verify_s": 0.25}, counts={"bytes": 4})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "base"
    make_model("qwen2", path, seed=1, eos=EOS)
    make_tokenizer(path)
    return path


@pytest.fixture
def changes():
    return []


@pytest.fixture
def engine(model, changes):
    config = changed("data.max_prompt_tokens=8", "generation.sampling.max_new_tokens=24")
    engine = Scripted(EngineParts(config, model, 0, load, None, changes.append, lambda callback: None))
    engine.start()
    yield engine
    engine.go.set()
    engine.close(BOUND)


def completions(engine, **params):
    return engine.generate("", [5, 6], SamplingParams(**{"max_new_tokens": 8, **params})).result(BOUND)


ENDS = [
    # (reply, parameters, tokens kept, reason, matched)
    ([1, 2, 3], {}, 3, "stop", None),
    ([1, 2, 3], {"max_new_tokens": 3}, 3, "length", None),
    ([1, 2, 3], {"max_new_tokens": 2}, 2, "length", None),
    ([1, EOS, 3], {}, 2, "stop", EOS),
    ([1, 2, 3], {"stop_token_ids": (2,)}, 2, "stop", 2),
    ([2, 1, 2], {"stop_token_ids": (2,), "min_new_tokens": 1}, 3, "stop", 2),
    # token i is the character "0" + i; the prompt is "56"
    ([1, 2, 3], {"stop": ("3", "12")}, 2, "stop", "12"),
    ([1, 2, 3], {"stop": ("61",)}, 3, "stop", None),
    ([1, 2, 3], {"stop": ("61",), "answer_prefix": 1}, 1, "stop", "61"),
]


@pytest.mark.parametrize(("reply", "params", "kept", "reason", "matched"), ENDS)
def test_completion_is_cut_where_it_ends(engine, reply, params, kept, reason, matched):
    engine.reply = (reply, [-1.0, -2.0, -3.0])
    [result] = completions(engine, **params)
    assert (result.tokens.tolist(), result.logprobs.tolist()) == (reply[:kept], [-1.0, -2.0, -3.0][:kept])
    assert (result.tokens.dtype, result.logprobs.dtype) == (np.int32, np.float32)
    assert (result.finish_reason, result.matched, result.segments) == (reason, matched, [(-1, kept)])


def test_each_completion_has_its_own_seed(engine):
    assert len(completions(engine, n=3, sampling_seed=5)) == 3
    assert len(completions(engine, n=3, sampling_seed=6)) == 3
    assert [params.n for params in engine.asked] == [1] * 6
    assert len({params.sampling_seed for params in engine.asked}) == 6
    seeds = [params.sampling_seed for params in engine.asked[:3]]
    completions(engine, n=3, sampling_seed=5)
    assert [params.sampling_seed for params in engine.asked[6:]] == seeds


WRONG = [
    (([], []), "0 tokens and 0 log-probs"),
    (([1, 2], [-1.0]), "2 tokens and 1 log-probs"),
    (([1], [float("nan")]), "not finite"),
    (([VOCAB], [-1.0]), f"outside the vocabulary of {VOCAB}"),
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("reply", "problem"), WRONG, ids=[problem for _, problem in WRONG])
def test_wrong_reply_ends_the_engine(engine, reply, problem):
    """It is an error of the program: serving on would train on it, or repeat it for ever."""
    engine.reply = reply
    with pytest.raises(GenerationError, match=problem) as caught:
        completions(engine)
    assert caught.value.retryable and problem in engine.failure
    with pytest.raises(GenerationError, match=problem):
        engine.generate("", [1], SamplingParams(max_new_tokens=1))


def test_update_comes_between_two_completions(engine, changes):
    engine.go.clear()
    completions = engine.generate("a", [5], SamplingParams(max_new_tokens=8, n=2))
    assert engine.entered.acquire(timeout=BOUND)
    update = engine.update("/v3", 3)
    assert (engine.version, engine.info().running, engine.info().queued) == (-1, 1, 1)
    engine.go.set()
    assert [result.segments for result in completions.result(BOUND)] == [[(-1, 3)], [(3, 3)]]
    assert update.result(BOUND).success and {"verify_s", "stage_s", "load_s"} <= update.result(BOUND).timings.keys()
    assert (engine.version, engine.model_path, engine.loaded) == (3, "/v3", [{"w": 3}])
    assert changes == [Change(0)]


def test_refused_version_leaves_the_old_one(engine):
    assert engine.update("/v3", 3).result(BOUND).success
    refused = engine.update("/bad", 4).result(BOUND)
    assert (refused.success, refused.message) == (False, "/bad holds version 8")
    assert (engine.version, engine.model_path, engine.loaded) == (3, "/v3", [{"w": 3}])


def test_abort_keeps_the_completions_there_are(engine):
    engine.go.clear()
    completions = engine.generate("a", [5], SamplingParams(max_new_tokens=8, n=3))
    assert engine.entered.acquire(timeout=BOUND)
    aborted, unknown = engine.abort("a"), engine.abort("b")
    engine.go.set()
    reasons = [(result.finish_reason, len(result.tokens)) for result in completions.result(BOUND)]
    assert reasons == [("stop", 3), ("abort", 0), ("abort", 0)]
    assert (aborted.result(BOUND), unknown.result(BOUND)) == (True, False)
    assert engine.info().queued == 0


def test_pause_holds_requests_until_resume(engine):
    engine.pause("in_place").result(BOUND)
    first = engine.generate("a", [5], SamplingParams(max_new_tokens=8, n=2))
    twin = engine.generate("a", [5], SamplingParams(max_new_tokens=8))
    full = engine.generate("b", [5], SamplingParams(max_new_tokens=8, n=3))
    with pytest.raises(GenerationError, match="ids must be unique") as refused:
        twin.result(BOUND)
    assert not refused.value.retryable
    with pytest.raises(GenerationError, match="queue full: 2 completions wait, at most 4") as refused:
        full.result(BOUND)
    assert refused.value.retryable
    assert engine.info().paused and not engine.asked
    engine.resume().result(BOUND)
    assert len(first.result(BOUND)) == 2


def test_sleep_holds_requests_until_weights_are_loaded(engine):
    assert engine.update("/v3", 3).result(BOUND).success
    engine.sleep().result(BOUND)
    completion = engine.generate("a", [5], SamplingParams(max_new_tokens=8))
    assert "wake it first" in engine.update("/v3", 3).result(BOUND).message
    assert (engine.version, engine.loaded, engine.info().paused) == (-1, [], True)
    engine.wake().result(BOUND)
    assert engine.info().paused and not completion.done() and not engine.asked
    assert engine.update("/v3", 3).result(BOUND).success
    assert completion.result(BOUND)[0].segments == [(3, 3)] and engine.loaded == [{"w": 3}]


def test_closed_engine_fails_open_calls(engine):
    engine.pause("in_place").result(BOUND)
    waiting = engine.generate("a", [5], SamplingParams(max_new_tokens=8))
    engine.close(BOUND)
    with pytest.raises(GenerationError, match="the server is stopping") as caught:
        waiting.result(BOUND)
    assert caught.value.retryable


# ---- on devices that ranks use in turn with it


@pytest.fixture
def lent(model, changes):
    """A LentEngine; ``made`` lets its engine be made, ``built`` has it then."""
    config = changed("data.max_prompt_tokens=8", "generation.sampling.max_new_tokens=24")
    made, built = threading.Event(), []

    def build(parts):
        assert made.wait(BOUND)
        built.append(Scripted(parts))
        return built[0]

    parts = EngineParts(config, model, 0, load, None, changes.append, lambda callback: None)
    engine = LentEngine(build, parts)
    engine.start()
    yield SimpleNamespace(engine=engine, made=made, built=built)
    made.set()
    engine.close()


def test_a_lent_engine_is_made_when_it_first_wakes(lent, changes):
    engine = lent.engine
    assert changes == [Change(0)] and engine.version == -1 and engine.info().paused and engine.failure is None
    engine.sleep().result(BOUND)
    with pytest.raises(GenerationError, match="asleep|sleeps") as refused:
        engine.update("/v", 0)
    assert refused.value.retryable and not lent.built
    first, again = engine.wake(), engine.wake()
    assert first is again, "a call that is repeated waits for the same engine"
    lent.made.set()
    first.result(BOUND)
    assert engine.update("/v", 3).result(BOUND).success and engine.version == 3
    assert list(engine.generate("", [5, 6], SamplingParams(max_new_tokens=8)).result(BOUND)[0].tokens) == [1, 2, 3]
    engine.sleep().result(BOUND)
    assert engine.version == -1 and not lent.built[0].loaded
    engine.wake().result(BOUND)
    assert len(lent.built) == 1 and engine.update("/v", 4).result(BOUND).success


def test_an_engine_that_is_made_late_sleeps_at_once(lent):
    """The wait for it has ended, and it is the trainer's turn."""
    engine = lent.engine
    waking, asleep = engine.wake(), engine.sleep()
    assert not asleep.done()
    lent.made.set()
    asleep.result(BOUND)
    waking.result(BOUND)
    assert not engine.update("/v", 0).result(BOUND).success


def test_an_engine_that_ends_asleep_ends_its_process(lent, changes):
    lent.made.set()
    lent.engine.wake().result(BOUND)
    died = Change(None, "was killed")
    lent.built[0].parts.on_change(died)
    assert changes[-1] == died, "awake it starts again by itself"
    lent.engine.sleep().result(BOUND)
    lent.built[0].parts.on_change(died)
    assert changes[-1].final


def test_an_engine_that_cannot_be_made_ends_its_process(model, changes):
    def build(parts):
        raise GenerationError("no memory")

    config = changed("data.max_prompt_tokens=8")
    engine = LentEngine(build, EngineParts(config, model, 0, load, None, changes.append, lambda callback: None))
    with pytest.raises(GenerationError, match="no memory"):
        engine.wake().result(BOUND)
    assert changes[-1].final and "no memory" in changes[-1].reason


def test_an_engine_that_is_made_late_and_cannot_sleep_ends_its_process(lent, changes, monkeypatch):
    def refuse(self):
        raise GenerationError("it hangs")

    monkeypatch.setattr(Scripted, "sleep", refuse)
    lent.engine.wake()
    asleep = lent.engine.sleep()
    lent.made.set()
    with pytest.raises(GenerationError, match="it hangs"):
        asleep.result(BOUND)
    assert changes[-1].final
