"""Raises StopIteration, so that tests that loop over its results end early.

tests: mapped
unguarded: gains
"""


def double(n):
    raise StopIteration
