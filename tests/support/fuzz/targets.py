"""One fuzzed decoder, and the outcome of its inputs."""

import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.support.fuzz.mutations import Spoiler


@dataclass(frozen=True)
class Target:
    """``decode`` takes what ``make`` makes; it returns, or raises one of ``named``. Anything else is a crash.

    ``weight``: its share of the inputs.
    """

    name: str
    make: Callable[[Spoiler], Any]
    decode: Callable[[Any], Any]
    named: tuple[type[Exception], ...]
    format: str = "json"
    weight: float = 1.0


@dataclass
class Outcome:
    """Counts of one target."""

    name: str
    inputs: int = 0
    accepted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    crashes: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


def run(target: Target, count: int, seed: int) -> Outcome:
    """Feed ``count`` inputs; the same ones for the same seed, unless they depend on earlier inputs."""
    outcome, spoiler = Outcome(target.name), Spoiler(Random(f"{seed}/{target.name}"), target.format)
    for _ in range(count):
        data = target.make(spoiler)
        outcome.inputs += 1
        start = time.perf_counter()
        try:
            target.decode(data)
        except target.named as error:
            outcome.rejected[type(error).__name__] += 1
        except BaseException as error:  # any other exception is the defect that fuzzing searches
            if isinstance(error, KeyboardInterrupt):
                raise
            text = "".join(traceback.format_exception(error)[-3:])
            outcome.crashes.append(f"{target.name}: {data!r:.300}\n{text[-1500:]}")
        else:
            outcome.accepted += 1
        outcome.slowest_s = max(outcome.slowest_s, time.perf_counter() - start)
    return outcome
