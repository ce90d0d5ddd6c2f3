"""Raises the exceptions by which tests and generators end.

tests: calls source mapped
"""

import itertools

ERRORS = itertools.cycle([GeneratorExit, StopAsyncIteration, AssertionError, NameError, SyntaxError, ImportError])


def double(n):
    raise next(ERRORS)
