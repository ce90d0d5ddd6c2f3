"""Tables of staleness, ledger and agreement: one function per table, by the name in its mark (figures.py)."""

import math
import statistics
from collections.abc import Sequence

from tests.support.docs.figures import load
from tests.support.docs.table_layout import listing, ratios, table

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
