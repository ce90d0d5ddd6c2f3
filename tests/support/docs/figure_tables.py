"""The tables of measured figures: one function per table, by the name in its mark (figures.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tests.support.docs.figures import load, row_of, rows_of


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table without a final newline."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines).replace("|  |", "| |")


def millions(parameters: int) -> str:
    return f"{parameters / 1e6:.1f}M"


def spread(row: dict[str, float]) -> str:
    return f"{row['least']:.2f} - {row['greatest']:.2f}"


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
    return table(
        ("seed", "before", "after", "minutes", "staleness mean / max"),
        [
            (
                str(row["seed"]),
                f"{row['before']:.1f} %",
                f"{row['after']:.1f} %",
                f"{row['seconds'] // 60}:{row['seconds'] % 60:02d}",
                f"{row['staleness_mean']:.2f} / {row['staleness_max']}",
            )
            for row in load("arith")["rows"]
        ],
    )


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
    rows = []
    for fixed in rows_of("train_throughput", mode="fixed"):
        at = {"model": fixed["model"], "capacity": fixed["capacity"]}
        first, dynamic = (row_of("train_throughput", mode=mode, **at) for mode in ("algorithm_1", "dynamic"))
        rows.append(
            (
                millions(fixed["parameters"]),
                f"{fixed['capacity']:,}",
                f"{fixed['tokens/s']:,}",
                f"{first['tokens/s']:,}",
                f"**{dynamic['tokens/s']:,}**",
                f"{fixed['microbatches']} / {dynamic['microbatches']}",
                f"**{dynamic['over_fixed']:.2f}** ({spread(dynamic)})",
                f"{dynamic['mfu_%']:.0f} %",
            )
        )
    head = ("parameters", "capacity", "fixed", "Algorithm 1", "dynamic (default)", "micro-batches fixed / dynamic")
    return table((*head, "dynamic over fixed (least - greatest)", "MFU of dynamic"), rows)


def dp_balance() -> str:
    names = ("round_robin", "equal_count", "tokens", "flops", "bound")
    head = ("sequences in a minibatch", "ranks", "round robin", "equal count", "`balance=tokens`", "`balance=flops`")
    return table(
        (*head, "bound"),
        [
            (f"{row['sequences']:,}", str(row["ranks"]), *(f"{row[name]:.3f}" for name in names))
            for row in rows_of("dp_balance", lengths="heavy")
        ],
    )


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
    return table(
        ("running", "longest completion", "interrupting over draining", "wait for a drain", "pause of an interruption"),
        [
            (
                str(row["running"]),
                f"{row['longest']:,}",
                f"{row['gain_percent']:+.0f} %",
                f"{_drained(row) / 1e3:.1f} s",
                f"{row['pause_ms']:.1f} ms",
            )
            for row in rows_of("interruption", mode="interrupt")
        ],
    )


def _drained(row: dict[str, object]) -> float:
    at = {name: row[name] for name in ("running", "longest", "batches")}
    return float(row_of("interruption", mode="drain", **at)["drain_ms"])


def prefill() -> str:
    return table(
        ("`prefill_tokens`", "longest gap between tokens of the others", "first token of the long prompt"),
        [
            (f"{row['prefill_tokens']:,}", f"{row['longest_gap_ms']:.0f} ms", f"{row['first_token_ms']:.0f} ms")
            for row in load("prefill")["rows"]
        ],
    )


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
    return table(
        ("server", "requests/s", "p50", "p99", "of bare FastAPI", "of a bare msgspec handler"),
        [
            (
                row["contender"],
                f"{row['requests/s']:,.0f}",
                f"{row['p50 ms']:.1f} ms",
                f"{row['p99 ms']:.1f} ms",
                f"{row['of fastapi']:.2f}",
                f"{row['of fastapi, msgspec']:.2f}",
            )
            for row in load("router")["rows"]
        ],
    )


def streams() -> str:
    return table(
        ("stream", "tokens", "trajectories/s", "MB/s", "of bare ZMQ (lowest - highest)"),
        [
            (
                row["stream"],
                f"{row['tokens']:,}",
                f"{row['trajectories/s']:,.0f}",
                f"{row['MB/s']:,.0f}",
                f"**{row['of bare']:.2f}** ({row['lowest']:.2f} - {row['highest']:.2f})",
            )
            for row in load("streams")["rows"]
        ],
    )


def microbatch() -> str:
    names = {
        "fixed": "fixed count, safe for the longest",
        "same_count": "same count of sequences each",
        "fewest_sequences": "Algorithm 1",
        "first_fit": "first fit",
        "balanced (default)": "balanced (default)",
    }
    head = ("sequences", "packer", "micro-batches", "over ceil(sum/C)", "largest / mean", "largest / C", "time")
    return table(
        head,
        [
            (
                f"{row['sequences']:,}",
                names[row["packer"]],
                f"{row['batches']:,.1f}",
                f"{row['over_bound_%']:,.2f} %",
                f"{row['max/mean']:.3f}",
                f"{row['peak']:.2f}",
                f"{row['ms']:.2f} ms",
            )
            for row in rows_of("microbatch", lengths="heavy")
        ],
    )


def memory() -> str:
    rows = []
    for row in rows_of("memory", rank=0):
        other = row_of("memory", rank=1, step=row["step"])
        rows.append(
            (
                str(row["step"]),
                str(row["samples"]),
                f"{row['arrays_kib']:.1f} KiB",
                f"{row['tensors']} ({row['tensors_kib']:.1f} KiB)",
                f"{row['rss_mib']:.1f} MiB",
                f"{other['rss_mib']:.1f} MiB",
            )
        )
    return table(("after step", "samples held", "arrays held", "live tensors", "resident, rank 0", "rank 1"), rows)


def ledger_cost() -> str:
    meta = load("ledger_cost")["meta"]
    names = {"on_over_off": "throughput", "cpu_on_over_off": "CPU seconds per token"}
    return table(
        ("with over without", "mean", "standard error", "least - greatest"),
        [
            (name, f"**{meta[key]['mean']:.3f}**", f"{meta[key]['error']:.3f}", spread(meta[key]))
            for key, name in names.items()
        ],
    )


def before_after() -> str:
    ratios = load("before_after")["meta"]["now_over_before"]
    names = {"tokens_per_s": "tokens/s trained", "cpu_s_per_1k": "CPU seconds per token"}
    return table(
        ("now over before", "mean", "standard error", "least - greatest"),
        [
            (name, f"**{ratios[key]['mean']:.2f}**", f"{ratios[key]['error']:.2f}", spread(ratios[key]))
            for key, name in names.items()
        ],
    )


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
    rows = []
    for what, name in names.items():
        resident, files, threads = (
            row_of("soak", what=what, figure=figure) for figure in ("rss_mib", "fds", "threads")
        )
        rows.append(
            (
                name,
                f"{resident['mean']:.1f}",
                f"{resident['per_100_steps']:.2f} ({resident['error']:.2f})",
                f"{resident['last_half']:.2f}",
                f"{files['mean']:.0f}",
                f"{threads['mean']:.0f}",
                resident["verdict"],
            )
        )
    head = ("process", "resident, MiB", "MiB per 100 steps (error)", "second half", "descriptors", "threads")
    return table((*head, "verdict"), rows)


def agreement() -> str:
    return table(
        ("versions", "tokens compared", "mean difference", "largest difference", "warnings"),
        [
            (row["versions"], f"{row['tokens compared']:,}", row["mean"], row["max"], str(row["warnings"]))
            for row in load("agreement")["rows"]
        ],
    )


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        readme_results,
        arith,
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
        microbatch,
        memory,
        ledger_cost,
        before_after,
        soak,
        agreement,
    )
}
