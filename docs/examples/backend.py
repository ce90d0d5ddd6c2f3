"""A generation backend that echoes: every completion repeats the end of its prompt. Run it with:

    PYTHONPATH=docs/examples realsys run experiment=arith generation.backend=backend:Echo

The launcher and the RolloutWorkers import this module too: import torch inside ``build``, if at all.
"""

from collections.abc import Sequence

from realsys.config.schema import Config
from realsys.generation.backend import Backend, EngineParts
from realsys.generation.protocol import SamplingParams
from realsys.generation.threaded import SimpleEngine


class EchoEngine(SimpleEngine):
    """SimpleEngine queues, pauses, aborts and loads weights; an engine with weights also writes ``load_weights``."""

    def __init__(self, parts: EngineParts, tokens: int) -> None:
        super().__init__(parts)
        self.tokens = tokens

    def complete(self, input_ids: Sequence[int], params: SamplingParams) -> tuple[Sequence[int], Sequence[float]]:
        echo = input_ids[-self.tokens :]
        return echo, [0.0] * len(echo)  # log 1: no other completion was possible


class Echo(Backend):
    """``generation.backend_args.tokens``: length of the echo."""

    def __init__(self, config: Config, tokens: int = 8) -> None:
        super().__init__(config)
        self.tokens = tokens

    def build(self, parts: EngineParts) -> EchoEngine:
        return EchoEngine(parts, self.tokens)
