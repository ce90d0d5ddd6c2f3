"""smolagents: a ToolCallingAgent with a short prompt.

    make agents-env
    PYTHONPATH=docs/examples/agents realsys run experiment=arith_agents rollout.agent=smolagents_tools:run \
        rollout.agent_python=.venv-agents/bin/python rollout.agent_limits.max_tokens=2048

It ends with the tool final_answer.
"""

import openai  # noqa: F401  smolagents imports it late: for 1.4 s in each episode, if it were not here
from smolagents import EMPTY_PROMPT_TEMPLATES, OpenAIModel, ToolCallingAgent, tool
from smolagents.monitoring import LogLevel


@tool
def calculator(expression: str) -> str:
    """Add numbers.

    Args:
        expression: numbers with plus signs between them
    """
    return str(sum(int(number) for number in expression.split("+")))


def run(data, base_url, api_key, http_client):
    agent = ToolCallingAgent(
        [calculator],
        OpenAIModel("policy", api_base=base_url, api_key=api_key),
        prompt_templates=EMPTY_PROMPT_TEMPLATES | {"system_prompt": "Use tools."},
        max_steps=2,
        verbosity_level=LogLevel.OFF,
    )
    return str(agent.run(data["prompt"])) == data["answer"]
