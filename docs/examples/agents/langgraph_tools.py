"""LangGraph: a graph in which the model calls a tool until it answers.

    make agents-env
    PYTHONPATH=docs/examples/agents realsys run experiment=arith_agents rollout.agent=langgraph_tools:run \
        rollout.agent_python=.venv-agents/bin/python

One node asks the model, the other one calls the tools.
"""

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def calculator(expression: str) -> str:
    """Add numbers."""
    return str(sum(int(number) for number in expression.split("+")))


async def run(data, base_url, api_key, http_client):
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key).bind_tools([calculator])

    async def answer(state):
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", answer)
    graph.add_node("tools", ToolNode([calculator], handle_tool_errors="bad expression"))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    start = {"messages": [SystemMessage("Use tools."), HumanMessage(data["prompt"])]}
    try:
        state = await graph.compile().ainvoke(start, {"recursion_limit": 6})
    except GraphRecursionError:  # the model did not stop to call tools
        return False
    return state["messages"][-1].content == f"#{data['answer']}"
