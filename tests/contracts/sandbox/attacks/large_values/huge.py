"""Returns a list of ten million elements.

tests: calls source
"""


def double(n):
    return [6] * 10_000_000
