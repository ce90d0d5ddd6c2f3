"""The engine's thread: weight updates, pauses, aborts and failures while requests are running."""

import threading

import numpy as np
import pytest

from realsys.cluster.process import resident_bytes
from realsys.errors import GenerationError, WeightsError
from realsys.generation.embedded.decoder import read_tensors
from realsys.generation.embedded.engine import EmbeddedEngine
from realsys.generation.protocol import SamplingParams
from tests.support.serving.generation_models import Weights, make_core, make_model, make_request, run

BOUND = 20.0
LONG = SamplingParams(max_new_tokens=100, sampling_seed=1)


class Steps:
    """Holds the engine thread after chosen steps, so that a test acts at a known moment."""

    def __init__(self):
        self.count = 0
        self._stop_at: int | None = None
        self._reached, self._go = threading.Event(), threading.Event()

    def stop_at(self, step):
        self._stop_at = step
        self._reached.clear()

    def __call__(self, core):
        self.count += 1
        if self.count == self._stop_at:
            self._go.clear()
            self._reached.set()
            assert self._go.wait(BOUND)

    def wait(self):
        assert self._reached.wait(BOUND), f"the engine did not reach step {self._stop_at}"

    def go(self):
        self._go.set()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("old", "new")):
        make_model("qwen2", root / name, seed=seed)
    return root


@pytest.fixture
def steps():
    return Steps()


@pytest.fixture
def start(models, steps):
    engines = []

    def start(load=None, prefill_tokens=2048, cache_rows=0, **options):
        def load_new(path, version, *, loaded=False):
            return Weights(read_tensors(models / "new"), {"verify_s": 0.25})

        sizes = {"prefill_tokens": prefill_tokens, "cache_rows": cache_rows}
        core = make_core(models / "old", max_running=4, max_queued=8, **sizes)
        core.version = 1
        engine = EmbeddedEngine(core, load or load_new, on_step=steps, **options)
        engine.start()
        engines.append(engine)
        return engine

    yield start
    steps.go()
    for engine in engines:
        engine.close(BOUND)


def held_after(engine, steps, step, params=LONG):
    """The future of a request whose engine waits after ``step`` tokens, until ``steps.go()``."""
    steps.stop_at(step)
    future = engine.generate("a", [1, 2, 3], params)
    steps.wait()
    return future


def staged(engine):
    """An event: the next update is staged, and its swap is in the engine's inbox."""
    event, post = threading.Event(), engine._stager._on_ready

    def on_ready(update):
        post(update)
        event.set()

    engine._stager._on_ready = on_ready
    return event


def test_update_stages_during_decoding_swaps_between_steps(start, steps, models):
    gate = threading.Event()

    def load(path, version, *, loaded=False):
        assert (path, version) == ("v2", 2)
        assert gate.wait(BOUND)
        return Weights(read_tensors(models / "new"), {"verify_s": 0.25})

    engine = start(load)
    completion = held_after(engine, steps, 10)
    ready = staged(engine)
    update = engine.update("v2", 2)
    steps.stop_at(20)
    steps.go()
    steps.wait()  # ten more tokens while the weights are still being loaded
    assert engine.info().weight_version == "1"
    gate.set()
    assert ready.wait(BOUND)
    steps.go()
    result = update.result(BOUND)
    [generated] = completion.result(BOUND)
    assert generated.segments == [(1, 20), (2, 80)]
    assert result.success
    assert result.timings["verify_s"] == 0.25
    assert {"stage_s", "drain_s", "pause_s", "load_s", "first_token_s"} <= result.timings.keys()
    assert engine.info().weight_version == "2"
    assert engine.info().updates == 1


def test_unchanged_version_keeps_weights_and_cache(start, steps, models):
    def load(path, version, *, loaded=False):
        return Weights(read_tensors(models / "new"), unchanged=version == 3)

    engine = start(load)
    assert engine.update("v2", 2).result(BOUND).success
    completion = held_after(engine, steps, 10)
    ready, weights = staged(engine), engine.core._model.weights
    update = engine.update("v3", 3)
    assert ready.wait(BOUND)
    steps.stop_at(11)
    steps.go()
    steps.wait()
    assert engine.core.cached_tokens >= 10, "nothing is computed again"
    steps.go()
    assert update.result(BOUND).success and engine.version == 3
    assert completion.result(BOUND)[0].segments == [(2, 10), (3, 90)]
    assert engine.core._model.weights is weights


