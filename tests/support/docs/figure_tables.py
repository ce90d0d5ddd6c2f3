"""What the marks `<!-- figures: NAME -->` of the pages stand for: tables of results, of the code, and of its layers."""

import tomllib
from collections.abc import Callable

from realsys.observe.spans import SPANS
from tests.support.docs import serving_tables, training_tables
from tests.support.docs.figures import ROOT, load, row_of, rows_of
from tests.support.docs.memory_settings import memory_settings, one_gpu
from tests.support.docs.training_tables import table


def readme_results() -> str:
    """Table of the README: one line per claim."""
    arith = load("arith")["rows"]
    before = [row["before"] for row in arith]
    after = [row["after"] for row in arith]
    smol, sums = load("smol")["meta"], [row_of("smol", what=what) for what in ("before", "after")]
    asynchronous = row_of("async_vs_sync", groups=64, mode="async")
    small, large = ({row["step"]: row for row in rows_of("train_step", model=model)} for model in ("arith", "10m"))
    sizes = " and ".join(training_tables.millions(rows["realsys"]["parameters"]) for rows in (small, large))
    engine = row_of("generation", lengths="equal", concurrent=32)
    pause = row_of("weights", what="pause")
    ledger = load("ledger_cost")["meta"]["on_over_off"]["tokens_per_s"]
    chaos = load("chaos")["meta"]
    return table(
        ("measured", "result", "compared with"),
        [
            (
                f"held-out accuracy of `experiment=arith`, {len(arith)} seeds",
                f"{min(before):.1f} - {max(before):.1f} % before, **{min(after):.1f} - {max(after):.1f} %** after",
                f"{max(row['seconds'] for row in arith) / 60:.0f} minutes of training on two cores",
            ),
            (
                "held-out accuracy of `make smol`: SmolLM2-135M-Instruct, sums",
                f"{sums[0]['accuracy']:.1f} % before, **{sums[1]['accuracy']:.1f} %** after",
                f"{smol['steps']} steps in {smol['seconds'] / 60:.0f} minutes on two cores with other work",
            ),
            (
                "steps per hour, asynchronous over synchronous",
                f"**{asynchronous['async_over_sync']:.2f}**",
                f"{asynchronous['limit']:.2f} with perfect overlap on this machine; one run of each",
            ),
            (
                f"PPO step over a padded `transformers` loop, {sizes} parameters",
                f"**{small['padded (8)']['speedup']:.1f} x** and **{large['padded (8)']['speedup']:.1f} x** as fast",
                f"{small['padded_best (1)']['speedup']:.1f} x and {large['padded_best (1)']['speedup']:.1f} x against "
                "the fastest padded loop",
            ),
            (
                "embedded engine over HTTP, 32 sequences",
                f"{engine['http']:,.0f} tokens/s",
                f"**{engine['http_vs_transformers']:.2f} x** `transformers.generate`",
            ),
            (
                f"pause of a weight update, {load('weights')['meta']['GB']:.2f} GB",
                f"{1e3 * pause['seconds']:.0f} ms",
                f"{pause['ratio']:.2f} of a copy in memory",
            ),
            (
                "throughput with ledger, leases and acknowledgements",
                f"{ledger['mean']:.3f} (standard error {ledger['error']:.3f})",
                "the same job without them",
            ),
            (
                f"{chaos['faults']} faults in {chaos['runs']} whole runs",
                f"{chaos['survived']} survived, {chaos['ended']} ended with the right error",
                f"{chaos['lost']} tickets lost, {chaos['twice']} trained twice",
            ),
        ],
    )


def layers() -> str:
    """Drawing of the import rule: the layers of import-linter, the highest first."""
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    lines = [layer.replace("realsys.", "") for layer in rules[0]["layers"]]
    return "\n".join(["```", *lines, "```"])


def spans() -> str:
    """Table of all spans: who records each of them, and what it means."""
    return table(
        ("span", "recorded by", "meaning"), [(f"`{name}`", *text.split(": ", 1)) for name, text in SPANS.items()]
    )


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        readme_results,
        layers,
        memory_settings,
        one_gpu,
        spans,
        training_tables.arith,
        training_tables.smol,
        training_tables.step_parts,
        training_tables.train_step,
        training_tables.train_throughput,
        training_tables.dp_balance,
        training_tables.microbatch,
        training_tables.async_vs_sync,
        training_tables.cookbook,
        training_tables.memory,
        training_tables.control_plane,
        training_tables.soak,
        serving_tables.generation,
        serving_tables.interruption,
        serving_tables.prefill,
        serving_tables.prefix_cache,
        serving_tables.weights,
        serving_tables.router,
        serving_tables.streams,
        serving_tables.streams_of_a_run,
        serving_tables.targets,
        training_tables.round_trip,
        training_tables.shared_prefixes,
        training_tables.device_turns,
        training_tables.ledger_cost,
        training_tables.agreement,
        training_tables.simulate,
        training_tables.lending,
        training_tables.planner,
        training_tables.published,
        training_tables.staleness,
        training_tables.slow_prompts,
        serving_tables.math_verifier,
        serving_tables.reward_service,
        serving_tables.code_reward,
        serving_tables.code_neighbours,
        serving_tables.attacks,
    )
}
