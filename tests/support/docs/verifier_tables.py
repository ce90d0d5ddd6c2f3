"""Tables of the math verifier: one function per table, by the name in its mark (figures.py)."""

from __future__ import annotations

from realsys.reward.mathematics.final_answers import boxes
from tests.support.docs.figures import load, row_of
from tests.support.docs.table_layout import listing


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
