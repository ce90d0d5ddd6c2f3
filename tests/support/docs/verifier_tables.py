"""Tables of the verifiers: one function per table, by the name in its mark (figures.py)."""

from tests.support.docs.figures import load
from tests.support.docs.table_layout import listing
from tests.support.sandbox.attacks import read_attacks


def math_verifier() -> str:
    columns = {"source": "{source}", "cases": "{cases:,}", "agreement": "{agreement:.2f} %"}
    return listing(columns, load("math_verifier")["rows"])


def reward_service() -> str:
    columns = {
        "verifiers": "{verifiers}",
        "load": "{load}",
        "verdicts/s": "{verdicts/s:,.0f}",
        "client per verdict": "{client us per verdict:,.0f} us",
        "one group, p50": "{alone p50 ms:,.1f} ms",
        "p99": "{alone p99 ms:,.1f} ms",
    }
    return listing(columns, load("reward_service")["rows"])


def code_reward() -> str:
    columns = {
        "tests": "`{tests}`",
        "verdicts/s": "**{verdicts_per_s:.0f}**",
        "bare subprocesses/s": "{bare_per_s:.0f}",
        "ratio": "{of_bare:.1f}",
        "median": "{p50_ms:.1f} ms",
        "99 %": "{p99_ms:.1f} ms",
        "CPU time": "{cpu_ms:.1f} ms",
        "CPU time, bare": "{bare_cpu_ms:.1f} ms",
    }
    return listing(columns, load("code_reward")["rows"])


def code_neighbours() -> str:
    """Table of the folders of attacks: how much slower a neighbour is, least and greatest."""
    folders: dict[str, list[dict[str, float]]] = {}
    for row in load("code_neighbours")["rows"]:
        folders.setdefault(row["attack"].removeprefix("all of ").partition("/")[0], []).append(row)
    columns = {
        "attacks": "`{folder}`",
        "slower than beside an idle core": "{slower}",
        "than beside a harmless program": "{slower_than_busy}",
    }
    rows = [
        {"folder": folder, **{name: _span([row[name] for row in rows]) for name in ("slower", "slower_than_busy")}}
        for folder, rows in folders.items()
    ]
    return listing(columns, rows)


def _span(percents: list[float]) -> str:
    low, high = min(percents), max(percents)
    return f"{low:.1f} %" if low == high else f"{low:.1f} to {high:.1f} %"


def attacks() -> str:
    """Table of the folders of attacks, with the names of the programs in each."""
    folders: dict[str, list[str]] = {}
    for attack in read_attacks():
        folder, _, name = attack.name.partition("/")
        folders.setdefault(folder, []).append(name.replace("_", " "))
    columns = {"folder": "`{folder}`", "attacks": "{attacks}", "programs": "{programs}"}
    return listing(
        columns,
        [{"folder": folder, "attacks": len(names), "programs": ", ".join(names)} for folder, names in folders.items()],
    )
