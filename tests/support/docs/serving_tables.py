"""Tables of servers, weights and messages: one function per table, by the name in its mark (figures.py)."""

from collections.abc import Sequence

from tests.support.docs.figures import load, row_of, rows_of
from tests.support.docs.training_tables import listing, table
from tests.support.sandbox.attacks import read_attacks


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


def prefix_cache() -> str:
    columns = {
        "conversations": "{case}",
        "cache": "{cache}",
        "prefilled over new tokens": "{prefilled_over_new:.2f}",
        "hit rate": "{hit_rate:.3f}",
        "time": "{seconds:.0f} s",
        "time over that without": "{seconds_over_off:.3f}",
        "CPU time": "{cpu_s:.1f} s",
        "CPU time over that without": "{cpu_s_over_off:.3f}",
    }
    return listing(columns, load("prefix_cache")["rows"])


def weights() -> str:
    copy, stage, pause = (row_of("weights", what=what) for what in ("file copy", "stage", "pause"))
    rows = [
        ("size of the version, in bf16", f"{load('weights')['meta']['GB']:.2f} GB", ""),
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
    updating = f"{row_of('router_updates', time='during an update')['p99 ms']:.1f} ms"
    return f"{listing(columns, load('router')['rows'])}\n| manager, during a weight update | | | {updating} | | |"


def streams() -> str:
    columns = {
        "stream": "{stream}",
        "tokens": "{tokens:,}",
        "trajectories/s": "{trajectories/s:,.0f}",
        "MB/s": "{MB/s:,.0f}",
        "of bare ZMQ (lowest - highest)": "**{of bare:.2f}** ({lowest:.2f} - {highest:.2f})",
        "with keys": "{with keys:.2f}",
    }
    return listing(columns, load("streams")["rows"])


def streams_of_a_run() -> str:
    """Compare what 64 of the fastest servers measured would push with what one stream carries."""
    tokens_per_s = 64 * max(row["http"] for row in load("generation")["rows"])
    columns = {
        "tokens": "{tokens:,}",
        "trajectories/s of 64 servers": "{rate:,.0f}",
        "share of one stream": "{share:.1f} %",
        "share of bare ZMQ": "{bare:.1f} %",
    }
    rows = []
    for row in rows_of("streams", stream="push-pull"):
        rate = tokens_per_s / row["tokens"]
        share = 100 * rate / row["trajectories/s"]
        rows.append(row | {"rate": rate, "share": share, "bare": share * row["of bare"]})
    return listing(columns, rows)


def targets() -> str:
    columns = {"target": "`{target}`", "minutes": "{minutes}", "beside four busy loops": "{loaded}"}
    rows = load("tests")["rows"]
    return listing(
        columns,
        [row | {"minutes": _minutes(row["seconds"]), "loaded": _minutes(row["loaded_seconds"])} for row in rows],
    )


def _minutes(seconds: int | None) -> str:
    return "" if seconds is None else f"{seconds // 60}:{seconds % 60:02}"


# ---- Tables of the verifiers: one function per table, by the name in its mark (figures.py)


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
