"""Parts of a train step of a 135M model on one CPU rank: CPU seconds of each, and resident memory after it.

    python -m benchmarks.step_parts [--sequences 48] [--repeats 3] [--label now]

The model has the sizes of SmolLM2-135M, random weights, tied embeddings, bfloat16. With one short sequence the seconds
are the fixed cost of a step. Parts, through the product's own interfaces:

    inference   actor_inf, proximal log-probs
    gradient    actor_train without its optimizer step: loss, backward pass, fp32 sums
    optimizer   norm, clipping, AdamW, copy to the bf16 weights
    copy        the weights in HF names to host memory, with checksums

``rss_mib`` is resident memory between two steps, ``peak_mib`` the greatest so far, ``states_mib`` the bytes of weights,
gradients, master weights, moments and the copy. Rows of other labels and numbers of sequences stay in the result: a
process measures one, and two revisions can be compared.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._table import RESULTS, report
from benchmarks._training import PRESETS, RAW_ADVANTAGES, make_batch, make_model, request, single_rank
from realsys.config.schema import Config
from realsys.train.megatron.device import Device, prepare_device
from realsys.train.megatron.offload import OffloadCopies
from realsys.train.worker import call_service
from realsys.train.worker.call_handlers import Role, find_handler
from realsys.train.worker.weight_saver import checksums_of

PARTS = ("inference", "gradient", "optimizer", "copy")
STATE_BYTES = 2 + 4 + 4 + 8 + 2  # per parameter: weights, gradients, master weights, moments, copy


@contextmanager
def timed_part(seconds: dict[str, float], part: str) -> Iterator[None]:
    start = time.process_time()
    yield
    seconds[part] = seconds.get(part, 0.0) + time.process_time() - start


def step(role: Role, refs: list[Any], memory: OffloadCopies) -> dict[str, float]:
    """Return the CPU seconds of each part."""
    seconds: dict[str, float] = {}
    take_step = role.engine.step

    def timed_step(*args: Any, **kwargs: Any) -> Any:
        with timed_part(seconds, "optimizer"):
            return take_step(*args, **kwargs)

    with timed_part(seconds, "inference"):
        find_handler("actor_inf").run(role, request("actor_inf", [refs]))
    role.engine.step = timed_step  # type: ignore[method-assign]
    with timed_part(seconds, "gradient"):
        find_handler("actor_train").run(role, request("actor_train", [refs], lr=1e-6))
        if hasattr(call_service, "trim_heap"):  # a ModelWorker calls it after each call; an old revision has none
            call_service.trim_heap()
    role.engine.step = take_step  # type: ignore[method-assign]
    seconds["gradient"] -= seconds["optimizer"]
    with timed_part(seconds, "copy"):
        checksums_of(memory.take(role.engine.export()))
    return seconds


def measure(folder: Path, parameters: int, options: argparse.Namespace, device: Device) -> dict[str, Any]:
    train = {"microbatch_tokens": 2048, "ppo": {"advantage": RAW_ADVANTAGES, "minibatches": 2}}
    config = Config.model_validate({"model": {"dtype": "bfloat16"}, "train": train})
    lengths = np.random.default_rng(1).integers(35, 66, options.sequences).tolist()
    refs, samples = make_batch(lengths, PRESETS["135m"].outputs, 1)
    with single_rank(config, folder, device) as role:
        for name, arrays in samples.items():
            role.data.put(name, arrays)
        memory = OffloadCopies(device)
        steps = [step(role, refs, memory) for _ in range(1 + options.repeats)][1:]  # the first makes the optimizer
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    medians = {part: round(statistics.median(each[part] for each in steps), 2) for part in PARTS}
    return {
        "label": options.label,
        "sequences": options.sequences,
        "tokens": sum(lengths),
        **medians,
        "step": round(sum(medians.values()), 2),
        "rss_mib": resident >> 20,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "states_mib": STATE_BYTES * parameters >> 20,
    }


def others(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the last result that ``own`` does not replace."""
    target = RESULTS / "step_parts.json"
    rows = json.loads(target.read_text())["rows"] if target.exists() else []
    return [row for row in rows if (row["label"], row["sequences"]) != (own["label"], own["sequences"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--label", default="now")
    options = parser.parse_args()
    device = prepare_device(0, 1)
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_model(PRESETS["135m"], Path(folder), positions=128, dtype="bfloat16", tied=True)
        row = measure(Path(folder), parameters, options, device)
    rows = sorted([*others(row), row], key=lambda each: (each["sequences"], each["label"]))
    report("step_parts", rows, {"parameters": parameters, "repeats": options.repeats})


if __name__ == "__main__":
    main()
