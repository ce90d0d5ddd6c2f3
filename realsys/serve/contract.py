"""What the service asks of the ranks and of the servers. No torch, no HTTP.

    client ──HTTP──> routes ──> Service (journal, futures, turns) ──> Trainer   ranks: one tenant's call at a time
                                                                 └──> Sampler   generation servers: many at a time

A *tenant* is one training run of a client (Tinker: a model): an adapter on the base model, its optimizer state, and
the gradients since its last optimizer step. ``Service`` calls the Trainer for one tenant at a time, in the order of the
calls of each tenant. All of it is deterministic: the same calls from the same state give the same bits, whatever other
tenants do between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from realsys.types import F32, I32, Mask, TopLogprobs


class ClientRow(msgspec.Struct):
    """One sequence to learn from.

    tokens     int32   [T]  the model's input with the last target token behind it
    loss_mask  bool    [T]  True where the log-prob of the token is wanted; False at position 0
    logprobs   float32 [L]  of the L tokens with loss_mask when they were sampled; zeros for cross_entropy
    advantages float32 [L]  weight of each token; the weights of cross_entropy
    """

    tokens: I32
    loss_mask: Mask
    logprobs: F32
    advantages: F32


class Adam(msgspec.Struct, frozen=True):
    """Settings of one optimizer step: decoupled weight decay; ``grad_clip_norm`` 0: none."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class Passed(msgspec.Struct):
    """Result of a forward pass: log-probs of each row's loss tokens, float32 [L], and metrics by their Tinker names."""

    logprobs: list[F32]
    metrics: dict[str, float]


class Snapshot(msgspec.Struct, frozen=True):
    """Weights of a tenant that servers can load: a version of the weight transport.

    ``key`` names it in the servers: "TENANT/VERSION".
    """

    key: str
    version: int
    locator: str


class Sampled(msgspec.Struct):
    """One completion. ``stopped``: by a stop token or stop string; else it reached its limit."""

    tokens: list[int]
    logprobs: list[float]
    stopped: bool
    top: TopLogprobs | None = None


class Sampling(msgspec.Struct, frozen=True):
    """How to sample ``n`` completions of a prompt."""

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    top_logprobs: int = 0


class Trainer(Protocol):
    """The ranks. One call at a time. A call that is wrong raises CallRefused; any other error ends the run."""

    async def start(self, tenant: str, seed: int, checkpoint: Path | None = None) -> None:
        """Make a tenant whose adapter is drawn with ``seed``; with ``checkpoint`` its state is that of ``save``."""

    async def forward_backward(
        self, tenant: str, rows: Sequence[ClientRow], loss: str, config: Mapping[str, float], *, backward: bool
    ) -> Passed:
        """Compute log-probs and loss, a sum over tokens; with ``backward`` add the gradient to those of the tenant."""

    async def step(self, tenant: str, adam: Adam) -> dict[str, float]:
        """Take one optimizer step with the gradients since the last one, which are then zero. Returns metrics.

        Raises CallRefused if they are not finite: no step was taken, and they are zero all the same.
        """

    async def save(self, tenant: str, folder: Path) -> None:
        """Write adapter and optimizer state to ``folder``, whole or not at all. Gradients are not saved."""

    async def load(self, tenant: str, folder: Path, *, optimizer: bool) -> None:
        """Replace the adapter, and with ``optimizer`` its state, by those of a checkpoint; gradients are zero."""

    async def snapshot(self, tenant: str) -> Snapshot:
        """Write the tenant's weights for the servers, durably."""

    async def keep(self, snapshots: Sequence[Snapshot]) -> None:
        """Keep these snapshots on disk, and no others."""

    async def drop(self, tenant: str) -> None:
        """Forget the state of a tenant."""


class Sampler(Protocol):
    """The generation servers. Many calls at a time."""

    async def sample(self, snapshot: Snapshot | None, prompt: Sequence[int], sampling: Sampling) -> list[Sampled]:
        """Sample from a tenant's snapshot; None: from the base model. Raises GenerationError."""


class CallRefused(Exception):
    """The call is wrong: a message for the client that made it. Nothing has changed, unless the method says so."""
