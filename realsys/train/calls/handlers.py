"""The contract of call handlers: one class for each kind of model function call.
``realsys.config.doors.CALL_HANDLER`` lists their names.

    handler         reads                                     makes                                   module
    actor_inf       tokens                                    prox_logprobs                           inference
    ref_inf         tokens                                    ref_logprobs                            inference
    critic_inf      tokens                                    values                                  inference
    reward_inf      tokens                                    scores, in the reply                    inference
    advantages      log-probs, ref_logprobs, values           advantages, returns                     advantages
    actor_train     tokens, log-probs, advantages             one optimizer step per minibatch        actor
    critic_train    tokens, values, returns                   one optimizer step per minibatch        critic
    sft             tokens                                    one optimizer step per minibatch        actor

Every rank of the role's mesh runs the same call. The request lists the sequences of all ranks, which these have
exchanged (``realsys.train.exchange``), so each rank computes what it must know about the others.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Protocol

from realsys.config.doors import CALL_HANDLER
from realsys.model_calls import MfcRequest
from realsys.train.calls.role import Role


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """Result of a call on this rank. Arrays are stored instead (``role.data``).

    stats   reduced over the mesh on ranks of the last pipeline stage; on the others they may be partial
    scores  sample id -> reward of a reward model, for this rank's own sequences; last pipeline stage only
    """

    stats: dict[str, float] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)


class CallHandler(Protocol):
    """The work of a model function call on a role. Every rank of the role's mesh runs the same
    call.

    A handler is a class without constructor arguments; a process makes one instance of it. ``run``
    reads and stores arrays in ``role.data``: ranks of the last stage hold the arrays of the loss
    tokens. The request lists the sequences of all ranks. ``run`` may raise only if all ranks raise,
    or if no other rank waits in a collective.
    """

    def run(self, role: Role, request: MfcRequest) -> CallOutcome: ...


@functools.cache
def find_handler(name: str) -> CallHandler:
    """Return the handler of this name or import string, one per process. Raises ConfigError."""
    handler: CallHandler = CALL_HANDLER.load(name)()
    return handler
