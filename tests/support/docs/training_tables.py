"""Tables of the cost of training and of its processes: one function per table, by the name in its mark (figures.py)."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.support.docs.figures import load, row_of, rows_of


def arith() -> str:
    columns = {
        "run": "{run}",
        "before": "{before:.1f} %",
        "after": "{after:.1f} %",
        "minutes": "{minutes}",
        "staleness mean / max": "{staleness}",
    }
    rows = [
        {
            **row,
            "run": f"seed {row['seed']}",
            "minutes": f"{row['seconds'] // 60}:{row['seconds'] % 60:02d}",
            "staleness": f"{row['staleness_mean']:.2f} / {row['staleness_max']}",
        }
        for row in load("arith")["rows"]
    ]
    turns = {name: 100 * row_of("arith_multi_turn", eval_id=name)["accuracy"] for name in ("before", "after")}
    return listing(columns, [*rows, {**turns, "run": "two tries, 30 steps", "minutes": "", "staleness": ""}])


def smol() -> str:
    before, after, loaded = (row_of("smol", what=what) for what in ("before", "after", "transformers"))
    return table(
        ("accuracy on the held-out sums", "%", "95 % interval"),
        [
            ("before", f"{before['accuracy']:.1f}", f"{before['low']:.1f} - {before['high']:.1f}"),
            ("after", f"**{after['accuracy']:.1f}**", f"{after['low']:.1f} - {after['high']:.1f}"),
            ("the exported model in `transformers`, greedy", f"{loaded['accuracy']:.1f}", ""),
        ],
    )


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


def millions(parameters: int) -> str:
    return f"{parameters / 1e6:.1f}M"


def dp_balance() -> str:
    columns = {
        "sequences in a minibatch": "{sequences:,}",
        "ranks": "{ranks}",
        "round robin": "{round_robin:.3f}",
        "equal count": "{equal_count:.3f}",
        "`balance=tokens`": "{tokens:.3f}",
        "`balance=flops`": "{flops:.3f}",
        "bound": "{bound:.3f}",
        "time of a split by FLOPs": "{flops_ms:.1f} ms",
    }
    return listing(columns, rows_of("dp_balance", lengths="heavy"))


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


def async_vs_sync() -> str:
    names = {"sync": "max_staleness 0, synchronous", "async": "max_staleness 4, asynchronous"}

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


_CURVE_ENDS = (slice(10), slice(-10, None))  # steps


def cookbook() -> str:
    """Table of rl_loop and `realsys run` on the arith task: accuracies with standard errors over the runs."""
    meta = load("cookbook")["meta"]

    def cells(side: str, name: str) -> Sequence[str]:
        rows = rows_of("cookbook", side=side)
        means = [statistics.fmean(reward for row in rows for reward in row["curve"][part]) for part in _CURVE_ENDS]
        before, after = ([100 * row[field] for row in rows] for field in ("before", "after"))
        error = statistics.stdev(after) / math.sqrt(len(after))
        seconds = statistics.fmean(row["seconds"] for row in rows)
        accuracies = f"{statistics.fmean(before):.1f}", f"**{statistics.fmean(after):.1f}** ± {error:.1f}"
        return name, str(len(rows)), *accuracies, *(f"{mean:.2f}" for mean in means), f"{seconds:.0f} s"

    head = ("trained by", "runs", "before", "after", "mean reward, steps 1 to 10", "last 10 steps", "time of a run")
    lines = [cells("rl_loop", "`rl_loop` with `realsys serve`"), cells("realsys", "`realsys run`")]
    difference = f"{meta['difference_%']:+.1f} ± {meta['error_%']:.1f}"
    return table(head, [*lines, ("difference", "", "", difference, "", "", "")])


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


def control_plane() -> str:
    """Table of a train step of the control plane, before and after each worker got its own part."""
    columns = {
        "workers": "workers",
        "transfer, KB": "transfer KB each",
        "call, KB": "mfc KB each",
        "transfer, ms": "transfer ms",
        "call, ms": "mfc ms",
        "empty, ms": "empty ms",
        "bare, ms": "bare ms",
        "transfer, loop ms": "transfer loop ms",
        "call, loop ms": "mfc loop ms",
        "empty, loop ms": "empty loop ms",
        "bare, loop ms": "bare loop ms",
        "planning, ms": "moves ms",
    }
    before = {row["workers"]: row for row in load("control_plane_before")["rows"]}
    rows = []
    for row in load("control_plane")["rows"]:
        old = before[row["workers"]]
        pairs = [(old.get(column), row[column]) for column in list(columns.values())[1:]]
        changes = [("" if was is None else f"{_rounded(was)} -> ") + _rounded(now) for was, now in pairs]
        rows.append([f"{row['workers']}", *changes])
    return table(list(columns), rows)


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


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


def round_trip() -> str:
    *rows, total = load("round_trip")["rows"]
    lines = [(f"{row['process']} ({row['count']})", row["modules"]) for row in rows]
    everything = f"{total['records']} types of records (dataclasses)"
    return table(("process", "modules that run"), [*lines, (f"all together ({total['count']})", everything)])


def shared_prefixes() -> str:
    columns = {
        "model": "{model}",
        "rows": "{rows}",
        "prompt's share": "{shared:.0%}",
        "saved": "{saved:.0%}",
        "inference, tokens/s": "{inference_tokens_per_s:,.0f}",
        "over one by one": "**{inference_speedup:.2f}**",
        "training, tokens/s": "{train_tokens_per_s:,.0f}",
        "over one by one ": "**{train_speedup:.2f}**",
    }
    return listing(columns, load("shared_prefixes")["rows"])


def device_turns() -> str:
    columns = {
        "model": "{model}",
        "part": "{part}",
        "MB": "{mb:,.0f}",
        "ms": "{ms:,.0f}",
        "over a copy": "**{over:.2f}**",
    }
    return listing(columns, load("device_turns")["rows"])


# ---- Tables of staleness, ledger and agreement: one function per table, by the name in its mark (figures.py)


_EARLY_STEPS = 60


def ledger_cost() -> str:
    found = load("ledger_cost")["meta"]["on_over_off"]
    rows = {"throughput": found["tokens_per_s"], "CPU seconds per token": found["cpu_s_per_1k"]}
    return ratios("with over without", 3, rows)


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


def lending() -> str:
    """Table of servers that share devices with ranks, over the best fixed split of the same devices."""
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in load("lending")["rows"]:
        cases.setdefault(row["case"], {})[row["allocation"]] = row

    def speed(row: dict[str, Any]) -> float:
        return float(row["tokens_per_s"])

    def splits(case: str) -> list[dict[str, Any]]:
        return [row for row in cases[case].values() if row["form"] == "split"]

    def over(case: str, split: dict[str, Any], name: str) -> tuple[str, ...]:
        shares = [f"{speed(row) / speed(split):.2f}" for row in cases[case].values() if row["form"] != "split"]
        return name, split["allocation"], f"{speed(split):,.0f}", *shares

    before, after = max(splits("before"), key=speed), max(splits("after"), key=speed)
    rows = []
    for case in cases:
        rows.append(over(case, max(splits(case), key=speed), case))
        if case.startswith("growing"):
            rows.append(over(case, cases[case][before["allocation"]], f"{case}, over the split that is best before"))

    def both(first: dict[str, Any], second: dict[str, Any]) -> float:
        """Return the throughput of as many steps before the growth as after it, which have four times the tokens."""
        return 5 / (1 / speed(first) + 4 / speed(second))

    fixed = max(both(one, cases["after"][one["allocation"]]) for one in splits("before"))
    shared = [name.replace("|", chr(92) + "|") for name, row in cases["before"].items() if row["form"] != "split"]
    moved = f"`before` and `after`, a split that moves at no cost: {both(before, after) / fixed:.2f} of a fixed one"
    last = (
        moved,
        f"{before['allocation']}, {after['allocation']}",
        f"{both(before, after):,.0f}",
        *("" for _ in shared),
    )
    return table(("lengths", "split", "tokens/s", *(f"`{name}`" for name in shared)), [*rows, last])


def planner() -> str:
    """Table of the planner's predictions and of measurements, in steps per hour."""
    columns = {
        "run": "{case}",
        "settings": "{settings}",
        "predicted": "{predicted:,.0f}",
        "90 % interval": "{low:,.0f} to {high:,.0f}",
        "measured": "{measured:,.0f}",
        "error": "{error_%:+.0f} %",
        "inside": "{inside}",
    }
    rows = [
        {
            **row,
            "settings": f"`{row['settings']}`" if row["settings"] else "fitted",
            "inside": "yes" if row["inside"] else "no",
        }
        for row in load("planner")["rows"]
    ]
    meta = load("planner")["meta"]
    total = f"median {meta['median_error_%']:.0f} % | {meta['inside']} of {meta['others']}"
    return f"{listing(columns, rows)}\n| all but the first | | | | | {total} |"


