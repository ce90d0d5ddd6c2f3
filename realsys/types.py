"""Records that cross a module or process boundary. No torch, no I/O.

    Ticket ──rollout──> Group ──stream──> SampleMeta (to the master), arrays (stay at the DP head)
    SampleMeta ──plan──> SequenceRef in a request to a ModelWorker (``realsys.model_calls``)

A ticket has one *group*, a group has n *episodes*, an episode has one or more *rows*. A *sample* is
a row with its id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
#: for each token of a completion, the most probable tokens with their log-probs, in descending order
TopLogprobs = list[list[tuple[int, float]]]


#: logits divided by less may overflow a float32, and the log-probs would be NaN
LOWEST_TEMPERATURE = 1e-6


def is_temperature(value: float) -> bool:
    """Return True if the value may divide logits, or is 0."""
    return value == 0 or LOWEST_TEMPERATURE <= value < float("inf")


def sampling_seed(*parts: int) -> int:
    """Mix ``parts`` (trial seed, ticket number, attempt, ...) to a 31-bit seed."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0]) & 0x7FFFFFFF


def constant(array: npt.NDArray[Any]) -> bool:
    """Return True if all elements have the same bytes.

    For short arrays several times faster than numpy's operators.
    """
    return array[1:].tobytes() == array[:-1].tobytes()


TicketKind = Literal["train", "eval"]
FinishReason = Literal["stop", "length", "abort"]


class Ticket(msgspec.Struct, frozen=True, omit_defaults=True):
    """The right to roll out one prompt once. ``attempt`` counts the reissues of the ticket."""

    ticket_id: str
    attempt: int
    prompt_index: int
    kind: TicketKind = "train"
    split: str = "train"
    n: int = 1  # episodes to play
    seed: int = 0  # base seed of the group's sampling
    version: int = 0  # version published when granted
    reissues: int = 0  # how often its group was discarded as too old
    #: incarnation of the trainer under which the ticket was granted; the short name is the one on
    #: the wire
    trainer_incarnation: str = msgspec.field(default="", name="trainer")
    # evaluations only
    eval_id: str = ""
    set: str = ""  # name of its data set
    sample: int = 0  # number of the completion of its problem

    @property
    def unit(self) -> str:
        """Name of this attempt in the spans of all processes (``realsys.observe.spans``)."""
        return f"{self.ticket_id}.{self.attempt}"


@dataclass(slots=True)
class Row:
    """One training sequence of an episode: the tokens that the engine received and returned.
    Nothing is re-tokenised.

    tokens     int32   [T]  prompts, feedback and completions in the order in which the model saw them
    loss_mask  bool    [T]  True where the policy sampled the token and it is trained; False at position 0
    logprobs   float32 [L]  of the L tokens with loss_mask, under the policy that sampled each (``behav``)
    versions   int32   [L]  version of that policy
    finish_reason           of the last completion in the row
    route                   (server, tokens) runs over the L tokens: which server sampled them; empty if unknown
    rewards                 (position in tokens, reward) of single tokens, each with loss_mask; usually one per turn
    kv_versions int32  [L]  oldest version of the keys that the token attended to; None: ``versions``
    temperatures            (temperature, tokens) runs over the L tokens; 0: that of the trial; empty: all have it
    teacher                 tokens that a teacher finds most probable at each of the L tokens, int32 [L, k], different
                            ones, and their log-probs, float32 [L, k]; None: no teacher was asked

    A conversation whose history only grows is one row. Rewritten history (a branch) is a further
    row.
    """

    tokens: I32
    loss_mask: Mask
    logprobs: F32
    versions: I32
    finish_reason: FinishReason
    route: tuple[tuple[str, int], ...] = ()
    rewards: tuple[tuple[int, float], ...] = ()
    kv_versions: I32 | None = None
    temperatures: tuple[tuple[float, int], ...] = ()
    teacher: tuple[I32, F32] | None = None

    @property
    def loss_tokens(self) -> int:
        return len(self.logprobs)

    @property
    def kept_tokens(self) -> int:
        """Return how many of its sampled tokens attended to keys of an older version than their own."""
        return 0 if self.kv_versions is None else int(np.count_nonzero(self.kv_versions != self.versions))

    @property
    def truncated(self) -> bool:
        """Return True if the row did not end with a stop token."""
        return self.finish_reason != "stop"

    @property
    def version_span(self) -> tuple[int, int] | None:
        """Return the lowest and the highest version of its tokens; None if it has no token with
        loss_mask.
        """
        if not len(self.versions):
            return None
        if constant(self.versions):
            return int(self.versions[0]), int(self.versions[0])
        return int(self.versions.min()), int(self.versions.max())


