"""The verifier of the tutorial: data.verifier=verifier:running_sums

{"prompt": "a4b2c7=", "answer": "13", "sums": [4, 6, 13]}, and a completion such as a0+4=4;b4+2=6;c6+7=12;#12
"""

import re

from realsys.reward.verifiers.contract import Item, Verdict


def running_sums(item: Item, share: float = 0.5) -> Verdict:
    """Reward the right total with 1, and a wrong one with ``share`` of the right running sums."""
    expected = item.extra["sums"]  # a row without sums is an error of that row, not a reward of 0
    written = [int(digits) for digits in re.findall(r"=(\d+)", item.completion)]
    right_sums = sum(a == b for a, b in zip(written, expected, strict=False)) / len(expected)
    total = item.completion.rpartition("#")[2]
    correct = total == item.answer
    return Verdict(1.0 if correct else share * right_sums, correct, {"right_sums": right_sums}, answer=total)
