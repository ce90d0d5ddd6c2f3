"""Ends by a signal, by abort and by an invalid instruction behind the right output of another test.

tests: stdio calls source
"""

import os
import signal

os.write(1, b"6\n")
os.kill(os.getpid(), signal.SIGABRT)


def double(n):
    return None
