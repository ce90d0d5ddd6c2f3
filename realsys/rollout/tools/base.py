"""The contract of a tool that the model calls in the agent ``tool_use``."""

from __future__ import annotations

from typing import Any, Protocol


class ToolError(Exception):
    """The call is wrong. Its message is the result that the model reads."""


class Tool(Protocol):
    """A tool. One object per RolloutWorker serves many episodes. A class without constructor arguments.

    A tool with places for few calls may have ``async ready()``, which waits until one is free. ``call`` follows without
    a pause in between. The wait takes no time from the episode.
    """

    description: dict[str, Any]  # form of OpenAI's API: type, function (name, description, parameters)

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Return the result as the model reads it. ``arguments`` are the model's: any JSON object.

        Raises ToolError; any other exception fails the episode. The call is cancelled after ``timeout_s``.
        """
        ...

    def close(self) -> None:
        """End the processes and threads of the tool."""
        ...


def describe(name: str, text: str, **parameters: str) -> dict[str, Any]:
    """Return the description of a tool whose ``parameters`` (name -> meaning) are all required texts."""
    properties = {name: {"type": "string", "description": meaning} for name, meaning in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}


def text_argument(arguments: dict[str, Any], name: str) -> str:
    """Return a text argument. Raises ToolError if the model did not give it."""
    value = arguments.get(name)
    if not isinstance(value, str):
        raise ToolError(f"error: the argument {name} must be a text")
    return value
