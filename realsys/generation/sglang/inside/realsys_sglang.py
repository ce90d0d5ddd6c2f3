"""SGLang's plugin for ``weights.transport=group``: each of its processes imports it from this folder.

``/update_weights_from_distributed`` with ``load_format=realsys`` receives from the ranks that ``group_name`` describes.
SGLang's own groups have no bound on the wait for a sender, check no bytes, and leave a mixture if one dies.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

FORMAT = "realsys"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_receivers: dict[int, Any] = {}  # by the id of the model


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, hook in (
        (f"{_UPDATER}.receive_weights_from_distributed", receive),
        (f"{_UPDATER}.load_weights_from_distributed", load),
        (f"{_UPDATER}.update_weights_from_disk", load_from_disk),
        (f"{_MANAGER}.release_memory_occupation", release),
    ):
        HookRegistry.register(name, hook, HookType.AROUND)


def receive(original: Callable[..., Any], updater: Any, **given: Any) -> Any:
    """Pass the order on to ``load``, because what comes is loaded piece by piece."""
    return json.loads(given["group_name"]) if given.get("load_format") == FORMAT else original(updater, **given)


def load(original: Callable[..., tuple[bool, str]], updater: Any, named_tensors: Any) -> tuple[bool, str]:
    if not isinstance(named_tensors, dict):
        return original(updater, named_tensors)
    model = updater.get_model()
    if id(model) not in _receivers:
        from realsys_group import Receiver
        from sglang.srt.distributed import get_tp_group

        _receivers[id(model)] = Receiver(model, 1 + updater.tp_rank, get_tp_group().cpu_group)

    def apply(tensors: Any) -> None:
        success, problem = original(updater, tensors)
        if not success:
            raise RuntimeError(problem)

    result: tuple[bool, str] = _receivers[id(model)].load(named_tensors, apply)
    return result


def load_from_disk(
    original: Callable[..., tuple[bool, str]], updater: Any, *given: Any, **named: Any
) -> tuple[bool, str]:
    result = original(updater, *given, **named)
    if (receiver := _receivers.get(id(updater.get_model()))) is not None:
        receiver.loaded()
    return result


def release(original: Callable[..., Any], manager: Any, *given: Any, **named: Any) -> Any:
    """Release the memory of the weights once their copy is complete."""
    for receiver in _receivers.values():
        receiver.settle()
    return original(manager, *given, **named)
