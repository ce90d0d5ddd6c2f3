"""Stops itself with SIGSTOP.

tests: stdio
"""

import os
import signal

os.kill(os.getpid(), signal.SIGSTOP)
