"""Gives right results, and hangs when the interpreter ends.

tests: stdio
"""

import atexit
import threading


def hang():
    while True:
        pass


atexit.register(hang)
threading.Thread(target=hang).start()
print(2 * int(input()), flush=True)
