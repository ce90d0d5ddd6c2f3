"""Returns NaN, infinity and numbers that no format can hold, where a number is expected.

tests: calls source
"""

import decimal
import fractions

VALUES = iter([float("nan"), -float("inf"), 10**5000, decimal.Decimal("NaN"), fractions.Fraction(1, 3), 1j])


def double(n):
    return next(VALUES)
