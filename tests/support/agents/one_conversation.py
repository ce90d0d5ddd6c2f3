"""One conversation with one tool, in a framework of .venv-agents: one_conversation.py FRAMEWORK BASE_URL API_KEY.

It runs in that interpreter, without realsys. It prints the final answer.
"""

import asyncio
import sys


def calculator(expression: str) -> str:
    """Compute.

    Args:
        expression: what to compute
    """
    return "5"


def openai_agents(base_url: str, api_key: str, api: str) -> object:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    kind = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[api]
    model = kind(model="policy", openai_client=AsyncOpenAI(base_url=base_url, api_key=api_key))
    agent = agents.Agent(name="a", instructions="Add.", tools=[agents.function_tool(calculator)], model=model)

    async def run() -> object:
        streamed = agents.Runner.run_streamed(agent, "2+3?")
        async for _ in streamed.stream_events():
            pass
        return streamed.final_output

    return asyncio.run(run())


def smolagents(base_url: str, api_key: str, kind: str) -> object:
    import smolagents as s

    model = s.OpenAIServerModel(model_id="policy", api_base=base_url, api_key=api_key)
    settings = {"model": model, "max_steps": 3, "verbosity_level": 0}
    agent = s.CodeAgent([], **settings) if kind == "code" else s.ToolCallingAgent([s.tool(calculator)], **settings)
    return agent.run("2+3?")


def langgraph(base_url: str, api_key: str, api: str) -> object:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, use_responses_api=api == "responses")
    graph = create_react_agent(model, [calculator], prompt="Add.")
    return graph.invoke({"messages": [("user", "2+3?")]})["messages"][-1].text


CONVERSATIONS = {
    "agents_chat": lambda *where: openai_agents(*where, "chat"),
    "agents_responses": lambda *where: openai_agents(*where, "responses"),
    "smolagents_tools": lambda *where: smolagents(*where, "tools"),
    "smolagents_code": lambda *where: smolagents(*where, "code"),
    "langgraph_chat": lambda *where: langgraph(*where, "chat"),
    "langgraph_responses": lambda *where: langgraph(*where, "responses"),
}

if __name__ == "__main__":
    print(CONVERSATIONS[sys.argv[1]](*sys.argv[2:]))
