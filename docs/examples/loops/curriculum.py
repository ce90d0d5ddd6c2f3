"""A curriculum: the script makes the rows, and makes them harder when the model solves them.

Sums get longer while more than half of the answers are right, and shorter while fewer than a quarter are:

    python curriculum.py
"""

import random

import realsys

SETTINGS = ["experiment=arith", "data.order=script"]  # roll out the rows that the script submits, and no others


def sums(level: dict[str, int], seed: int):
    """Yield rows for ever: running sums of as many digits as the level says."""
    chance = random.Random(seed)
    while True:
        digits = [chance.randint(0, 9) for _ in range(level["digits"])]
        names = "abcdefghijklmnopqrstuvwxyz"
        prompt = "".join(f"{name}{digit}" for name, digit in zip(names, digits, strict=False)) + "="
        yield {"prompt": prompt, "answer": str(sum(digits))}


def train(session: realsys.Session) -> None:
    level = {"digits": 2}
    rows = sums(level, session.config.seed)
    for _ in session.steps():
        batch = session.rollout.prepare_batch(rows)  # submits rows as they are needed
        right = sum(bool(sample.correct) for sample in batch.samples) / len(batch)
        level["digits"] = max(2, min(20, level["digits"] + (right > 0.5) - (right < 0.25)))
        session.update(batch)
        session.log(digits=level["digits"], right=right)
        session.publish()
        session.evaluate_due()


if __name__ == "__main__":
    realsys.main(train, SETTINGS)
