"""Memory of ModelWorkers over many train steps: resident size, held samples, live tensors.

    python -m benchmarks.memory [--steps 1000]

Two real ranks (data parallel, gloo) serve what the master would send them: groups of ever new answers arrive, heavy
in the tail; transfers bring them where the plan wants them; actor_inf; actor_train with two minibatches; clear. A rank
should hold nothing after each clear:

    samples, arrays_kib   in the DataManager
    tensors, tensors_kib  alive in the process: parameters, gradients, optimizer state, and leaks
    rss_mib               resident memory; ``slope`` is the fitted growth per 1,000 steps after the first tenth

Growth of native memory shows in rss only; allocators keep freed memory, so its first steps are left out.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict

import numpy as np

from benchmarks._table import report
from tests.support.training.memory_run import COMPLETIONS, GROUPS, Held, run


def slope(history: list[Held]) -> float:
    """MiB per 1,000 steps of resident memory after the first tenth of the steps."""
    late = [held for held in history if held.step >= history[-1].step / 10]
    return float(1000 * np.polyfit([held.step for held in late], [held.rss_bytes for held in late], 1)[0] / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    started = time.perf_counter()
    histories = run(options.steps, every=max(1, options.steps // 50))
    seconds = time.perf_counter() - started
    shown = np.unique(np.linspace(0, len(histories[0]) - 1, 6).astype(int))
    rows = [
        {
            "rank": rank,
            "step": held.step,
            "samples": held.samples,
            "arrays_kib": round(held.array_bytes / 2**10, 1),
            "tensors": held.tensors,
            "tensors_kib": round(held.tensor_bytes / 2**10, 1),
            "rss_mib": round(held.rss_bytes / 2**20, 1),
        }
        for rank, history in enumerate(histories)
        for held in (history[i] for i in shown)
    ]
    slopes = {f"slope_mib_rank{rank}": round(slope(history), 2) for rank, history in enumerate(histories)}
    meta = {"steps": options.steps, "seconds": round(seconds, 1), "sequences": GROUPS * COMPLETIONS, **slopes}
    report("memory", rows, meta)
    forgotten = [asdict(held) for history in histories for held in history if held.samples or held.array_bytes]
    if forgotten:
        raise SystemExit(f"samples are held after clear: {forgotten[0]}")


if __name__ == "__main__":
    main()