def test_version_that_equals_a_refused_one_is_loaded(start, models):
    def load(path, version, *, loaded=False):
        if version == 2:
            raise WeightsError("damaged")
        return Weights(read_tensors(models / "new"), unchanged=True)

    engine = start(load)
    weights = engine.core._model.weights
    assert not engine.update("v2", 2).result(BOUND).success
    assert engine.update("v3", 3).result(BOUND).success
    assert engine.core._model.weights is not weights


def test_lower_weight_version_is_taken_and_marks_tokens(start, steps):
    """Training went back to a checkpoint: what publishes is younger, the number is lower."""
    engine = start()
    engine.core.version = 7
    completion = held_after(engine, steps, 20)
    ready = staged(engine)
    update = engine.update("weights/v5.0002", 5)
    assert ready.wait(BOUND)
    steps.go()
    [generated] = completion.result(BOUND)
    assert generated.segments == [(7, 20), (5, 80)]
    assert update.result(BOUND).success and (engine.version, engine.model_path) == (5, "weights/v5.0002")


def test_update_without_running_requests_returns_immediately(start):
    engine = start()
    timings = engine.update("v2", 2).result(BOUND).timings
    assert "first_token_s" not in timings and timings["pause_s"] >= timings["load_s"]


def test_two_updates_in_a_row_are_both_answered(start, steps):
    engine = start()
    completion = held_after(engine, steps, 10)
    ready = staged(engine)
    first = engine.update("v2", 2)
    assert ready.wait(BOUND)
    ready.clear()
    second = engine.update("v3", 3)
    assert ready.wait(BOUND)
    steps.go()
    assert "first_token_s" not in first.result(BOUND).timings  # the second one followed without a step between them
    assert "first_token_s" in second.result(BOUND).timings
    assert completion.result(BOUND)[0].segments == [(1, 10), (3, 90)]


def test_update_returns_before_interrupted_caches_are_rebuilt(start, steps):
    engine = start(prefill_tokens=64)
    params = SamplingParams(max_new_tokens=60, sampling_seed=1)
    steps.stop_at(10)
    futures = [engine.generate(str(i), [i] * 50, params) for i in range(4)]
    steps.wait()
    ready = staged(engine)
    update = engine.update("v2", 2)
    assert ready.wait(BOUND)
    steps.stop_at(11)
    steps.go()
    steps.wait()
    # One completion of about 55 tokens fits a budget of 64: it has its first token of the new version, the others wait.
    assert "first_token_s" in update.result(BOUND).timings
    assert len(engine.core.scheduler.running) == 1
    assert len(engine.core.scheduler.prefilling) == 3
    steps.go()
    for future in futures:
        [result] = future.result(BOUND)
        assert [version for version, _ in result.segments] in ([1, 2], [2])
        assert len(result.tokens) == 60


def test_without_interruption_running_finish_and_new_wait(start, steps):
    """Completions that run finish on the old weights, and new ones wait for the new weights."""
    engine = start(interruptible=False)
    running = held_after(engine, steps, 10)
    ready = staged(engine)
    update = engine.update("v2", 2)
    assert ready.wait(BOUND)
    waiting = engine.generate("b", [4, 5], SamplingParams(max_new_tokens=5))
    steps.go()
    assert running.result(BOUND)[0].segments == [(1, 100)]
    assert update.result(BOUND).success
    assert waiting.result(BOUND)[0].segments == [(2, 5)]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(WeightsError("v2 is truncated"), "v2 is truncated"), (RuntimeError("bad alloc"), "RuntimeError: bad alloc")],
)
def test_failed_update_keeps_the_old_weights_serving(start, steps, error, reason):
    def load(path, version, *, loaded=False):
        raise error

    engine = start(load)
    completion = held_after(engine, steps, 10)
    result = engine.update("v2", 2).result(BOUND)
    assert not result.success
    assert result.message == reason
    steps.go()
    assert completion.result(BOUND)[0].segments == [(1, 100)]


