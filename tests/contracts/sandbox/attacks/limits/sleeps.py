"""Sleeps for an hour.

tests: stdio
"""

import time

time.sleep(3600)
