"""Returns a list that is nested a million times.

tests: calls source
"""


def double(n):
    value = []
    for _ in range(1_000_000):
        value = [value]
    return value
