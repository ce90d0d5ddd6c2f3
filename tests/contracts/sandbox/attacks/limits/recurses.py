"""Recurses until the stack of the machine overflows.

tests: stdio
"""

import sys

sys.setrecursionlimit(10**9)


class Deep:
    def __getattr__(self, name):
        return getattr(self, name)


def deeper(values):
    return sorted(values, key=lambda value: deeper([value]))


deeper([1])
