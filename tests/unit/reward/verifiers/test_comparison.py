"""Comparison of outputs and of plain data."""

import pytest

from realsys.reward.verifiers.code import same_output, same_value


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        ("1 2 \r\n3\n\n", "1 2\n3", True),
        ("1  2", "1 2", False),
        ("0.3333333", "0.33333333", True),
        ("3", "3.0", True),
        ("yes  0.50", "yes 0.5", True),
        ("3.0", "3", False),
        ("nan", "0.5", False),
        ("0.50001", "0.5", False),
        ("\n1", "1", False),
        ("", "", True),
        ("1" * 1000, "0.5", False),
    ],
)
def test_outputs(actual, expected, same):
    assert same_output(actual, expected) is same


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        ((1, [2]), [1, [2]], True),
        ({1: (2,)}, {"1": [2]}, True),
        ({1: 2, "1": 2}, {"1": 2}, False),
        (0.1 + 0.2, 0.3, True),
        (3, 3.0, True),
        (3.0, 3, True),
        (True, 1, False),
        (1, True, False),
        ("1", 1, False),
        (None, None, True),
        ({1}, [1], False),
        (10**400, 1.0, False),
        (float("nan"), 1.0, False),
        ([1, 2], [1], False),
    ],
)
def test_values(actual, expected, same):
    assert same_value(actual, expected) is same
