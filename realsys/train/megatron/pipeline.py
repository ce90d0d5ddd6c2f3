"""Megatron's pipeline schedule over micro-batches of packed sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from realsys.cluster.failpoint import failpoint
from realsys.train.megatron.layers.spec import pack_segments
from realsys.train.megatron.megatron_core import get_forward_backward_func
from realsys.train.packing import MicroBatch
from realsys.train.step_gate import StepGate


class Schedule:
    """Megatron's pipeline schedule: runs all micro-batches through all stages. Make it on the active mesh.

    ``inverse_frequencies``, fp32 [head_dim / 2], and ``magnitude``: of the rotary embedding; ``dtype``: of the model.
    ``multiple``: the tokens of a micro-batch divide by it.
    """

    def __init__(
        self, inverse_frequencies: torch.Tensor, magnitude: float, dtype: torch.dtype, multiple: int = 1
    ) -> None:
        self._multiple = multiple
        self._inverse_frequencies = inverse_frequencies
        self._magnitude = magnitude
        # The variable-length kernel of CUDA has no fp32.
        self._kernel = inverse_frequencies.is_cuda and dtype is not torch.float32
        self._dtype = dtype
        # Chosen once: it depends on the pipeline depth of the active mesh.
        self._run = get_forward_backward_func()

    def run(
        self,
        model: Any,
        batches: Sequence[MicroBatch],
        finish: Callable[[MicroBatch, torch.Tensor], Any],
        gate: StepGate,
        **how: Any,
    ) -> Any:
        """Run ``batches`` through ``model``, with further arguments of Megatron's function in ``how``.

        ``finish``: micro-batch, hidden states -> result; it runs on the last stage. Returns the results there, else [].
        Raises StepAbandoned, on all ranks alike, if not all passed ``gate``.
        """

        def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            # The schedule calls it in the order of the micro-batches, on every stage.
            batch = next(batches)
            if gate.passes():
                failpoint("train.microbatch")
            else:
                # The schedule runs to its end with dummies: every send between stages and every collective still
                # finds its partner.
                batch = batch.dummy(self._multiple)
            tokens = None if batch.tokens is None else batch.tokens[None]
            segments = pack_segments(
                batch.lengths,
                self._inverse_frequencies,
                self._dtype,
                kernel=self._kernel,
                magnitude=self._magnitude,
            )
            hidden = model(tokens, None, None, packed_seq_params=segments)
            # Megatron passes a flag for results that are not a loss. ``finish`` is the same for both.
            return hidden, lambda hidden, non_loss_data=False: finish(batch, hidden)

        results = self._run(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=len(batches),
            seq_length=1,  # ignored: lengths vary, and each stage sends the shape of its output
            micro_batch_size=1,
            **how,
        )
        gate.check()
        return results