@dataclass(slots=True)
class Episode:
    """One attempt of an agent at a prompt.

    reward   of the whole attempt; ``Row.rewards`` of single tokens are added to it
    correct  True if the attempt solved the task; None if the task has no right or wrong
    metrics  numbers for the step log, averaged over episodes by name
    answer   final answer, for the majority vote of an evaluation; training does not use it
    """

    rows: list[Row]
    reward: float
    correct: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    answer: str | None = None

    @property
    def loss_tokens(self) -> int:
        return sum(row.loss_tokens for row in self.rows)

    @property
    def truncated(self) -> bool:
        """Return True if one of its rows is truncated."""
        return any(row.truncated for row in self.rows)


@dataclass(slots=True)
class Group:
    """The episodes of one ticket, as pushed to a DP head.

    ``errors``: why further episodes of the ticket failed.
    """

    ticket: Ticket
    episodes: list[Episode]
    worker: str
    started: float = 0.0  # unix seconds
    finished: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


class RowOrigin(msgspec.Struct, frozen=True):
    """The origin of a row: ``finish_reason``, ``route`` and ``rewards`` as in ``Row``."""

    finish_reason: FinishReason
    route: tuple[tuple[str, int], ...] = ()
    rewards: tuple[tuple[int, float], ...] = ()


class GroupOrigin(msgspec.Struct, frozen=True):
    """The origin of a group, for the record of its step. No computation reads it.

    ``episodes[k][r]``: row r of episode k.
    """

    ticket: Ticket
    worker: str
    started: float  # unix seconds
    finished: float
    extra: dict[str, float]
    episodes: list[list[RowOrigin]]
    errors: list[str] = []


class SampleMeta(msgspec.Struct, omit_defaults=True, gc=False):
    """Metadata of a row for the master: everything but its tokens.

    ``reward``, ``correct``, ``truncated``, ``metrics`` and ``episode_tokens`` belong to the
    episode. They are the same in each of its rows.
    """

    sample_id: str  # f"{ticket_id}.{attempt}/{episode}.{row}"
    ticket_id: str
    attempt: int
    length: int  # tokens
    loss_tokens: int  # tokens with loss_mask
    reward: float
    truncated: bool  # a completion of the episode ran into its limit
    version_min: int
    version_max: int
    owner: int  # index of the ModelWorker that holds the tensors
    arrived: float = 0.0  # unix seconds
    trainer_incarnation: str = ""  # copied from the ticket
    episode: int = 0  # number of the episode in its group
    row: int = 0  # number of the row in its episode
    group_rows: int = 1  # rows of the whole group; the group is complete when all of them have arrived
    row_truncated: bool = False  # this row did not end with a stop token
    episode_tokens: int = 0  # loss tokens of the whole episode; 0 means the same as ``loss_tokens``
    correct: bool | None = None
    metrics: dict[str, float] = {}
    #: (version, tokens) of the loss tokens, oldest first; empty for a row of one version
    version_tokens: list[tuple[int, int]] = []
    sampled_tokens: int = 0  # ``episode_tokens`` before tokens were masked as too old; 0: none were
    reissues: int = 0  # copied from the ticket
    kept_tokens: int = 0  # ``Row.kept_tokens``; at most, if tokens were masked as too old
    #: beginnings that other rows of the group have, too (``realsys.algorithm.prefix_tree``)
    shared: list[tuple[int, int]] = []


