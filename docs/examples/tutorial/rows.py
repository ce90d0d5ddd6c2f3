"""Rows of the tutorial: python rows.py > rows.jsonl

Sums of 8 to 20 digits. The key ``sums`` is for the verifier; realsys itself reads prompt and answer.
"""

import itertools
import json
import random

random.seed(7)
for _ in range(1000):
    digits = [random.randrange(10) for _ in range(random.randint(8, 20))]
    sums = list(itertools.accumulate(digits))
    prompt = "".join(f"{letter}{digit}" for letter, digit in zip("abcdefghijklmnopqrst", digits, strict=False))
    print(json.dumps({"prompt": f"{prompt}=", "answer": str(sums[-1]), "sums": sums}))
