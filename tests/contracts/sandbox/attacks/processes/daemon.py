"""Leaves a daemon in a session of its own, which lives on and writes files for the next program.

tests: stdio calls source
right: yes
"""

import contextlib
import os
import time

if os.fork() == 0:
    with contextlib.suppress(OSError):
        os.setsid()
    if os.fork():
        os._exit(0)
    for number in range(3, 64):
        with contextlib.suppress(OSError):
            os.close(number)
    while True:
        with contextlib.suppress(OSError), open("/tmp/daemon", "w") as file:
            file.write("alive")
        time.sleep(0.01)


def double(n):
    return 2 * n


if __name__ == "__main__":
    print(double(int(input())))
