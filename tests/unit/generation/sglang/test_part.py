"""A part of an SGLang server that spans nodes, with a small program in place of SGLang."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from realsys.cluster.process import INIT_ADDRESS, NODE_RANK, NODES
from realsys.errors import GenerationError
from realsys.generation.backend import ONE_NODE, NodeSpan, own_span
from realsys.generation.sglang.process import Launch, run_part

pytestmark = pytest.mark.processes

#: writes its arguments to a file, then ends
RECORDER = "import json, sys; open({path!r}, 'w').write(json.dumps(sys.argv[1:])); print('no GPU'); sys.exit({code})"
FOREVER = "import signal; open({path!r}, 'w').write('[]'); signal.pause()"


@dataclass(frozen=True)
class Recorded(Launch):
    """Starts a script with SGLang's arguments."""

    script: str = ""

    def command(self, port: int) -> list[str]:
        return [sys.executable, "-c", self.script, *super().command(port)[3:]]

    def environment(self, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        return dict(inherited)


def launch(script: str) -> Recorded:
    span = NodeSpan(1, 2, "10.0.0.5:25000")
    return Recorded("python", Path("/m"), "bfloat16", 64, 8, 0, 1, True, {"pp-size": 2}, span=span, script=script)


def never(callback: Callable[[], None]) -> None:
    pass


def test_part_gets_its_rank_and_the_meeting_point(tmp_path: Path) -> None:
    """Its end is an error with SGLang's last words: the launcher starts all parts again."""
    path = tmp_path / "arguments"
    with pytest.raises(GenerationError, match="SGLang exited with code 3; its last lines: no GPU"):
        asyncio.run(run_part(launch(RECORDER.format(path=str(path), code=3)), never))
    words = json.loads(path.read_text())
    given = {
        name: words[words.index(name) + 1] for name in ("--nnodes", "--node-rank", "--dist-init-addr", "--pp-size")
    }
    assert given == {"--nnodes": "2", "--node-rank": "1", "--dist-init-addr": "10.0.0.5:25000", "--pp-size": "2"}


def test_part_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    path = tmp_path / "started"
    os.mkfifo(path)

    async def body() -> None:
        stops: list[Callable[[], None]] = []
        part = asyncio.create_task(run_part(launch(FOREVER.format(path=str(path))), stops.append))
        async with asyncio.timeout(60.0):
            await asyncio.to_thread(path.read_text)  # waits for the program
        stops[0]()
        await part

    asyncio.run(body())


def test_span_comes_from_the_environment() -> None:
    assert own_span({}) == ONE_NODE
    assert own_span({NODE_RANK: "1", NODES: "2", INIT_ADDRESS: "h:1"}) == NodeSpan(1, 2, "h:1")
