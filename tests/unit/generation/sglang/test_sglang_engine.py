"""The engine over SGLang, with a program in its place that answers like it: answers, versions, updates, pauses."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from realsys.errors import GenerationError, WeightsError
from realsys.generation.backend import Materialised
from realsys.generation.child.requests import EVENT_TOKENS
from realsys.generation.child.update import check_shapes
from realsys.generation.protocol import SamplingParams
from tests.support.serving.sglang_engines import SHAPES, STALLING, WAIT_S, Engines, engines, generate

pytestmark = pytest.mark.processes


@pytest.fixture
def make() -> Iterator[Engines]:
    with engines() as made:
        yield made


def test_answers_come_back_and_output_is_passed_on(make, caplog):
    with caplog.at_level(logging.INFO, logger="sglang"):
        engine, _ = make()
        [one, two] = generate(engine, [5], n=2).result(WAIT_S)
    assert one.tokens.tolist() == two.tokens.tolist() == [6, 7, 8, 9]
    assert np.allclose(one.logprobs, -1.0)
    assert (one.segments, one.finish_reason) == ([(-1, 4)], "length")
    lines = [record.getMessage() for record in caplog.records if record.name == "sglang"]
    assert lines[0].startswith("serving on ")
    assert lines[1].startswith("helper ")


def test_versions_are_derived_where_they_are_not_reported(make):
    """Half of the answer is of the first weights; it is returned for the update, and continues from there."""
    engine, _ = make()
    running = engine.generate("a", [5], STALLING)
    result = engine.update("/weights/v7", 7).result(WAIT_S)
    assert result.success
    assert {"stage_s", "verify_s", "drain_s", "pause_s", "load_s", "first_token_s"} <= result.timings.keys()
    [answer] = running.result(WAIT_S)
    assert answer.tokens.tolist() == list(range(6, 16))
    assert answer.segments == [(-1, 5), (7, 5)]
    assert np.allclose(answer.logprobs, [-1.0] * 5 + [-1.07] * 5)
    assert answer.finish_reason == "length"


class Senders:
    """Of the ranks that have a version."""

    shapes = SHAPES

    async def order(self, receivers, *, everything):
        return {"senders": []}


def test_engine_without_update_sessions_keeps_its_weights(make):
    engine, changes = make()
    engine._updater._materialise = lambda *_, **__: Materialised(None, {}, senders=Senders())
    result = engine.update("/weights/v7", 7).result(WAIT_S)
    assert not result.success and "has no update sessions: install a newer one, or set weights" in result.message
    assert engine.version == -1 and changes.empty()
    assert generate(engine, [5]).result(WAIT_S)[0].tokens.tolist() == [6, 7, 8, 9]


def test_tokens_are_shown_before_they_return(make):
    """Those since the last event are not: fewer than EVENT_TOKENS."""
    engine, _ = make()
    running = engine.generate("a", [5], SamplingParams(max_new_tokens=62, temperature=0.5))  # stalls after 31 tokens
    shown = engine.snapshot("a", EVENT_TOKENS).result(WAIT_S)
    assert shown.completions[0].tokens.tolist() == list(range(6, 6 + EVENT_TOKENS + 1)) and shown.running == {0}
    assert engine.info().result(WAIT_S).generated_tokens == EVENT_TOKENS + 1 and not running.done()
    assert engine.abort("a").result(WAIT_S)
    assert len(running.result(WAIT_S)[0].tokens) == engine.info().result(WAIT_S).generated_tokens == 31


def test_tokens_of_a_piece_are_shown_when_it_returns(make):
    engine, _ = make()
    running = engine.generate("a", [5], STALLING)
    first = engine.snapshot("a", 4)
    engine.pause("retract").result(WAIT_S)
    assert first.result(WAIT_S).completions[0].tokens.tolist() == list(range(6, 11))
    rest = engine.snapshot("a", 10)  # more than it will have: the end of the request answers
    assert engine.update("/weights/v7", 7).result(WAIT_S).success and not rest.done()
    engine.resume().result(WAIT_S)
    assert len(running.result(WAIT_S)[0].tokens) == 10 and rest.result(WAIT_S) is None


@pytest.mark.parametrize("flags", [(), ("--reports",)])
def test_stream_shows_tokens_before_its_piece_returns(make, flags):
    """Each token once, with its own version, across an update that interrupts the stream."""
    engine, _ = make(*flags)
    running = engine.generate("a", [5], STALLING, stream=True)
    first = engine.snapshot("a", 0).result(WAIT_S)
    assert first.completions[0].tokens.tolist() == list(range(6, 6 + first.tokens)) and first.running == {0}
    shown = engine.snapshot("a", 4).result(WAIT_S).completions[0]
    assert (shown.tokens.tolist(), shown.segments) == (list(range(6, 11)), [(-1, 5)])
    assert np.allclose(shown.logprobs, -1.0) and not running.done()
    assert engine.update("/weights/v7", 7).result(WAIT_S).success
    [answer] = running.result(WAIT_S)
    assert (answer.tokens.tolist(), answer.segments) == (list(range(6, 16)), [(-1, 5), (7, 5)])
    assert np.allclose(answer.logprobs, [-1.0] * 5 + [-1.07] * 5)


def test_stream_is_returned_by_a_pause_and_ends_with_an_abort(make):
    engine, _ = make("--reports")
    running = engine.generate("a", [5], STALLING, stream=True)
    engine.snapshot("a", 4).result(WAIT_S)
    engine.pause("in_place").result(WAIT_S)
    assert engine.snapshot("a").result(WAIT_S).tokens == 5 and engine.info().result(WAIT_S).queued == 1
    assert engine.abort("a").result(WAIT_S)
    [answer] = running.result(WAIT_S)
    assert (answer.tokens.tolist(), answer.finish_reason) == (list(range(6, 11)), "abort")


def test_pause_returns_requests_and_resume_continues(make):
    engine, _ = make()
    running = engine.generate("a", [5], STALLING)
    engine.pause("retract").result(WAIT_S)
    info = engine.info().result(WAIT_S)
    assert (info.paused, info.running, info.queued) == (True, 0, 1)
    assert info.memory_bytes > 1 << 20
    assert engine.update("/weights/v7", 7).result(WAIT_S).success
    assert not running.done()
    engine.resume().result(WAIT_S)
    [answer] = running.result(WAIT_S)
    assert answer.segments == [(-1, 5), (7, 5)]


def test_pause_does_not_wait_for_first_token(make):
    engine, _ = make()
    running = engine.generate("a", [5], STALLING)
    update = engine.update("/weights/v13", 13)
    while engine._updater._probe is None:
        assert not update.done()
    engine.pause("in_place").result(WAIT_S)
    result = update.result(WAIT_S)
    assert result.success and "first_token_s" not in result.timings
    engine.resume().result(WAIT_S)
    assert running.result(WAIT_S)[0].segments == [(-1, 5), (13, 5)]


def test_reported_versions_are_used(make):
    engine, _ = make("--reports")
    update = engine.update("/weights/v7", 7).result(WAIT_S)
    assert update.success and "first_token_s" not in update.timings  # no completion was open
    [answer] = generate(engine, [5]).result(WAIT_S)
    assert answer.segments == [(7, 4)]


@pytest.mark.parametrize("flags", [(), ("--reports",)])
def test_same_weights_are_renumbered_not_loaded(make, caplog, flags):
    """The second update is only a number. The first one of a new SGLang is loaded."""
    with caplog.at_level(logging.INFO, logger="sglang"):
        engine, _ = make(*flags)
        assert engine.update("/weights/same", 7).result(WAIT_S).success
        running = generate(engine, [5])
        same = engine.update("/weights/same", 8).result(WAIT_S)
        assert same.success and "pause_s" not in same.timings
        running.result(WAIT_S)
        [after] = generate(engine, [5]).result(WAIT_S)
    assert (engine.version, engine.model_path, after.segments) == (8, "/weights/same", [(8, 4)])
    assert engine.info().result(WAIT_S).updates == 2
    assert caplog.text.count("load ") == 1


def test_same_weights_after_a_refusal_are_loaded(make):
    engine, _ = make()
    assert engine.update("/weights/v7", 7).result(WAIT_S).success
    assert not engine.update("/weights/partial", 8).result(WAIT_S).success
    assert "pause_s" in engine.update("/weights/same", 9).result(WAIT_S).timings


@pytest.mark.parametrize("flags", [(), ("--reports",)])
def test_sleep_holds_requests_until_weights_are_loaded(make, flags):
    engine, _ = make(*flags)
    running = engine.generate("a", [5], STALLING)
    engine.snapshot("a", 0).result(WAIT_S)
    assert engine.info().result(WAIT_S).kv_tokens == 6
    engine.sleep().result(WAIT_S)
    engine.sleep().result(WAIT_S)
    info = engine.info().result(WAIT_S)
    assert (info.paused, info.running, info.queued, info.kv_tokens, engine.version) == (True, 0, 1, 0, -1)
    engine.resume().result(WAIT_S)
    refused = engine.update("/weights/v7", 7).result(WAIT_S)
    assert not refused.success and "wake it first" in refused.message
    engine.wake().result(WAIT_S)
    assert engine.info().result(WAIT_S).paused and not running.done()
    assert engine.update("/weights/v7", 7).result(WAIT_S).success
    [answer] = running.result(WAIT_S)
    assert (answer.tokens.tolist(), answer.segments) == (list(range(6, 16)), [(-1, 5), (7, 5)])
    assert not engine.info().result(WAIT_S).paused


def test_weights_of_before_the_sleep_are_loaded_again(make, caplog):
    with caplog.at_level(logging.INFO, logger="sglang"):
        engine, _ = make()
        assert engine.update("/weights/same", 7).result(WAIT_S).success
        engine.sleep().result(WAIT_S)
        engine.wake().result(WAIT_S)
        assert "pause_s" in engine.update("/weights/same", 7).result(WAIT_S).timings
    assert re.findall("released|resumed|load 7", caplog.text) == ["load 7", "released", "resumed", "load 7"]


def test_sleep_waits_for_running_answers_in_an_engine_that_drains(make):
    engine, _ = make(drain=True)
    running = engine.generate("a", [5], STALLING)
    engine.snapshot("a", 0).result(WAIT_S)
    asleep = engine.sleep()
    assert not engine.info().result(WAIT_S).paused
    assert engine.abort("a").result(WAIT_S)
    asleep.result(WAIT_S)
    assert len(running.result(WAIT_S)[0].tokens) == 5


def test_load_waits_until_no_request_is_at_work(make):
    """SGLang sends the last answer a moment before its batch is over, and dies if weights are loaded in that moment."""
    engine, _ = make("--lingers")
    generate(engine, [5]).result(WAIT_S)
    result = engine.update("/weights/v7", 7).result(WAIT_S)
    assert result.success, result.message


def test_drain_waits_for_running_answers(make):
    engine, _ = make(drain=True)
    running = engine.generate("a", [5], STALLING)
    update = engine.update("/weights/v7", 7)
    assert engine.abort("a").result(WAIT_S)
    [answer] = running.result(WAIT_S)
    assert (answer.segments, answer.finish_reason) == ([(-1, 5)], "abort")
    assert update.result(WAIT_S).success


def test_abort_ends_with_what_there_is(make):
    engine, _ = make()
    running = engine.generate("a", [5], STALLING)
    assert engine.abort("a").result(WAIT_S)
    [answer] = running.result(WAIT_S)
    assert (answer.tokens.tolist(), answer.finish_reason) == ([6, 7, 8, 9, 10], "abort")
    assert not engine.abort("a").result(WAIT_S)


@pytest.mark.parametrize(
    ("path", "message"),
    [("/weights/corrupt", "is corrupt"), ("/weights/partial", r"tensor b has shape missing.*has \(4,\)")],
)
def test_wrong_version_is_refused_before_it_is_loaded(make, path, message):
    engine, _ = make()
    result = engine.update(path, 7).result(WAIT_S)
    assert not result.success
    assert re.search(message, result.message)
    assert engine.version == -1
    assert list(engine._traffic.run.scratch.glob("v*")) == []  # nothing that was staged
    [answer] = generate(engine, [5]).result(WAIT_S)
    assert answer.segments == [(-1, 4)]


def test_full_queue_is_refused_as_retryable(make):
    engine, _ = make()
    engine.pause("in_place").result(WAIT_S)
    held = generate(engine, [5], n=8)
    with pytest.raises(GenerationError, match="queue full: 8 completions are open") as refused:
        generate(engine, [5]).result(WAIT_S)
    assert refused.value.retryable
    engine.resume().result(WAIT_S)
    assert len(held.result(WAIT_S)) == 8


def test_two_requests_cannot_share_an_id(make):
    engine, _ = make()
    engine.pause("in_place").result(WAIT_S)
    held = generate(engine, [5], rid="a")
    with pytest.raises(GenerationError, match="rid='a' is the id of a request in progress"):
        generate(engine, [6], rid="a").result(WAIT_S)
    engine.resume().result(WAIT_S)
    assert held.result(WAIT_S)[0].tokens.tolist() == [6, 7, 8, 9]


def test_shapes_are_compared_by_name(tmp_path):
    save_file({"a": torch.zeros(3, 2), "b": torch.zeros(4), "c": torch.zeros(1)}, tmp_path / "m.safetensors")
    with pytest.raises(WeightsError, match=r"tensor a has shape \(3, 2\), the served model has \(2, 3\); 2 "):
        check_shapes(tmp_path, SHAPES)
    for damaged in (b"\xff" * 4, b"\xff" * 16, bytes([2]) + bytes(7) + b"[]", bytes([3]) + bytes(7) + b"[[["):
        (tmp_path / "m.safetensors").write_bytes(damaged)
        with pytest.raises(WeightsError, match="not a safetensors file"):
            check_shapes(tmp_path, SHAPES)
