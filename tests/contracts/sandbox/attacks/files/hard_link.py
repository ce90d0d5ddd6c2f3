"""Makes hard links to the files of a trial and of the system, and writes through them.

tests: stdio
"""

import contextlib
import os


def gained(outside):
    for number, file in enumerate([*outside.files, "/etc/passwd", os.__file__]):
        for folder in ("/tmp", ".", "/dev/shm"):
            with contextlib.suppress(OSError):
                os.link(file, f"{folder}/link-{number}")
                os.close(os.open(f"{folder}/link-{number}", os.O_WRONLY))
                return True
    return False
