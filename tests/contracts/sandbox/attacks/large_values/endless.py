"""Returns an iterable without end.

tests: calls source
"""

import itertools


class Endless:
    def __iter__(self):
        return itertools.repeat(6)

    def __len__(self):
        return 1 << 62

    def __repr__(self):
        while True:
            pass

    __eq__ = __hash__ = __str__ = __bool__ = __repr__


def double(n):
    return Endless()
