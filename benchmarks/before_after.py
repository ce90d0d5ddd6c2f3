"""The arith job of this checkout against the same job of another one: has a change made training slower?

    git worktree add ../before COMMIT
    python -m benchmarks.before_after ../before [--pairs 4] [--steps 80] [--groups 16] [--override KEY=VALUE ...]

One warm-up of the other checkout makes the model that every run starts from. Then come pairs of runs, one of each
checkout, on one training rank and one server (``_pairs.py``).

    tokens_per_s   sampled tokens that training consumed, per second, from the end of step SKIP to the end of the last
    cpu_s_per_1k   CPU seconds of all processes of the run, from its start to its end, per 1,000 of these tokens

With ``train.ppo.skip_zero_advantage`` on, tokens/s depends on how many groups were answered alike; turn it off to
compare the same work.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks._pairs import Side, add_arguments, compare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    add_arguments(parser)
    options = parser.parse_args()
    compare("before_after", options, lambda root: (Side("now"), Side("before", options.before.resolve())))


if __name__ == "__main__":
    main()
