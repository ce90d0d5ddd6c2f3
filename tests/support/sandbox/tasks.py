"""Short programming tasks in HumanEval's layout."""

from typing import Any


def _task(prompt: str, solution: str, asserts: list[str]) -> dict[str, Any]:
    function = prompt.partition("(")[0].removeprefix("def ")
    return {
        "task_id": f"Own/{function}",
        "entry_point": function,
        "prompt": f"from typing import List\n\n\n{prompt}",
        "canonical_solution": solution,
        "test": "METADATA = {}\n\n\ndef check(candidate):\n" + "".join(f"    {line}\n" for line in asserts),
    }


TASKS = [
    _task(
        'def longest(words: List[str]):\n    """Return the first of the longest words."""\n',
        """\
    best = ""
    for word in words:
        if len(word) > len(best):
            best = word
    return best
""",
        ["assert candidate(['a', 'bcd', 'efg']) == 'bcd'", "assert candidate([]) == ''"],
    ),
    _task(
        'def mean_distance(numbers: List[float]):\n    """Return the mean distance to the mean."""\n',
        """\
    mean = sum(numbers) / len(numbers)
    return sum(abs(x - mean) for x in numbers) / len(numbers)
""",
        ["assert abs(candidate([1.0, 2.0, 3.0, 4.0]) - 1.0) < 1e-6"],
    ),
    _task(
        'def pairs(n: int):\n    """Return the pairs (i, j) with i < j < n."""\n',
        "    return [(i, j) for i in range(n) for j in range(i + 1, n)]\n",
        ["assert candidate(3) == [(0, 1), (0, 2), (1, 2)]", "assert candidate(1) == []"],
    ),
    _task(
        'def first_negative(values: List[int]):\n    """Return the first negative value, or raise ValueError."""\n',
        """\
    for value in values:
        if value < 0:
            return value
    raise ValueError(values)
""",
        [
            "assert candidate([1, -2, -3]) == -2",
            "try:",
            "    candidate([1])",
            "except ValueError:",
            "    return",
            "assert False",
        ],
    ),
]
