"""The tables of memory in docs/allocation.md, made by the predictor."""

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

from realsys.config.allocation import Allocation, parse_allocation
from realsys.config.dataflow import dataflow_of
from realsys.config.device_memory import GIB, OnHost, cache_bytes, host_use, rank_uses, server_use, usable_bytes
from realsys.config.fields import replaced
from realsys.config.machine import Machine
from realsys.config.memory_remedies import least_recompute, ranks_fit, smallest_training
from realsys.config.rank_memory import recomputed_layers
from realsys.config.schema import Config
from realsys.config.trial_sizes import model_of
from realsys.launch.fit import fit
from tests.support.processes.config_trees import changed
from tests.support.serving.qwen_models import QWEN, write_qwen

GPU = 79 * GIB  # what a GPU that is sold with 80 GB has
COUNTS = (8, 16, 64)
_LORA = "train.lora.rank=16"
_COLUMNS = (
    "model",
    "GPUs",
    "`allocation`",
    "besides",
    "recomputed layers of a stage",
    "peak of a training GPU",
    "KV cache of a server, tokens",
)
_HEAD = f"| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|"


def memory_settings() -> str:
    with tempfile.TemporaryDirectory() as folder:
        return "\n".join([_HEAD, *(row for name in QWEN for row in _rows(name, write_qwen(Path(folder), name)))])


def _rows(name: str, path: Path) -> Iterator[str]:
    for gpus in COUNTS:
        config, besides = _config(path), "-"
        allocation = smallest_training(config, gpus, GPU)
        if allocation is None:
            config, besides = _config(path, _LORA), f"`{_LORA}`"
            allocation = smallest_training(config, gpus, GPU)
        if allocation is None:
            yield f"| {name} | {gpus} | does not fit | | | | |"
            continue
        config, parsed = _config(path, f"allocation={allocation}", *_besides(besides)), parse_allocation(allocation)
        number, depth = least_recompute(config, GPU), -(-model_of(config).layers // parsed.actor.pipeline)
        config = replaced(config, ["train", "recompute"], True if number is None else number)
        peak = max(use.total for use, _ in rank_uses(config, parsed, dataflow_of(config), on_gpu=True))
        tokens, again = _cached_tokens(config, parsed), recomputed_layers(config.train.recompute, depth)
        settings = f"`{allocation}` | {besides} | {again} of {depth}"
        yield f"| {name} | {gpus} | {settings} | {peak / GIB:.0f} GiB | {tokens:,} |"


_TURN_COLUMNS = (
    "model",
    "training",
    "recomputed layers",
    "peak while the rank computes",
    "peak while the server serves",
    "KV cache, tokens",
    "host memory of the waiting rank",
)


def one_gpu() -> str:
    """Return what a server and a rank in turn need on one GPU, with the settings that the launcher chooses."""
    machine = Machine(16, 256 * GIB, ("0",), torch_has_cuda=True, gpu_bytes=GPU)
    lines = [f"| {' | '.join(_TURN_COLUMNS)} |", "|---" * len(_TURN_COLUMNS) + "|"]
    with tempfile.TemporaryDirectory() as folder:
        for name, lora in itertools.product(("0.5B", "1.5B", "3B", "7B"), ([], [_LORA])):
            config, _ = fit(_config(write_qwen(Path(folder), name), *lora), {"generation.backend"}, machine)
            allocation, flow = parse_allocation(config.allocation), dataflow_of(config)
            ((rank, _),) = rank_uses(config, allocation, flow, on_gpu=True)
            rank_gib = f"{rank.total / GIB:.0f} GiB"
            if not ranks_fit(config, GPU):
                rank_gib += ", does not fit"
            here = OnHost(1, 1, 4, ranks_on_gpu=True, servers_on_gpu=True)
            moved = host_use(config, allocation, flow, here).offload
            layers = model_of(config).layers
            again = f"{recomputed_layers(config.train.recompute, layers)} of {layers}"
            # SGLang fills its share of the GPU with its cache.
            served = usable_bytes(config, GPU, server=True) / GIB
            cells = (name, f"`{_LORA}`" if lora else "all parameters", again, rank_gib, f"{served:.0f} GiB")
            tokens = f"{_cached_tokens(config, allocation):,}"
            lines.append(f"| {' | '.join((*cells, tokens, f'{moved / GIB:.0f} GiB'))} |")
    return "\n".join(lines)


def _besides(text: str) -> list[str]:
    return [] if text == "-" else [text.strip("`")]


def _config(path: Path, *overrides: str) -> Config:
    return changed(f"model.path={path}", "generation.backend=sglang", *overrides, experiment="math")


def _cached_tokens(config: Config, allocation: Allocation) -> int:
    """Return the tokens whose keys and values fit beside the weights of a server, in thousands."""
    use, tensor = server_use(config, allocation, on_gpu=True), allocation.inference.tensor
    room = usable_bytes(config, GPU, server=True) - use.total + use.cache
    return room * tensor // cache_bytes(config, model_of(config)) // 1000 * 1000
