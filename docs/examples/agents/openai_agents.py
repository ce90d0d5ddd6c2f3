"""The OpenAI Agents SDK: an agent with a function tool.

    make agents-env
    PYTHONPATH=docs/examples/agents realsys run experiment=arith_agents rollout.agent=openai_agents:run \
        rollout.agent_python=.venv-agents/bin/python

With rollout.agent_args.responses=false it speaks to /v1/chat/completions, else to /v1/responses.
"""

from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError


@function_tool
def calculator(expression: str) -> str:
    """Add numbers."""
    return str(sum(int(number) for number in expression.split("+")))


async def run(data, base_url, api_key, http_client, responses=True):
    provider = OpenAIProvider(base_url=base_url, api_key=api_key, use_responses=responses)
    agent = Agent(name="adder", instructions="Use tools.", tools=[calculator])
    settings = RunConfig(model="policy", model_provider=provider, tracing_disabled=True)
    try:
        result = await Runner.run(agent, data["prompt"], run_config=settings, max_turns=3)
    except (MaxTurnsExceeded, ModelBehaviorError):  # the model called no tool that exists, or did not stop
        return False
    return result.final_output == f"#{data['answer']}"
