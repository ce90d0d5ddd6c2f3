"""Reads its environment, for the secrets of the trial.

tests: stdio
unguarded: gains
"""

import os


def gained(outside):
    with open("/proc/self/environ", "rb") as file:
        return outside.environment in os.environ or outside.environment.encode() in file.read()
