"""Helper processes of a benchmark."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any


@contextlib.contextmanager
def helper_processes(
    body: Callable[..., None], arguments: Sequence[tuple[Any, ...]], bound_s: float
) -> Iterator[list[Connection]]:
    """Run ``body(*each, pipe)`` in a process of its own for each of ``arguments``, until the end of the block.

    Yields the pipes once every process has sent its first message, which must be within ``bound_s``.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for each in arguments:
        mine, other = context.Pipe()
        processes.append(context.Process(target=body, args=(*each, other), daemon=True))
        processes[-1].start()
        pipes.append(mine)
    try:
        for pipe in pipes:
            assert pipe.poll(bound_s), f"a process of {body.__name__} did not start within {bound_s:g} s"
            pipe.recv()
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join(bound_s)
