"""Options of the agent verifiers, which the launcher checks before anything starts."""

import pytest

from realsys.config.compose import compose
from realsys.errors import ConfigError
from realsys.rollout.agents.verifiers import VerifiersAgent


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("workers", 0, "from 1 to 64"),
        ("client", "other", "one of chat, tokens"),
        ("renderer", {"name": "qwen3"}, "needs client: tokens"),
        ("start_timeout_s", 0, "greater than 0"),
        ("env_python", "/absent", "not found"),
    ],
)
def test_option_out_of_bounds_is_refused(option, value, problem):
    with pytest.raises(ConfigError, match=rf"rollout\.agent_args\.{option}=.*{problem}"):
        VerifiersAgent.check(compose(["experiment=arith_chat"]), None, **{option: value})
