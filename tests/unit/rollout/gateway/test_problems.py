"""Errors of a call as statuses: OpenAI's SDK retries only those that a retry can mend."""

import pytest

from realsys.errors import AgentError, DataError, GenerationError, RewardError, ServerBusy
from realsys.manager.client import RolloutSuperseded
from realsys.rollout.gateway.dialect import BadRequest
from realsys.rollout.gateway.replies import problem_of

RETRIED = {408, 409, 429, *range(500, 600)}  # by OpenAI's SDKs, unless x-should-retry says no


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (BadRequest(413, "too large"), 413, False),
        (BadRequest(429, "slower"), 429, True),
        (DataError("no such role"), 400, False),
        (RolloutSuperseded("reissued"), 410, False),
        (AgentError("the episode has ended"), 410, False),
        (GenerationError("refused"), 424, False),
        (ServerBusy("full"), 503, True),
        (RewardError("odd"), 500, False),
        (KeyError("defect"), 500, False),
    ],
)
def test_status_tells_whether_a_retry_helps(error, status, retry):
    problem = problem_of(error)
    assert (problem.status, problem.retry) == (status, retry)
    assert str(error) in problem.message
    assert ((b"x-should-retry", b"true") in problem.headers()) is retry
    assert retry is (status in RETRIED) or (b"x-should-retry", b"false") in problem.headers()


@pytest.mark.parametrize("error", [GenerationError, ServerBusy, KeyError])
def test_address_of_an_engine_is_never_told(error):
    problem = problem_of(error("http://10.0.0.7:4000/generate: status 400: no, see https://h:1/x"))
    assert "a server: status 400: no, see a server" in problem.message and "10.0.0.7" not in problem.message
