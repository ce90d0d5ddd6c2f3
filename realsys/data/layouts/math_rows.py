"""Layouts of mathematics: one problem with a final answer."""

from __future__ import annotations

from realsys.data.layouts.contract import ProblemRow, RowError, Values, answer_text, others, take, text

_MARK = "####"
_BOX = "\\boxed"


def gsm8k(row: Values) -> ProblemRow:
    """``question``, and ``answer``: a worked solution whose last line is ``#### 18``. The solution stays in extra."""
    solution = text(row, "answer")
    reasoning, mark, final = solution.rpartition(_MARK)
    final = final.strip().replace(",", "")
    if not mark or not final:
        raise RowError("answer", f"must end with a line {_MARK} and the final answer")
    return ProblemRow(text(row, "question"), final, others(row, "question", "answer") | {"solution": reasoning.strip()})


def math(row: Values) -> ProblemRow:
    """MATH and MATH-500: ``problem`` and ``solution``, whose last box is the answer if there is no ``answer``."""
    solution = text(row, "solution")
    answer = last_box(solution, "solution") if row.get("answer") is None else answer_text(row["answer"], "answer")
    return ProblemRow(text(row, "problem"), answer, others(row, "problem", "answer"))


def problem_answer(row: Values) -> ProblemRow:
    """DeepScaleR and others: ``problem`` and a final ``answer``; a ``solution`` stays in extra."""
    return ProblemRow(
        text(row, "problem"), answer_text(take(row, "answer"), "answer"), others(row, "problem", "answer")
    )


def last_box(solution: str, field: str) -> str:
    """Return what the last ``\\boxed{...}`` or ``\\fbox{...}`` contains, braces balanced. Raises RowError."""
    start = max(solution.rfind(_BOX), solution.rfind("\\fbox"))
    if start < 0:
        raise RowError(field, f"has no {_BOX}: it is the final answer")
    rest = solution[solution.index("b", start) :].removeprefix("boxed").removeprefix("box").lstrip()
    if not rest.startswith("{"):  # \boxed 7
        answer = rest.partition("$")[0].split()
        if not answer:
            raise RowError(field, f"ends after {_BOX}")
        return answer[0]
    depth, escaped = 0, False
    for position, character in enumerate(rest):
        depth += 0 if escaped else {"{": 1, "}": -1}.get(character, 0)
        escaped = character == "\\" and not escaped
        if depth == 0:
            return _not_empty(rest[1:position].strip(), field)
    raise RowError(field, f"has a {_BOX} whose braces are not closed")


def _not_empty(answer: str, field: str) -> str:
    if not answer:
        raise RowError(field, f"has an empty {_BOX}")
    return answer
