"""Tables of the math verifier: one function per table, by the name in its mark (figures.py)."""

from __future__ import annotations

from realsys.reward.mathematics.final_answers import boxes
from tests.support.docs.figures import load, row_of
from tests.support.docs.table_layout import listing


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
