"""The allocation expression: `sglang.d4p1m1+d2p2m1` is inference + training, d data, p pipeline, m tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass

from realsys.errors import ConfigError

_AXES = re.compile(r"([dpm])(\d+)")
_BACKENDS = ("sglang",)


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of the three axes; their product is the number of workers."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        return self.data * self.pipeline * self.tensor

    def __str__(self) -> str:
        return f"d{self.data}p{self.pipeline}m{self.tensor}"


@dataclass(frozen=True, slots=True)
class Allocation:
    """What generates and what trains. ``inference.data`` is the number of GenerationServers."""

    backend: str
    inference: ParallelLayout
    training: ParallelLayout


def _parse_layout(text: str, whole: str) -> ParallelLayout:
    sizes: dict[str, int] = {}
    position = 0
    for match in _AXES.finditer(text):
        if match.start() != position:
            break
        axis, size = match[1], int(match[2])
        if axis in sizes:
            raise ConfigError("allocation", whole, f"axis '{axis}' stands twice in '{text}'")
        if size < 1:
            raise ConfigError("allocation", whole, f"axis '{axis}' must be at least 1 in '{text}'")
        sizes[axis] = size
        position = match.end()
    if position != len(text) or not sizes:
        raise ConfigError(
            "allocation", whole, f"cannot read '{text[position:] or text}'; write e.g. sglang.d4p1m1+d2p2m1"
        )
    return ParallelLayout(sizes.get("d", 1), sizes.get("p", 1), sizes.get("m", 1))


def parse_allocation(text: str) -> Allocation:
    """Parse the whole expression; either order of the two parts.

    Raises ConfigError naming the part that cannot be read.
    """
    parts = text.split("+")
    if len(parts) != 2:
        raise ConfigError("allocation", text, "needs one inference and one training part joined by '+'")
    inference = [p for p in parts if "." in p]
    training = [p for p in parts if "." not in p]
    if len(inference) != 1 or len(training) != 1:
        raise ConfigError("allocation", text, "exactly one part must name a backend, e.g. sglang.d2")
    backend, layout = inference[0].split(".", 1)
    if backend not in _BACKENDS:
        raise ConfigError("allocation", text, f"unknown backend '{backend}'; known: {', '.join(_BACKENDS)}")
    parsed = _parse_layout(layout, text)
    if parsed.pipeline != 1:
        raise ConfigError("allocation", text, "the inference part must have p1: servers do not pipeline")
    return Allocation(backend, parsed, _parse_layout(training[0], text))