def published() -> str:
    """Table of published ratios of asynchronous over synchronous training, and of the planner's."""
    columns = {
        "table": "{table}",
        "pair": "{name}",
        "parts of the synchronous step": "{parts}",
        "published": "{published:.2f}",
        "predicted": "{predicted:.2f}",
        "error": "{error_%:+.0f} %",
    }
    medians = load("published")["meta"]["median_error_%"]
    lines = [f"| {name} | median | | | | {error:.0f} % |" for name, error in medians.items()]
    return "\n".join([listing(columns, load("published")["rows"]), *lines])


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


def _compared(arms: Sequence[Sequence[float]]) -> list[str]:
    """Return mean and standard error of both arms, and of their difference."""
    means = [statistics.fmean(arm) for arm in arms]
    errors = [statistics.stdev(arm) / math.sqrt(len(arm)) for arm in arms]
    gap = f"{means[0] - means[1]:+.1f} ± {math.hypot(*errors):.1f}"
    return [*(f"{mean:.1f} ± {error:.1f}" for mean, error in zip(means, errors, strict=True)), gap]


# ---- Markdown tables of measured figures


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table without a final newline."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines).replace("|  |", "| |")


def listing(columns: Mapping[str, str], rows: Iterable[Mapping[str, object]]) -> str:
    """Return a table of ``rows``. ``columns`` maps a heading to the format of a cell, such as ``{seconds:.1f} s``."""
    return table(list(columns), ([cell.format_map(row) for cell in columns.values()] for row in rows))


def ratios(head: str, digits: int, rows: Mapping[str, Mapping[str, object]]) -> str:
    """Return a table of ratios. ``rows`` maps a name to ``mean``, ``error``, ``least`` and ``greatest``."""
    columns = {
        head: "{name}",
        "mean": f"**{{mean:.{digits}f}}**",
        "standard error": f"{{error:.{digits}f}}",
        "least - greatest": "{least:.2f} - {greatest:.2f}",
    }
    return listing(columns, [{**row, "name": name} for name, row in rows.items()])
