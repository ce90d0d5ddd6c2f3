"""Forks, so that the checker goes on in two processes.

tests: calls source
"""

import os


def double(n):
    os.fork()
    return 0


os.fork()
