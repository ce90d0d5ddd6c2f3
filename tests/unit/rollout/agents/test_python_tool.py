"""The tool python: a thread is free when its program has ended, not when the call was cancelled."""

import asyncio
import threading

import pytest

from realsys.reward.sandbox.settings import Output, RunEnded
from realsys.rollout.agents import tool_use


class Held:
    """A sandbox whose programs run until ``go``."""

    go = threading.Event()

    def run(self, code, stdin, limits):
        self.go.wait(limits.wall_s)
        return Output(RunEnded(0), code.encode(), b"")

    def close(self):
        pass


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.setattr(tool_use, "Sandbox", Held)
    monkeypatch.setattr(tool_use.shutil, "which", lambda _: "/usr/bin/bwrap")
    monkeypatch.setattr(tool_use.os, "cpu_count", lambda: 2)
    Held.go = threading.Event()
    tool = tool_use.Python()
    yield tool
    Held.go.set()
    tool.close()


def test_cancelled_call_holds_its_thread(tool):
    async def scenario():
        calls = [asyncio.ensure_future(tool.call({"code": name}, 30.0)) for name in "ab"]
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        ready = asyncio.ensure_future(tool.ready())
        done, _ = await asyncio.wait([*calls, ready], return_when=asyncio.FIRST_COMPLETED)
        assert ready not in done
        Held.go.set()
        await asyncio.wait_for(ready, 30.0)
        return await tool.call({"code": "c"}, 30.0)

    assert asyncio.run(scenario()) == "c"
