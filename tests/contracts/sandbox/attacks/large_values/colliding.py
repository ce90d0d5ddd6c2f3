"""Returns a set and a dict of integers that all have the same hash, so that reading them takes hours.

tests: calls source
"""

import sys

FACTOR = sys.hash_info.modulus


def double(n):
    class Colliding(frozenset):
        def __iter__(self):
            return (index * FACTOR for index in range(40_000))

        def __len__(self):
            return 40_000

    return Colliding()
