"""The "off" of ``benchmarks.ledger_cost``: on PYTHONPATH of a run, it takes out what the benchmark measures.

    journal           nothing is written, nothing is synced
    leases            nothing lapses
    acknowledgements  a puller sends none, a pusher waits for none: a group is through once it is handed to the socket

For the benchmark only: a run like this loses groups when a process dies. Python imports it at the start of every
process; each patch is made right after its module has been executed, so that no process imports more than it would.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

#: Every patched process adds a line with the module's name; the benchmark checks that none is missing.
LOG = "REALSYS_WITHOUT_LEDGER"


def _no_journal(module: Any) -> None:
    module.Journal.append = lambda self, events: None
    module.Journal.sync = lambda self: None


def _no_leases(module: Any) -> None:
    module.Ledger.lose = lambda self, lost, cause, now: []


def _no_acknowledgement(module: Any) -> None:
    """Let the pusher not wait for acknowledgements, and the puller send refusals only."""
    send = module._Link._send

    def send_and_forget(self: Any, session: Any, sequence: int) -> None:
        send(self, session, sequence)
        stored = self._pending[sequence].stored
        if not stored.done():
            stored.set_result(None)

    module._Link._send = send_and_forget
    module.Slabs.release = lambda self, slab: None  # libzmq may still be sending from it
    acknowledge = module.Puller._acknowledge

    def only_refusals(self: Any, route: bytes, message: Any) -> None:
        if not isinstance(message, module.PushAck):
            acknowledge(self, route, message)

    module.Puller._acknowledge = only_refusals


PATCHES: dict[str, Callable[[Any], None]] = {
    "realsys.manager.ledger.journal": _no_journal,
    "realsys.manager.ledger.ledger": _no_leases,
    "realsys.cluster.stream.push_pull": _no_acknowledgement,
}


class _Patching(importlib.abc.Loader):
    """Execute the module with the original loader, then patch it."""

    def __init__(self, loader: importlib.abc.Loader, patch: Callable[[Any], None]) -> None:
        self._loader, self._patch = loader, patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)
        with Path(os.environ[LOG]).open("a") as log:
            log.write(f"{module.__name__}\n")


class _Finder(importlib.abc.MetaPathFinder):
    """First on ``sys.meta_path``: finds only the modules to patch, with the finders that follow."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = PATCHES.get(fullname)
        if patch is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Patching(spec.loader, patch)
        return spec


if LOG in os.environ:
    sys.meta_path.insert(0, _Finder())
