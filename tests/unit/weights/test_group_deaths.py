"""A sender or a receiver of a transfer by group is killed at each of its pieces: no engine keeps a mixture."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from realsys.weights.inside import realsys_group
from realsys.weights.inside.realsys_group import UNDONE, Offer, Receiver, digest

pytestmark = pytest.mark.processes
PIECES = 10
BOUND_S = 60.0
NAMES = "abcde"
PARTS = [(2048 * at, 2048) for at in range(len(NAMES))]
fork = multiprocessing.get_context("fork")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(512)))

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in tensors:
                getattr(self, name).copy_(tensor)


def offered(version: int, receivers: int = 1) -> tuple[Offer, list[Any], torch.Tensor]:
    """A sender of a version with its number as each value, what it sends, and the bytes."""
    part = torch.full((512,), float(version)).view(torch.uint8)
    described = [(name, "float32", [512], digest(part)) for name in NAMES]
    return Offer("127.0.0.1", 1 + receivers, "gloo", BOUND_S), described, part.repeat(len(NAMES))


def dying(at: int) -> Callable[..., None]:
    """Broadcast as ever, but die before piece ``at``."""
    plain, seen = realsys_group.TransferGroup.broadcast, []

    def broadcast(group: Any, data: torch.Tensor) -> None:
        for piece in data.split(realsys_group._PIECE):
            seen.append(piece)
            if len(seen) > at:
                os.kill(os.getpid(), signal.SIGKILL)
            plain(group, piece)

    return broadcast


def engine(pipe: Connection, die_at: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = Model()
    receiver = Receiver(model, 1, None)
    while (order := pipe.recv()) is not None:
        if order["version"] == 2 and die_at >= 0:
            realsys_group.TransferGroup.broadcast = dying(die_at)
        result = receiver.load(order, model.load)
        pipe.send((*result, {value for weight in model.parameters() for value in weight.tolist()}))


def rank(pipes: list[Connection], die_at: int) -> None:
    """Send a version to one engine after the other."""
    torch.set_num_threads(1)
    while (version := pipes[0].recv()) is not None:
        for number, pipe in enumerate(pipes):
            offer, described, data = offered(version)
            pipe.send({"version": version, "senders": [{"place": offer.place, "tensors": described}]})
            if number == 0 and version == 2 and die_at >= 0:
                realsys_group.TransferGroup.broadcast = dying(die_at)
            try:
                offer.send(data, PARTS, bool)
            except RuntimeError:
                assert number == 0


@contextmanager
def process(work: Callable[..., None], *arguments: object) -> Iterator[multiprocessing.process.BaseProcess]:
    made = fork.Process(target=work, args=arguments)
    made.start()
    try:
        yield made
    finally:
        made.kill()
        made.join(BOUND_S)


def result_of(pipe: Connection) -> tuple[bool, str, set[float]]:
    assert pipe.poll(BOUND_S)
    return pipe.recv()


@pytest.mark.parametrize("at", range(PIECES))
@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_each_engine_has_a_whole_version(monkeypatch, victim, at):
    monkeypatch.setattr(realsys_group, "_PIECE", 5 * 512 * 4 // PIECES)
    (to_first, first), (to_second, second), (of_first, sends_first), (of_second, sends_second) = (
        fork.Pipe() for _ in range(4)
    )
    with (
        process(engine, first, at if victim == "receiver" else -1) as killed,
        process(engine, second, -1),
        process(rank, [sends_first, sends_second], at if victim == "sender" else -1),
    ):
        for end in (first, second, sends_first, sends_second):
            end.close()
        for version in (1, 2):
            of_first.send(version)
            to_first.send(of_first.recv())
            if version == 1 or victim == "receiver":
                if version == 1:
                    assert result_of(to_first) == (True, "", {1.0})
                to_second.send(of_second.recv())
                assert result_of(to_second) == (True, "", {float(version)})
        if victim == "sender":
            success, problem, values = result_of(to_first)
            assert not success and problem.endswith(UNDONE) and values == {1.0}
        else:
            killed.join(BOUND_S)
            assert killed.exitcode == -signal.SIGKILL


def ranks_of_one_engine(pipe: Connection, rank: int, meeting: str) -> None:
    """A rank of an engine of two; the second one cannot load the last tensor of version 2."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    model = Model()
    receiver = Receiver(model, 1 + rank, None)

    def load(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if (rank, name, tensor[0]) == (1, NAMES[-1], 2.0):
                raise MemoryError("no room")
            model.load(iter([(name, tensor)]))

    while (order := pipe.recv()) is not None:
        result = receiver.load(order, load)
        pipe.send((*result, {value for weight in model.parameters() for value in weight.tolist()}))


def test_weights_whose_copy_failed_are_not_put_back(monkeypatch):
    """Part of a copy would be a mixture: the engine must be started again."""
    monkeypatch.setattr(realsys_group, "agreed", lambda ok, group: ok)
    receiver = Receiver(Model(), 1, None)
    receiver.settle()
    receiver._kept["c"] = torch.zeros(3)  # of another shape: the next copy ends here
    monkeypatch.setattr(threading, "excepthook", lambda failure: None)
    receiver.loaded()
    success, problem = receiver.load({"senders": []}, lambda tensors: 1 / 0)
    assert not success and "no copy of its earlier weights is whole" in problem and not problem.endswith(UNDONE)


def test_ranks_of_an_engine_keep_a_version_together(tmp_path):
    pipes = [fork.Pipe() for _ in range(2)]
    meeting = str(tmp_path / "meeting")
    with (
        process(ranks_of_one_engine, pipes[0][1], 0, meeting),
        process(ranks_of_one_engine, pipes[1][1], 1, meeting),
    ):
        results = []
        for version in (1, 2, 3):
            offer, described, data = offered(version, receivers=2)
            for pipe, _ in pipes:
                pipe.send({"senders": [{"place": offer.place, "tensors": described}]})
            offer.send(data, PARTS, bool)
            results.append([result_of(pipe) for pipe, _ in pipes])
    whole, refused, next_one = results
    assert whole == [(True, "", {1.0})] * 2 and next_one == [(True, "", {3.0})] * 2
    assert [(success, values) for success, _, values in refused] == [(False, {1.0})] * 2
    problems = [problem for _, problem, _ in refused]
    assert problems == [f"another rank of the engine failed; {UNDONE}", f"MemoryError: no room; {UNDONE}"]
