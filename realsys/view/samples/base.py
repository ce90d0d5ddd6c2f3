"""Contract of a source of samples: a recorded train step, an evaluation, or the groups that were not trained.

A list shows ``SampleRow``s, which need no token of a sample. ``view`` reads one sample with its tokens. So a source of
any size is shown with little memory. Every text in here is untrusted: it is the output of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

TurnKind = Literal["prompt", "context", "sampled", "masked"]


class SampleRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sample in a list.

    sample_id   unique in its source
    group       id of its ticket, or number of its problem
    tokens      sampled tokens
    staleness   versions between the oldest token and the weights that were trained; None: it was not trained
    outcome     why it was not trained; "" if it was, and for evaluations
    """

    sample_id: str
    group: str
    prompt_index: int
    reward: float | None
    correct: bool | None
    tokens: int
    truncated: bool = False
    finish_reason: str = "stop"
    staleness: int | None = None
    advantage: float | None = None
    outcome: str = ""


class Turn(msgspec.Struct, frozen=True, omit_defaults=True):
    """Neighbouring tokens of one kind.

    kind        prompt: up to the first sampled token; context: given later, as the result of a tool; sampled: trained;
                masked: sampled, but too old to be trained
    pieces      text that each token adds; the whole text as one piece if the tokens are unknown
    versions    version that sampled each token; one number if it is the same for all; empty if the policy did not
                sample them, or if it is unknown
    logprobs    nats, when it was sampled; likewise
    advantages  as trained; likewise
    """

    kind: TurnKind
    pieces: list[str]
    versions: list[int] = []
    logprobs: list[float] = []
    advantages: list[float] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class SampleView(msgspec.Struct, frozen=True):
    """One sample with its text.

    facts      (name, value) for people, in the order to show
    reference  the reference answer; None if it is unknown, for the reason in ``note``
    """

    row: SampleRow
    turns: list[Turn]
    facts: list[tuple[str, str]]
    reference: str | None = None
    note: str = ""


class SampleSource(Protocol):
    """Samples of one place in a trial. Methods raise RealsysError for a damaged file."""

    @property
    def title(self) -> str:
        """One line on what the samples are."""
        ...

    def rows(self) -> Sequence[SampleRow]:
        """Return all samples, in their order."""
        ...

    def text(self, sample_id: str) -> str:
        """Return the text of a sample, with its prompt, for a search."""
        ...

    def view(self, sample_id: str) -> SampleView:
        """Read one sample. Raises RecordError for an unknown id."""
        ...
