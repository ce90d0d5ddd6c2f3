"""A verifier with partial credit: data.verifier=verifier:tests_passed

{"prompt": "...", "answer": "-", "tests": [{"input": "2 3", "output": "5"}, ...]}
"""

import re
import subprocess
import sys

from realsys.reward.verifiers.contract import Item, Verdict


def tests_passed(item: Item) -> Verdict:
    """Reward the share of the row's tests that the program in the completion passes."""
    tests = item.extra["tests"]  # a row without tests is an error of that row, not a reward of 0
    block = re.search(r"```python\n(.*?)```", item.completion, re.DOTALL)
    if block is None:
        return Verdict(reward=0.0, correct=False, metrics={"has_program": 0.0})
    passed = sum(output_of(block[1], test["input"]) == test["output"] for test in tests)
    share = passed / len(tests)
    return Verdict(reward=share, correct=share == 1.0, metrics={"has_program": 1.0, "tests_passed": share})


def output_of(program: str, text: str) -> str | None:
    """Return what the program prints, or None if it fails or takes longer than 2 s."""
    command = [sys.executable, "-I", "-c", program]
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=2, check=True)
    except (subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()
