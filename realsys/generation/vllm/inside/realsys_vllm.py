"""Part of each worker process of vLLM (``--worker-extension-cls``), which imports it from this folder."""

from __future__ import annotations

import json
from typing import Any

_GREEDY = 1e-5  # vLLM takes lower temperatures for 0


class WorkerCalls:
    """Methods that vLLM's worker gets, for calls through ``/collective_rpc``."""

    model_runner: Any
    reload_weights: Any
    rank: int

    def report_trained_logprobs(self) -> None:
        """Make the log-probs those of softmax(logits / temperature), of the logits before penalties and cuts.

        vLLM's own are of temperature 1, or else of the distribution that is left after penalties, top-k and top-p.
        """
        sampler = self.model_runner.sampler
        plain = sampler.compute_logprobs

        def note_temperature(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            temperature = kwargs["sampling_metadata"].temperature  # [rows]; None: all rows are greedy

            def scaled(logits: Any) -> Any:
                divisors = temperature.masked_fill(temperature < _GREEDY, 1.0)
                return plain(logits.float() / divisors[:, None])

            sampler.compute_logprobs = plain if temperature is None else scaled

        sampler.register_forward_pre_hook(note_temperature, with_kwargs=True)

    def receive_version(self, order: str) -> str:
        """Receive all tensors, and load them if all workers have. Returns "", or why the earlier weights stay."""
        from realsys_group import UNDONE, agreed, received
        from vllm.distributed import get_tp_group

        tensors, problem = [], ""
        try:
            tensors = [(name, tensor.cpu()) for name, tensor in received(json.loads(order), 1 + self.rank)]
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if not agreed(not problem, get_tp_group().cpu_group):
            return f"{problem or 'another worker failed'}; {UNDONE}"
        self.reload_weights(weights_iterator=iter(tensors))
        return ""

    def load_version(self, directory: str) -> None:
        """Load the weights of an HF folder in place."""
        self.reload_weights(weights_path=directory)
