"""Turns an integer of a billion digits into text.

tests: stdio
"""

import sys

sys.set_int_max_str_digits(0)
print(str(7 ** (10**9)))
