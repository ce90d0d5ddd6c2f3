"""Starts threads without end.

tests: stdio
"""

import contextlib
import threading

while True:
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=threading.Event().wait).start()