def test_update_to_another_architecture_is_refused(start, models):
    tensors = read_tensors(models / "new")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    engine = start(lambda path, version, loaded: Weights(tensors))
    result = engine.update("v2", 2).result(BOUND)
    assert not result.success
    assert "model.layers.1.mlp.up_proj.weight is missing" in result.message
    assert engine.info().weight_version == "1"


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_keeps_requests_and_they_go_on_unchanged(start, steps, models, mode):
    [[undisturbed]] = run(make_core(models / "old"), make_request("a", [1, 2, 3], seed=1, max_new_tokens=100))
    engine = start()
    completion = held_after(engine, steps, 10)
    pause = engine.pause(mode)
    steps.go()
    pause.result(BOUND)
    assert steps.count == 10
    assert engine.info().paused
    late = engine.generate("b", [7], SamplingParams(max_new_tokens=3))
    engine.abort("no such request").result(BOUND)  # the engine still takes commands
    assert steps.count == 10
    assert not completion.done() and not late.done()
    engine.resume().result(BOUND)
    assert completion.result(BOUND)[0].tokens.tolist() == undisturbed.tokens.tolist()
    assert len(late.result(BOUND)[0].tokens) == 3


def test_update_while_paused_takes_effect_at_resume(start, steps):
    engine = start()
    completion = held_after(engine, steps, 10)
    pause = engine.pause("in_place")
    steps.go()
    pause.result(BOUND)
    assert engine.update("v2", 2).result(BOUND).success
    assert steps.count == 10
    engine.resume().result(BOUND)
    assert completion.result(BOUND)[0].segments == [(1, 10), (2, 90)]


def test_sleep_releases_memory_and_changes_no_token(start, steps, models):
    """The cache has 128 MiB. The weights before and after are the same, and are staged as unchanged."""
    [[undisturbed]] = run(make_core(models / "old"), make_request("a", [1, 2, 3], seed=1, max_new_tokens=100))

    def load(path, version, *, loaded=False):
        return Weights(read_tensors(models / "old"), unchanged=loaded)

    engine = start(load, cache_rows=2700)
    cache = engine.core._cache
    size = cache.keys.nbytes + cache.values.nbytes
    assert size > 100 << 20
    cache.keys.zero_(), cache.values.zero_()  # a page takes memory when it is first written
    assert engine.update("v1", 1).result(BOUND).success
    completion = held_after(engine, steps, 10)
    before, asleep = resident_bytes(), engine.sleep()
    steps.go()
    asleep.result(BOUND)
    assert before - resident_bytes() > size // 2
    assert (engine.version, engine.info().paused) == (-1, True)
    refused = engine.update("v1", 1).result(BOUND)
    assert not refused.success and "wake it first" in refused.message
    engine.wake().result(BOUND)
    assert steps.count == 10 and engine.info().paused and not completion.done()
    assert engine.update("v1", 1).result(BOUND).success
    [result] = completion.result(BOUND)
    assert result.tokens.tolist() == undisturbed.tokens.tolist() and result.segments == [(1, 100)]
    assert np.abs(result.logprobs - undisturbed.logprobs).max() < 1e-4


def test_version_staged_as_unchanged_before_the_sleep_is_refused(start, models):
    """Its weights are gone. The next one is read whole."""
    entered, gate = threading.Event(), threading.Event()

    def load(path, version, *, loaded=False):
        if path == "late":
            entered.set()
            assert gate.wait(BOUND)
        return Weights(read_tensors(models / "old"), unchanged=loaded)

    engine = start(load)
    assert engine.update("v1", 1).result(BOUND).success
    late = engine.update("late", 2)
    assert entered.wait(BOUND)
    engine.sleep().result(BOUND)
    engine.wake().result(BOUND)
    gate.set()
    refused = late.result(BOUND)
    assert not refused.success and "has slept" in refused.message
    assert engine.update("v2", 2).result(BOUND).success
    assert engine.generate("a", [1, 2, 3], LONG).result(BOUND)[0].segments == [(2, 100)]


def test_without_interruption_running_finish_before_the_sleep(start, steps):
    engine = start(interruptible=False)
    running = held_after(engine, steps, 10)
    asleep, late = engine.sleep(), engine.generate("b", [7], SamplingParams(max_new_tokens=3))
    steps.go()
    asleep.result(BOUND)
    assert len(running.result(BOUND)[0].tokens) == 100 and not late.done()
    engine.wake().result(BOUND)
    assert engine.update("v2", 2).result(BOUND).success
    assert late.result(BOUND)[0].segments == [(2, 3)]


def test_pause_abort_returns_partial_completions(start, steps):
    engine = start()
    completion = held_after(engine, steps, 10, SamplingParams(max_new_tokens=100, n=5))
    pause = engine.pause("abort")
    steps.go()
    pause.result(BOUND)
    results = completion.result(BOUND)
    assert [len(r.tokens) for r in results] == [10, 10, 10, 10, 0]
    assert {r.finish_reason for r in results} == {"abort"}


