"""Returns texts and integers of 10 MB, which take long to compare and to show.

tests: calls source
"""


def double(n):
    return [1 << 80_000_000, "6" * 10_000_000]
