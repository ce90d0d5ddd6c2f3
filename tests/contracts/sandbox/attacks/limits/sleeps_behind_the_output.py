"""Writes the right output and sleeps for an hour.

tests: stdio
"""

import time

print(2 * int(input()), flush=True)
time.sleep(3600)
