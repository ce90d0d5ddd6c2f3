"""The loops of tinker-cookbook as they are, each in a process of its own that has nothing left to import."""

import asyncio
import importlib
import json
import multiprocessing
import os
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from tests.support.jobs.jobs import BOUND_S

RL, SL, ASYNC_RL = (f"tinker_cookbook.recipes.{name}" for name in ("rl_loop", "sl_loop", "math_rl.train"))
HUB = "tests.support.tinker.hub"


@dataclass(frozen=True)
class Ended:
    """A process that has ended. ``output``: all that it printed."""

    folder: Path
    exitcode: int | None
    output: str

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the records of a file of JSON lines that a loop writes."""
        return [json.loads(line) for line in (self.folder / name).read_text("utf-8").splitlines()]

    def completed(self) -> "Ended":
        assert self.exitcode == 0, self.output[-6000:]
        return self


class Runner:
    """Starts processes from one that has imported the loops. All have the environment of the first start."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([HUB, RL, SL, ASYNC_RL])
        forkserver.ensure_running()  # it imports while the caller goes on

    def run(self, module: str, folder: Path, bound_s: float = BOUND_S, **settings: Any) -> Ended:
        """Run the loop of ``module``, or write the hub, and wait for the end."""
        output = folder.with_name(f"{folder.name}.txt")
        process = self._context.Process(
            daemon=True, target=_run, args=(module, settings, output, os.environ.get("TINKER_API_KEY", ""))
        )
        process.start()
        process.join(bound_s)
        if process.exitcode is None:
            process.kill()
            process.join()
        return Ended(folder, process.exitcode, output.read_text("utf-8", "replace"))


def _run(module: str, settings: dict[str, Any], output: Path, key: str) -> None:
    os.environ["TINKER_API_KEY"] = key
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    loaded = importlib.import_module(module)
    if module == HUB:
        loaded.write(**settings)
    elif module == ASYNC_RL:
        asyncio.run(loaded.cli_main(loaded.CLIConfig(**settings)))
    else:
        loaded.main(loaded.Config(**settings))