def test_update_with_abort_all(start, steps):
    engine = start()
    completion = held_after(engine, steps, 10)
    ready = staged(engine)
    update = engine.update("v2", 2, abort_all=True)
    assert ready.wait(BOUND)
    steps.go()
    assert update.result(BOUND).success
    [result] = completion.result(BOUND)
    assert (result.finish_reason, result.segments) == ("abort", [(1, 10)])


def test_abort_of_one_request_leaves_the_others(start, steps):
    engine = start()
    first = held_after(engine, steps, 10)
    other = engine.generate("b", [4], SamplingParams(max_new_tokens=4))
    aborted = engine.abort("a")
    steps.go()
    assert aborted.result(BOUND)
    assert len(first.result(BOUND)[0].tokens) == 10
    assert other.result(BOUND)[0].finish_reason == "length"


def test_full_queue_fails_future_with_retryable_error(start, steps):
    engine = start()
    held_after(engine, steps, 1, SamplingParams(max_new_tokens=50, n=4))
    accepted = engine.generate("b", [1], SamplingParams(max_new_tokens=1, n=8))
    refused = engine.generate("c", [1], SamplingParams(max_new_tokens=1))
    steps.go()
    with pytest.raises(GenerationError, match="queue full") as error:
        refused.result(BOUND)
    assert error.value.retryable
    assert len(accepted.result(BOUND)) == 8


def test_close_fails_open_requests_and_refuses_new_ones(start, steps):
    engine = start()
    completion = held_after(engine, steps, 3)
    update_never_staged = threading.Thread(target=engine.close, args=(BOUND,))
    update_never_staged.start()
    steps.go()
    update_never_staged.join(BOUND)
    with pytest.raises(GenerationError, match="stopping") as error:
        completion.result(BOUND)
    assert error.value.retryable
    with pytest.raises(GenerationError, match="stopping"):
        engine.generate("b", [1], LONG)
    assert engine.failure == "the server is stopping"


def test_engine_thread_error_reaches_hook_and_every_caller(start, steps, monkeypatch):
    seen = threading.Event()
    caught = []
    monkeypatch.setattr(threading, "excepthook", lambda args: (caught.append(args.exc_value), seen.set()))
    engine = start()
    completion = held_after(engine, steps, 3)
    engine.core._model = None  # the next step fails
    steps.go()
    with pytest.raises(GenerationError, match="the engine failed: AttributeError"):
        completion.result(BOUND)
    assert seen.wait(BOUND)
    assert isinstance(caught[0], AttributeError)
    with pytest.raises(GenerationError, match="the engine failed"):
        engine.generate("b", [1], LONG)


def test_requests_without_a_seed_differ(start):
    engine = start()
    params = SamplingParams(max_new_tokens=20)
    futures = [engine.generate(rid, [1, 2], params) for rid in ("", "")]
    first, second = (future.result(BOUND)[0].tokens.tolist() for future in futures)
    assert first != second


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [
        ([], {}, "input_ids is empty"),
        ([1, 97], {}, "token 97, but the vocabulary has 97"),
        ([-1], {}, "token -1"),
        ([1] * 100, {"max_new_tokens": 29}, "input_ids of 100 tokens and max_new_tokens=29 exceed the context of 128"),
        ([1], {"stop_token_ids": (200,)}, "stop_token_ids contains 200"),
        ([1], {"n": 13}, "n=13 is more than this server"),
        ([1], {"min_new_tokens": 1, "stop_token_ids": tuple(range(97))}, "every token"),
        ([1], {"top_p": 1.5}, "top_p=1.5"),
        ([1], {"stop": ("x",)}, r"stop=\['x'\] needs a tokenizer.json"),
        ([1], {"structural_tag": "{}"}, "structural_tag: this engine has no grammars"),
        ([1, 2], {"answer_prefix": 2}, "answer_prefix=2 leaves no prompt in 2 tokens"),
    ],
)
def test_bad_requests_are_refused_with_one_line(start, ids, params, message):
    engine = start()
    with pytest.raises(GenerationError, match=message) as error:
        engine.generate("a", ids, SamplingParams(**{"max_new_tokens": 4, **params}))
    assert not error.value.retryable
    assert "\n" not in str(error.value)
