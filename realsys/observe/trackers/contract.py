"""The contract of a tracker: a class that gets the metrics of a run, one point of its step log at a time.

    step log ──> Point(kind, step, metrics) ──log──> your tracker        'telemetry.trackers=[file,my_module:MyTracker]'

    class MyTracker(Tracker):
        def log(self, point):
            print(point.step, point.metrics["train/reward_mean"])

Trackers run in one process for all, each in a thread, which calls one method after the other. So a
tracker may block, fail or hang, and the run does not notice. After an exception the launcher warns, and the tracker
is made again a few times. The points that it missed are delivered then, or at the next start of the trial.

The entries of ``telemetry.tracker_args`` for its name are keyword arguments of the constructor. The constructor may
connect to a service; the module must be importable without the package that it names in ``package``.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Run:
    """The trial that a tracker follows.

    folder     folder of the trial
    config     its configuration, as nested plain values
    version    version of realsys
    delivered  kind -> greatest step of the points that this tracker got at earlier starts; {} at the first one
    state      values that the tracker may change; each ``flush`` saves them, and the next start has them. They are
               saved after the constructor, too, even if it fails
    """

    experiment: str
    trial: str
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""
    delivered: Mapping[str, int] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Point:
    """The metrics of one record of the step log.

    kind     train, eval or warmup
    step     train step, version of the evaluated weights, or step of the warm-up
    time     unix seconds
    index    number of the point in the step log, from 0; grows also where a roll-back sets ``step`` back
    metrics  name (``train/reward_mean``, ``eval/{set}/accuracy``, ``warmup/loss``) -> number
    """

    kind: str
    step: int
    time: float
    index: int
    metrics: Mapping[str, float]


class Tracker(ABC):
    """A receiver of metrics. Its methods may block.

    package  package that it needs; "" for none. Without it a run does not start
    install  what pip must install then, e.g. ``realsys[wandb]``; "": the package
    """

    package: ClassVar[str] = ""
    install: ClassVar[str] = ""

    @classmethod
    def problem(cls, arguments: Mapping[str, Any]) -> str:
        """Return why the tracker cannot work with these ``arguments`` on this machine; "" if it can.

        Called before anything starts, so it must be quick: without the network, and without an import of ``package``.
        """
        return ""

    def __init__(self, run: Run) -> None:
        """A tracker that got points before (``run.delivered``) continues its curves."""
        self.run = run

    @abstractmethod
    def log(self, point: Point) -> None:
        """Take one point. Steps of a kind ascend, except after ``roll_back``."""

    def roll_back(self, step: int) -> None:
        """Training continues after ``step``: points of train steps and evaluations after it are repeated.

        ``step`` is -1 if training begins again; then the warm-up is repeated, too.
        """
        return

    def flush(self) -> None:
        """Hand over the points that were logged. The trial then notes that they are delivered.

        If the launcher is killed before that, the points since the last flush are delivered again at the next start.
        """
        return

    def close(self, status: str) -> None:
        """End. ``status``: done, failed or interrupted; "" if the launcher was killed. Called once."""
        return


# ---- reads which arguments a function of a library takes from its source: an import of the library takes seconds


def argument_problem(library: str, file: str, arguments: Iterable[str], own: Sequence[str]) -> str:
    """Return which of ``arguments`` the function ``init`` of a library does not take, or the tracker sets itself.

    ``file``: source of ``init`` in the library's folder. ``own``: arguments that the tracker sets. "" if all are good,
    or if the source has no such function.
    """
    if taken := [name for name in arguments if name in own]:
        return f"has no argument {taken[0]!r}: it belongs to the trial, remove it"
    known = _arguments_of_init(library, file)
    if known and (unknown := [name for name in arguments if name not in known]):
        good = sorted(set(known) - {*own})
        return f"has no argument {unknown[0]!r}: {library}.init takes {', '.join(good)}"
    return ""


def _arguments_of_init(library: str, file: str) -> list[str]:
    """Return the names of all arguments; [] if they are not known."""
    spec = find_spec(library)
    for folder in (spec and spec.submodule_search_locations) or ():
        try:
            tree = ast.parse((Path(folder) / file).read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == "init" and node.args.kwarg is None:
                return [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
    return []
