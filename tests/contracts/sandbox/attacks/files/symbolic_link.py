"""Makes symbolic links in /tmp that lead to the files of a trial, and writes through them.

tests: stdio
unguarded: gains
"""

import contextlib
import os


def gained(outside):
    for number, file in enumerate(outside.files):
        link = f"/tmp/{outside.mark}-{number}"
        for flags in (os.O_WRONLY, os.O_RDONLY):
            with contextlib.suppress(FileExistsError):
                os.symlink(file, link)
            with contextlib.suppress(OSError):
                os.close(os.open(link, flags))
                os.unlink(link)
                return True
            os.unlink(link)
    return False
