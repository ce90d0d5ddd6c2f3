"""A reply of an endpoint is a complete verdict, or trouble that says whether another request may help."""

from __future__ import annotations

import json

import pytest

from realsys.cluster.http_client import CallFailed
from realsys.reward.llm_judge import Trouble, read_reply, trouble_of
from realsys.reward.rubric import Criterion

CRITERIA = [Criterion(name="style"), Criterion(name="truth", low=-1.0, high=1.0)]
GOOD = '{"reasoning": "fine", "scores": {"style": 7, "truth": -0.5}}'


def body(text, finish_reason="stop", **message):
    choice = {"message": {"role": "assistant", "content": text, **message}, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice], "usage": {"total_tokens": 42}}).encode()


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"  {GOOD}\n",
        f"```json\n{GOOD}\n```",
        f"The text is fine.\n\n```\n{GOOD}\n```\n",
        f'<think>{{"scores": {{}}}}</think>\n{GOOD}',
        GOOD.replace('"reasoning": "fine", ', ""),
    ],
)
def test_verdict_is_read(text):
    reply = read_reply(body(text), CRITERIA)
    assert reply.scores == {"style": 7.0, "truth": -0.5} and reply.tokens == 42


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (body("8/10"), "no object scores|no JSON"),
        (body(""), "no JSON: \\(empty\\)"),
        (body(None), "no JSON"),
        (body(GOOD[:-1]), "no JSON"),
        (body(f"{GOOD} {GOOD}"), "no JSON"),
        (body(f"```\n{GOOD}\n``` and so on"), "no JSON"),
        (body("[1, 2]"), "no object scores"),
        (body('{"scores": [7, 0]}'), "no object scores"),
        (body('{"style": 7, "truth": 0}'), "no object scores"),
        (body('{"scores": {"style": 7}}'), "lacks a score for truth"),
        (body('{"scores": {"style": 7, "truth": 0, "wit": 3}}'), "no criterion: wit"),
        (body('{"scores": {"style": "7", "truth": 0}}'), "score of style is 7: it must be a number"),
        (body('{"scores": {"style": true, "truth": 0}}'), "must be a number"),
        (body('{"scores": {"style": null, "truth": 0}}'), "must be a number"),
        (body('{"scores": {"style": NaN, "truth": 0}}'), "no JSON"),
        (body('{"scores": {"style": 1e999, "truth": 0}}'), "no JSON|must be from 0 to 10"),
        (body('{"scores": {"style": 10.01, "truth": 0}}'), "style is 10.01: it must be from 0 to 10"),
        (body('{"scores": {"style": 5, "truth": -1.5}}'), "truth is -1.5: it must be from -1 to 1"),
        # a reply that is not complete
        (body(GOOD, "length"), "cut off"),
        (body(GOOD, "content_filter"), "finish_reason content_filter"),
        (body(None, refusal="I will not"), "refused: I will not"),
        (b'{"choices": []}', "no choices"),
        (b'{"object": "list"}', "no chat completion"),
        (b"<html>", "no chat completion"),
        (b"\xff\xfe", "no chat completion"),
    ],
)
def test_malformed_verdict_is_trouble(raw, problem):
    with pytest.raises(Trouble, match=problem) as caught:
        read_reply(raw, CRITERIA)
    trouble = caught.value
    assert (trouble.cause, trouble.again, trouble.fatal, trouble.busy) == ("no_verdict", True, False, False)
    assert "\n" not in str(trouble)


@pytest.mark.parametrize(
    ("failed", "cause", "kind"),
    [
        (CallFailed("no answer within 3 s", timed_out=True), "elapsed", "again"),
        (CallFailed("connection failed: refused"), "endpoint", "busy"),
        (CallFailed("slow down", 429, retry_after_s=7.0), "endpoint", "busy"),
        (CallFailed("You exceeded your current quota, check your plan", 429), "endpoint", "fatal"),
        (CallFailed("overloaded", 503), "endpoint", "busy"),
        (CallFailed("a bug", 500), "endpoint", "again"),
        (CallFailed("too long", 400), "endpoint", "refused"),
        (CallFailed("wrong key", 401), "endpoint", "fatal"),
        (CallFailed("no such model", 404), "endpoint", "fatal"),
    ],
)
def test_failed_call_tells_what_may_help(failed, cause, kind):
    trouble = trouble_of(failed)
    assert trouble.cause == cause and trouble.wait_s == failed.retry_after_s
    flags = {"again": (True, False, False), "busy": (True, False, True), "refused": (False, False, False)}
    assert (trouble.again, trouble.fatal, trouble.busy) == flags.get(kind, (False, True, False))
