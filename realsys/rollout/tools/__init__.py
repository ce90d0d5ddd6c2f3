"""The tools of the agent ``tool_use``. Contract: ``base.py``; names: ``realsys.config.doors``."""

from __future__ import annotations

from collections.abc import Sequence

from realsys.config.doors import TOOL
from realsys.errors import ConfigError
from realsys.rollout.tools.base import Tool


def build(names: Sequence[str]) -> dict[str, Tool]:
    """Build the tools that ``rollout.agent_args.tools`` names; the model calls them by the names of their descriptions.

    Raises ConfigError, also for a tool that cannot work on this machine.
    """
    if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            TOOL.field, names, f"must be a list of tools: {', '.join(TOOL.builtin)}, or package.module:Class"
        )
    tools: dict[str, Tool] = {}
    for name in names:
        loaded = TOOL.load(name)
        with TOOL.guard(name, "cannot be built"):
            tool: Tool = loaded()
        if tool.description["function"]["name"] in tools:
            raise ConfigError(TOOL.field, names, f"{name} has the name of another tool: name each tool once")
        tools[tool.description["function"]["name"]] = tool
    return tools
