"""A layout of your own: questions with choices, whose answer is the number of the right one.

{"question": "Which is a prime?", "choices": ["8", "9", "11"], "answer": 2, "level": 1}
"""

from realsys.data.layouts import ProblemRow, RowError, Values, others, text, texts

LETTERS = "ABCDEFGH"


def choices(row: Values, question: str = "question") -> ProblemRow:
    options = texts(row, "choices")
    if row.get("answer") not in range(min(len(options), len(LETTERS))):
        raise RowError("answer", f"must be the number of one of the {len(options)} choices, from 0")
    lines = [f"{letter}) {option}" for letter, option in zip(LETTERS, options, strict=False)]
    prompt = "\n".join([text(row, question), *lines])
    return ProblemRow(prompt, LETTERS[row["answer"]], others(row, question, "choices", "answer"))
