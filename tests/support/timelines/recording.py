"""Spans that a test's own process records."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from realsys.observe import spans
from realsys.observe.timeline.clocked_spans import TimelineSpan, read_timeline


@contextlib.contextmanager
def recording(folder: Path) -> Iterator[Callable[[], Sequence[TimelineSpan]]]:
    """Record the spans of the block; the yielded function returns those so far, sorted by begin."""

    def so_far() -> Sequence[TimelineSpan]:
        spans.flush()
        return read_timeline(folder).spans

    spans.start(folder / "worker-0", "worker/0", "1", 1 << 20)
    try:
        yield so_far
    finally:
        spans.stop()
