"""The contract of call handlers: one class for each kind of model function call.
``realsys.config.doors.CALL_HANDLER`` lists their names.

    handler         reads                                     makes                                   module
    actor_inf       tokens                                    prox_logprobs                           inference
    ref_inf         tokens                                    ref_logprobs, a teacher's top k         inference
    critic_inf      tokens                                    values                                  inference
    reward_inf      tokens                                    scores, in the reply                    inference
    advantages      log-probs, ref_logprobs, values           advantages, returns                     advantages
    actor_train     tokens, log-probs, advantages             one optimizer step per minibatch        actor
    critic_train    tokens, values, returns                   one optimizer step per minibatch        critic
    sft             tokens                                    one optimizer step per minibatch        supervised
    dpo             tokens of pairs, ref_logprobs             one optimizer step per minibatch        supervised
    reward_model    tokens of pairs                           one optimizer step per minibatch        supervised
    tenant_loss     tokens, log-probs, advantages             pending gradients, prox_logprobs        tenants

Every rank of the role's mesh runs the same call. The request lists the sequences of all ranks, which these have
exchanged (``realsys.train.worker.call_service``), so each rank computes what it must know about the others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from realsys.algorithm.balance import cost_function, model_flops
from realsys.algorithm.microbatch import pack_equal
from realsys.algorithm.minibatches import row_units
from realsys.algorithm.prefix_tree import row_tree, tree_cost, tree_units, unit_size
from realsys.algorithm.value import RunningMoments
from realsys.config.dataflow import FunctionCall, RoleSettings, dataflow_of
from realsys.config.doors import CALL_HANDLER, HOOK
from realsys.config.rank_memory import recomputed_of_model
from realsys.config.schema import Config
from realsys.errors import ModelError
from realsys.model_calls import PPO, MfcRequest
from realsys.train.megatron.device import Device
from realsys.train.megatron.mesh import MeshGroups
from realsys.train.megatron.train_engine import MegatronEngine
from realsys.train.worker.data_manager import DataManager
from realsys.train.worker.packing import MicroBatch, MicroBatchPacker
from realsys.types import SequenceRef


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


# ---- role: the objects that call handlers use, and the state that outlives a call


#: names in the state of a role
_COUNTERS = ("skipped_steps", "skipped_in_a_row")
_RUNNING_VALUES = "running_values."


@dataclass(slots=True)
class Role:
    """One model role on this rank.

    The roles of a worker share ``data``; everything else belongs to this role.
    """

    name: str
    config: Config
    settings: RoleSettings
    engine: MegatronEngine
    data: DataManager
    packer: MicroBatchPacker
    device: Device
    #: optimizer steps that were skipped because loss or gradient was not finite: since the start,
    #: and in a row until now
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    #: model FLOPs of the micro-batches made so far, this rank's share
    flops: float = 0.0
    computed_flops: float = 0.0
    #: gradients since the last optimizer step of the current tenant: copies of the gradient buffers in host memory,
    #: fp32; None: there are none (``realsys.train.worker.tenants``)
    gradients: list[torch.Tensor] | None = None
    #: statistics in whose units a critic predicts
    running_values: RunningMoments = field(init=False)

    def __post_init__(self) -> None:
        self.running_values = RunningMoments(self.config.train.ppo.critic)

    @property
    def groups(self) -> MeshGroups:
        return self.engine.groups

    def own_sequences(self, request: MfcRequest) -> list[SequenceRef]:
        """Return the sequences of this data rank, of all minibatches."""
        return sequences_per_rank(request)[self.groups.data_rank]

    def call(self, request: MfcRequest) -> FunctionCall:
        """Return the request's call, for the keys that it reads and makes. Raises ModelError if it is unknown."""
        if request.inputs:
            keys = frozenset(request.inputs), frozenset(request.outputs)
            return FunctionCall(request.mfc, request.role, request.handler, *keys)
        for call in dataflow_of(self.config).calls:
            if call.name == request.mfc:
                return call
        algorithm = self.config.train.ppo.algorithm
        raise ModelError(f"call {request.mfc!r} is not part of train.ppo.algorithm={algorithm}: check its dataflow")

    @contextlib.contextmanager
    def configured(self, request: MfcRequest) -> Iterator[None]:
        """Use the settings of ``train.ppo`` that the request has inside the block."""
        config = self.config
        self.config = config.with_ppo(settings) if (settings := request.args.get(PPO)) else config
        try:
            yield
        finally:
            self.config = config

    def microbatches(
        self, per_rank: Sequence[Sequence[SequenceRef]], keys: Sequence[str] = (), *, gradients: bool = True
    ) -> list[MicroBatch]:
        """Return this rank's micro-batches of ``per_rank`` (the sequences of all data ranks), as
        many as every other rank has.

        At least one: a step runs its collectives even if no rank has anything to compute.
        ``gradients``: False for a forward pass only, which may have larger ones.
        """
        train = self.config.train
        capacity = train.microbatch_tokens if gradients else train.inference_microbatch_tokens
        capacity = capacity or train.microbatch_tokens
        fewest = self._fewest_microbatches()
        # Units that are too large would leave a pipeline with too few micro-batches.
        most = -(-max(sum(ref.length for ref in refs) for refs in per_rank) // fewest)
        units = [tree_units(row_units(refs, train.microbatch_tokens), min(capacity, most)) for refs in per_rank]
        lengths = [[unit_size(unit) for unit in own] for own in units]
        cost = cost_function(self.config, self.engine.model.sizes)
        costs = [[tree_cost(unit, cost) for unit in own] for own in units]
        # More micro-batches than sequences would be empty.
        fewest = min(fewest, max(len(own) for own in units))
        plan = pack_equal(lengths, capacity, fewest, costs)[self.groups.data_rank]
        own = units[self.groups.data_rank]
        batches = [[ref for i in batch for ref in own[i]] for batch in plan or [[]]]
        for batch in batches:
            self._count_flops(batch, gradients=gradients)
        return [self.packer.pack(batch, keys) for batch in batches]

    def _count_flops(self, refs: Sequence[SequenceRef], *, gradients: bool) -> None:
        layout = self.groups.mesh.layout
        scored = sum(ref.loss_tokens for ref in refs)
        segments = row_tree(refs).segments
        ends, begins = [each.end for each in segments], [each.begin for each in segments]
        sizes = self.engine.model.sizes
        again = recomputed_of_model(self.config.train.recompute, sizes.layers, layout.pipeline) / sizes.layers
        # The tensor and pipeline ranks of a data rank divide the work.
        share = (1 if gradients else 1 / 3) / (layout.tensor * layout.pipeline)
        self.flops += share * model_flops(sizes, ends, scored, begins)
        twice = (again, 1.0) if gradients else (0.0, 0.0)  # the backward pass of the head makes its logits again
        self.computed_flops += share * model_flops(sizes, ends, scored, begins, twice)

    def _fewest_microbatches(self) -> int:
        stages = self.groups.mesh.layout.pipeline
        # A pipeline idles for (stages - 1) of (micro-batches + stages - 1) passes.
        return self.config.train.min_microbatches or (4 * stages if stages > 1 else 1)

    def state_dict(self) -> dict[str, float | list[float]]:
        """Return the role's state for a checkpoint, without model and optimizer; the same on every
        rank of the mesh.
        """
        counters = {name: float(getattr(self, name)) for name in _COUNTERS}
        return {**counters, **{_RUNNING_VALUES + name: x for name, x in self.running_values.state_dict().items()}}

    def load_state_dict(self, state: Mapping[str, float | list[float]]) -> None:
        """Restore the state. Raises KeyError if an entry is missing."""
        numbers = {name: x for name, x in state.items() if isinstance(x, float)}
        for name in _COUNTERS:
            setattr(self, name, int(numbers[name]))
        running = {name: x for name, x in numbers.items() if name.startswith(_RUNNING_VALUES)}
        self.running_values.load_state_dict({name.removeprefix(_RUNNING_VALUES): x for name, x in running.items()})


def sequences_per_rank(request: MfcRequest) -> list[list[SequenceRef]]:
    """Return for each data rank of the role's mesh its sequences of all minibatches, in their
    order.
    """
    data_ranks = range(len(request.minibatches[0]))
    return [[ref for minibatch in request.minibatches for ref in minibatch[d]] for d in data_ranks]


# ---- hooks: functions that run before or after a call. ``realsys.config.doors.HOOK`` lists their names


#: Runs on every rank of the role's mesh, so it may contain collectives. An error that it raises
#: ends the worker.
Hook = Callable[[Role, MfcRequest], None]


@functools.cache
def find_hook(name: str) -> Hook:
    """Return the hook of this name or import string. Raises ConfigError."""
    hook: Hook = HOOK.load(name)
    return hook


def onload(role: Role, request: MfcRequest) -> None:
    """Bring the role's offloaded tensors back to the device, if any are offloaded."""
    role.engine.onload()


def offload(role: Role, request: MfcRequest) -> None:
    """Move the role's optimizer state, or also its parameters, to host memory, as
    ``roles.<role>.offload`` says.
    """
    role.engine.offload()


@contextlib.contextmanager
def onloaded(role: Role) -> Iterator[None]:
    """Keep the role's tensors on the device inside the block. For work between its calls."""
    was_away = role.engine.is_offloaded
    role.engine.onload()
    try:
        yield
    finally:
        if was_away:
            role.engine.offload()
