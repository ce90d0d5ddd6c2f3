"""The tables of measured figures: one function per table, by the name in its mark (figures.py)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from realsys.reward.mathematics.final_answers import boxes
from tests.support.docs.figures import load, row_of, rows_of


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table without a final newline."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines).replace("|  |", "| |")


def listing(columns: Mapping[str, str], rows: Iterable[Mapping[str, object]]) -> str:
    """Return a table of ``rows``. ``columns`` maps a heading to the format of a cell, such as ``{seconds:.1f} s``."""
    return table(list(columns), ([cell.format_map(row) for cell in columns.values()] for row in rows))


def millions(parameters: int) -> str:
    return f"{parameters / 1e6:.1f}M"


def readme_results() -> str:
    """Table of the README: one line per claim."""
    arith = load("arith")["rows"]
    before = [row["before"] for row in arith]
    after = [row["after"] for row in arith]
    asynchronous = row_of("async_vs_sync", groups=64, mode="async")
    steps = {row["step"]: row for row in rows_of("train_step", model="arith")}
    engine = row_of("generation", lengths="equal", concurrent=32)
    pause = row_of("weights", what="pause")
    ledger = load("ledger_cost")["meta"]["on_over_off"]
    chaos = load("chaos")["meta"]
    return table(
        ("measured", "result", "compared with"),
        [
            (
                f"held-out accuracy of `experiment=arith`, {len(arith)} seeds",
                f"{min(before):.1f} - {max(before):.1f} % before, **{min(after):.1f} - {max(after):.1f} %** after",
                f"{max(row['seconds'] for row in arith) // 60} minutes of training on two cores",
            ),
            (
                "steps per hour, asynchronous over synchronous",
                f"**{asynchronous['async_over_sync']:.2f}**",
                f"{asynchronous['limit']:.2f} with perfect overlap on this machine",
            ),
            (
                "PPO step over a padded `transformers` loop",
                f"**{steps['padded (8)']['speedup']:.1f} x** as fast",
                f"{steps['padded_best (1)']['speedup']:.1f} x against the fastest padded loop",
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


def arith() -> str:
    columns = {
        "seed": "{seed}",
        "before": "{before:.1f} %",
        "after": "{after:.1f} %",
        "minutes": "{minutes}:{rest:02d}",
        "staleness mean / max": "{staleness_mean:.2f} / {staleness_max}",
    }
    rows = load("arith")["rows"]
    return listing(columns, [row | {"minutes": row["seconds"] // 60, "rest": row["seconds"] % 60} for row in rows])


def step_parts() -> str:
    parts = ("inference", "gradient", "optimizer", "copy")

    def cells(row: dict[str, float]) -> Sequence[str]:
        seconds = [f"{row[part]:.2f}" for part in parts]
        return f"{row['tokens']:,}", str(row["label"]), *seconds, f"{row['rss_mib']:,}", f"{row['peak_mib']:,}"

    head = ("tokens", "", *parts, "MiB between steps", "MiB at the peak")
    return table(head, [cells(row) for row in load("step_parts")["rows"]])


def train_step() -> str:
    def cells(row: dict[str, float]) -> Sequence[str]:
        ours = row["step"] == "realsys"
        speed = f"{row['tokens/s']:,}"
        faster = "" if ours else f"{row['speedup']:.1f} ({row['least']:.1f} - {row['greatest']:.1f})"
        name = f"**{row['step']}**" if ours else str(row["step"])
        return millions(row["parameters"]), name, f"{row['real_%']:.0f} %", f"**{speed}**" if ours else speed, faster

    head = ("parameters", "step", "real", "tokens/s", "realsys is faster by (least - greatest)")
    return table(head, [cells(row) for row in load("train_step")["rows"]])


def train_throughput() -> str:
    columns = {
        "parameters": "{size}",
        "capacity": "{capacity:,}",
        "fixed": "{fixed[tokens/s]:,}",
        "Algorithm 1": "{algorithm_1[tokens/s]:,}",
        "dynamic (default)": "**{tokens/s:,}**",
        "micro-batches fixed / dynamic": "{fixed[microbatches]} / {microbatches}",
        "dynamic over fixed (least - greatest)": "**{over_fixed:.2f}** ({least:.2f} - {greatest:.2f})",
        "MFU of dynamic": "{mfu_%:.0f} %",
    }

    def joined(row: Mapping[str, Any]) -> Mapping[str, Any]:
        at = {"model": row["model"], "capacity": row["capacity"]}
        others = {mode: row_of("train_throughput", mode=mode, **at) for mode in ("fixed", "algorithm_1")}
        return {**row, **others, "size": millions(row["parameters"])}

    return listing(columns, map(joined, rows_of("train_throughput", mode="dynamic")))


def dp_balance() -> str:
    columns = {
        "sequences in a minibatch": "{sequences:,}",
        "ranks": "{ranks}",
        "round robin": "{round_robin:.3f}",
        "equal count": "{equal_count:.3f}",
        "`balance=tokens`": "{tokens:.3f}",
        "`balance=flops`": "{flops:.3f}",
        "bound": "{bound:.3f}",
    }
    return listing(columns, rows_of("dp_balance", lengths="heavy"))


def async_vs_sync() -> str:
    names = {"sync": "eta 0, synchronous", "async": "eta 4, asynchronous"}

    def cells(row: dict[str, float]) -> Sequence[str]:
        done = row["async_over_sync"] is not None
        return (
            str(row["groups"]),
            names[str(row["mode"])],
            f"{row['steps_per_hour']:,.0f}",
            f"{row['consumed_tokens_per_s']:,.0f}",
            f"{row['wait_s']:.2f} s",
            f"{row['inf_s'] + row['train_s']:.2f} s",
            f"**{row['async_over_sync']:.2f}**" if done else "",
            f"{row['limit']:.2f}" if done else "",
        )

    head = ("prompts per batch", "mode", "steps/h", "tokens/s trained", "waits for generation", "infers and trains")
    return table((*head, "ratio", "limit"), [cells(row) for row in load("async_vs_sync")["rows"]])


def generation() -> str:
    def cells(row: dict[str, float]) -> Sequence[str]:
        bare = row.get("bare_loop")
        return (
            str(row["lengths"]),
            str(row["concurrent"]),
            f"{row['http']:,.0f}",
            f"{row['transformers']:,.0f}",
            f"**{row['http_vs_transformers']:.2f}**",
            "" if bare is None else f"{bare:,.0f}",
        )

    head = ("lengths", "concurrent", "engine over HTTP", "`transformers.generate`", "ratio", "bare decode loop")
    return table(head, [cells(row) for row in load("generation")["rows"]])


def interruption() -> str:
    columns = {
        "running": "{running}",
        "longest completion": "{longest:,}",
        "interrupting over draining": "{gain_percent:+.0f} %",
        "wait for a drain": "{drain_s:.1f} s",
        "pause of an interruption": "{pause_ms:.1f} ms",
    }
    rows = rows_of("interruption", mode="interrupt")
    return listing(columns, [row | {"drain_s": _drained(row) / 1e3} for row in rows])


def _drained(row: dict[str, object]) -> float:
    at = {name: row[name] for name in ("running", "longest", "batches")}
    return float(row_of("interruption", mode="drain", **at)["drain_ms"])


def prefill() -> str:
    columns = {
        "`prefill_tokens`": "{prefill_tokens:,}",
        "longest gap between tokens of the others": "{longest_gap_ms:.0f} ms",
        "first token of the long prompt": "{first_token_ms:.0f} ms",
    }
    return listing(columns, load("prefill")["rows"])


def weights() -> str:
    copy, stage, pause = (row_of("weights", what=what) for what in ("file copy", "stage", "pause"))
    rows = [
        ("file copy", f"{copy['GB/s']:.1f} GB/s", ""),
        ("staging with verification", f"{stage['GB/s']:.1f} GB/s", f"{stage['ratio']:.1f} x the file copy"),
        ("pause", f"{1e3 * pause['seconds']:.0f} ms", f"{pause['ratio']:.2f} x a copy in memory"),
    ]
    for rate in ("1e-06", "1e-05"):
        written, write_s, stage_s = (
            row_of("weights", what=f"delta at lr {rate}: {what}") for what in ("bytes_written", "write_s", "stage_s")
        )
        rows.append(
            (
                f"delta after Adam at lr {rate}",
                f"{100 * written['ratio']:.1f} % of the bytes",
                f"written in {write_s['ratio']:.2f}, staged in {stage_s['ratio']:.1f} of the time of a whole version",
            )
        )
    return table(("what", "measured", "compared with"), rows)


def router() -> str:
    columns = {
        "server": "{contender}",
        "requests/s": "{requests/s:,.0f}",
        "p50": "{p50 ms:.1f} ms",
        "p99": "{p99 ms:.1f} ms",
        "of bare FastAPI": "{of fastapi:.2f}",
        "of a bare msgspec handler": "{of fastapi, msgspec:.2f}",
    }
    return listing(columns, load("router")["rows"])


def streams() -> str:
    columns = {
        "stream": "{stream}",
        "tokens": "{tokens:,}",
        "trajectories/s": "{trajectories/s:,.0f}",
        "MB/s": "{MB/s:,.0f}",
        "of bare ZMQ (lowest - highest)": "**{of bare:.2f}** ({lowest:.2f} - {highest:.2f})",
    }
    return listing(columns, load("streams")["rows"])


def control_plane() -> str:
    """Table of a train step of the control plane, before and after each worker got its own part."""
    columns = {
        "workers": "workers",
        "transfer, KB": "transfer KB each",
        "call, KB": "mfc KB each",
        "transfer, ms": "transfer ms",
        "call, ms": "mfc ms",
        "empty, ms": "empty ms",
        "transfer, loop ms": "transfer loop ms",
        "call, loop ms": "mfc loop ms",
        "planning, ms": "moves ms",
    }
    before = {row["workers"]: row for row in load("control_plane_before")["rows"]}
    rows = []
    for row in load("control_plane")["rows"]:
        pairs = [(before[row["workers"]][column], row[column]) for column in list(columns.values())[1:]]
        rows.append([f"{row['workers']}", *(f"{_rounded(old)} -> {_rounded(new)}" for old, new in pairs)])
    return table(list(columns), rows)


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def microbatch() -> str:
    names = {
        "fixed": "fixed count, safe for the longest",
        "same_count": "same count of sequences each",
        "fewest_sequences": "Algorithm 1",
        "first_fit": "first fit",
        "balanced (default)": "balanced (default)",
    }
    columns = {
        "sequences": "{sequences:,}",
        "packer": "{name}",
        "micro-batches": "{batches:,.1f}",
        "over ceil(sum/C)": "{over_bound_%:,.2f} %",
        "largest / mean": "{max/mean:.3f}",
        "largest / C": "{peak:.2f}",
        "time": "{ms:.2f} ms",
    }
    return listing(columns, [row | {"name": names[row["packer"]]} for row in rows_of("microbatch", lengths="heavy")])


def memory() -> str:
    columns = {
        "after step": "{step}",
        "samples held": "{samples}",
        "arrays held": "{arrays_kib:.1f} KiB",
        "live tensors": "{tensors} ({tensors_kib:.1f} KiB)",
        "resident, rank 0": "{rss_mib:.1f} MiB",
        "rank 1": "{other[rss_mib]:.1f} MiB",
    }
    rows = rows_of("memory", rank=0)
    return listing(columns, [row | {"other": row_of("memory", rank=1, step=row["step"])} for row in rows])


def ratios(head: str, digits: int, rows: Mapping[str, Mapping[str, object]]) -> str:
    """Return a table of ratios. ``rows`` maps a name to ``mean``, ``error``, ``least`` and ``greatest``."""
    columns = {
        head: "{name}",
        "mean": f"**{{mean:.{digits}f}}**",
        "standard error": f"{{error:.{digits}f}}",
        "least - greatest": "{least:.2f} - {greatest:.2f}",
    }
    return listing(columns, [{**row, "name": name} for name, row in rows.items()])


def ledger_cost() -> str:
    meta = load("ledger_cost")["meta"]
    rows = {"throughput": meta["on_over_off"], "CPU seconds per token": meta["cpu_on_over_off"]}
    return ratios("with over without", 3, rows)


def math_verifier() -> str:
    columns = {"source": "{source}", "cases": "{cases:,}", "agreement": "{agreement:.2f} %"}
    return listing(columns, load("math_verifier")["rows"])


def math_disagreements() -> str:
    columns = {
        "line": "{line}",
        "reference": "`{gold}`",
        "last box": "`{box}`",
        "grade": "{grade}",
        "verdict": "{verdict}",
    }
    words = {True: "right", False: "wrong"}
    found = row_of("math_verifier", source="all")["disagreements"]
    rows = [
        {
            **case,
            "box": boxes(case["pred"])[-1].content,
            "grade": words[case["expected"]],
            "verdict": words[case["given"]],
        }
        for case in found
    ]
    return listing(columns, rows)


def before_after() -> str:
    meta = load("before_after")["meta"]["now_over_before"]
    rows = {"tokens/s trained": meta["tokens_per_s"], "CPU seconds per token": meta["cpu_s_per_1k"]}
    return ratios("now over before", 2, rows)


def soak() -> str:
    names = {
        "launcher": "launcher",
        "gserver_manager/0": "GserverManager",
        "generation_server/0": "GenerationServer",
        "model_worker/0": "ModelWorker",
        "master_worker/0": "MasterWorker",
        "rollout_worker/0": "RolloutWorker 0",
        "rollout_worker/1": "RolloutWorker 1",
    }
    columns = {
        "process": "{name}",
        "resident, MiB": "{rss_mib[mean]:.1f}",
        "MiB per 100 steps (error)": "{rss_mib[per_100_steps]:.2f} ({rss_mib[error]:.2f})",
        "second half": "{rss_mib[last_half]:.2f}",
        "descriptors": "{fds[mean]:.0f}",
        "threads": "{threads[mean]:.0f}",
        "verdict": "{rss_mib[verdict]}",
    }
    figures = ("rss_mib", "fds", "threads")
    rows = [{figure: row_of("soak", what=what, figure=figure) for figure in figures} for what in names]
    return listing(columns, [row | {"name": name} for row, name in zip(rows, names.values(), strict=True)])


def agreement() -> str:
    columns = {
        "versions": "{versions}",
        "tokens compared": "{tokens compared:,}",
        "mean difference": "{mean}",
        "largest difference": "{max}",
        "warnings": "{warnings}",
    }
    return listing(columns, load("agreement")["rows"])


def simulate() -> str:
    """Table of the staleness policies in simulated trials."""
    names = ("scenario", "size", "policy", "steps/h", "of_unbounded", "busy_%", "wasted_%", "ks", "most_issues")
    formats = ("", "", "", ".1f", ".2f", ".0f", ".1f", ".3f", "")
    head = (
        "scenario",
        "servers x workers",
        "policy",
        "steps/h",
        "of eta=50",
        "busy %",
        "wasted %",
        "KS",
        "most issues",
    )
    rows = load("simulate")["rows"]
    return table(head, [[format(row[name], spec) for name, spec in zip(names, formats, strict=True)] for row in rows])


def staleness() -> str:
    """Table of plain and decoupled PPO: per eta the staleness reached, and accuracies with standard errors."""
    rows = load("staleness")["rows"]
    lines = []
    for eta in dict.fromkeys(row["eta"] for row in rows):
        arms = [[row for row in rows if row["arm"] == arm and row["eta"] == eta] for arm in ("decoupled", "plain")]
        lags = " / ".join(f"{statistics.fmean(row['staleness'] for row in arm):.1f}" for arm in arms)
        early = [[100 * statistics.fmean(row["curve"][:_EARLY_STEPS]) for row in arm] for arm in arms]
        after = [[100 * row["after"] for row in arm] for arm in arms]
        lines.append((f"{eta}", lags, *_compared(early), *_compared(after)))
    parts = [f"steps 1 to {_EARLY_STEPS}", "after training"]
    names = [f"{part}: {name}" for part in parts for name in ("decoupled %", "plain %", "difference")]
    return table(("eta", "mean staleness", *names), lines)


def slow_prompts() -> str:
    """Table of the staleness policies in real runs whose long prompts are slow."""
    columns = {
        "policy": "`{policy}`",
        "lost to staleness": "{lost_%:.1f} %",
        "KS": "{ks:.3f}",
        "long prompts trained": "{long_%:.1f} %",
        "mean completion": "{length:.1f} tokens",
        "mean / largest staleness": "{staleness:.1f} / {staleness_max}",
        "steps/h": "{steps_per_h:,.0f}",
        "accuracy after": "{after_%:.1f} %",
    }
    return listing(columns, [row | {"after_%": 100 * row["after"]} for row in load("slow_prompts")["rows"]])


_EARLY_STEPS = 60


def _compared(arms: Sequence[Sequence[float]]) -> list[str]:
    """Return mean and standard error of both arms, and of their difference."""
    means = [statistics.fmean(arm) for arm in arms]
    errors = [statistics.stdev(arm) / math.sqrt(len(arm)) for arm in arms]
    gap = f"{means[0] - means[1]:+.1f} ± {math.hypot(*errors):.1f}"
    return [*(f"{mean:.1f} ± {error:.1f}" for mean, error in zip(means, errors, strict=True)), gap]


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        readme_results,
        arith,
        step_parts,
        train_step,
        train_throughput,
        dp_balance,
        async_vs_sync,
        generation,
        interruption,
        prefill,
        weights,
        router,
        streams,
        control_plane,
        microbatch,
        memory,
        ledger_cost,
        math_verifier,
        math_disagreements,
        before_after,
        soak,
        agreement,
        simulate,
        staleness,
        slow_prompts,
    )
}