class SequenceRef(msgspec.Struct, array_like=True, gc=False):
    """A row as a model function call sees it.

    ``group`` numbers the prompts of one batch from 0, ``episode`` its episodes. ``episode_tokens``
    are the loss tokens of the whole episode.
    """

    sample_id: str
    length: int
    loss_tokens: int
    reward: float
    truncated: bool
    group: int
    episode: int
    episode_tokens: int
    last: bool = True  # the last row of its episode
    row_truncated: bool = False  # this row did not end with a stop token
    sampled_tokens: int = 0  # ``episode_tokens`` before tokens were masked as too old; 0: none were
    shared: list[tuple[int, int]] = []  # as in SampleMeta
    constrained: bool = False  # a grammar changed what its episode sampled, and the engine's log-probs


class PublishedVersion(msgspec.Struct, frozen=True):
    """The value of the name-store key ``model_version``.

    ``locator`` names the version for ``transport``; only that transport reads it. It tells two
    versions of one number apart. With the transport ``disk`` it is the folder with the manifest.
    """

    version: int
    incarnation: str
    locator: str
    step: int
    transport: str = "disk"  # name in weights.transport


class ServerAddress(msgspec.Struct, frozen=True):
    """The entry of a GenerationServer or of a reward service in the name store."""

    name: str  # generation_server/0
    url: str  # http://host:port
    pid: int
    host: str
    incarnation: str  # new for each start of the process
    copies: str = ""  # http://host:port of its host's copies of weights; empty: they are not served


class TrainerAddress(msgspec.Struct, frozen=True):
    """The entry of a MasterWorker, and of the TCPStore of its ranks, in the name store.

    ``incarnation`` is that of the MasterWorker in both, so that no rank uses a store of an earlier start.
    ``start`` tells which start of the trainer the MasterWorker belongs to (``training_start``).
    """

    incarnation: str
    address: str
    start: str = ""


#: metric of an episode: its completions that were kept to a grammar
CONSTRAINED = "gateway/constrained"

#: Extent of an array: the whole row, its tokens with loss_mask, those and the state after the last one, or k entries
#: for each of those with loss_mask, one token after the other (``PPOConfig.top_k``).
Span = Literal["sequence", "loss", "loss_and_end", "top_k"]

#: name of a stored array -> (numpy dtype, extent)
ARRAY_KEYS: dict[str, tuple[str, Span]] = {
    "tokens": ("int32", "sequence"),
    "loss_mask": ("bool", "sequence"),
    "behav_logprobs": ("float32", "loss"),
    "versions": ("int32", "loss"),
    "kv_versions": ("int32", "loss"),
    "temperatures": ("float32", "loss"),
    "token_rewards": ("float32", "loss"),
    "prox_logprobs": ("float32", "loss"),
    "ref_logprobs": ("float32", "loss"),
    # the state before each loss token, and the one after the last
    "values": ("float32", "loss_and_end"),
    "advantages": ("float32", "loss"),
    "returns": ("float32", "loss"),
    # the teacher's most probable tokens at each loss token, and their log-probs
    "teacher_tokens": ("int32", "top_k"),
    "teacher_logprobs": ("float32", "top_k"),
}

#: keys of a dataflow that are not arrays: the master passes them on with the metadata
METADATA_KEYS = frozenset({"scores"})


def register_key(name: str, dtype: str, span: Span) -> None:
    """Declare an array that the calls of a custom dataflow make and read.

    Raises ValueError if the name is already declared with another dtype or span.
    """
    declared = "metadata" if name in METADATA_KEYS else ARRAY_KEYS.get(name, (dtype, span))
    if declared != (dtype, span):
        raise ValueError(f"key {name!r} is already declared as {declared}: choose another name")
    ARRAY_KEYS[name] = (dtype, span)
