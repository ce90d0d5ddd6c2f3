"""Changes modules of the interpreter on the disk, so that the next program imports them.

tests: stdio
"""

import contextlib
import json
import os
import sys


def gained(outside):
    folders = [os.path.dirname(json.__file__), os.path.dirname(os.__file__), *sys.path]
    for folder in filter(os.path.isdir, folders):
        if folder.startswith(("/tmp", "/dev")):
            continue
        with contextlib.suppress(OSError):
            os.close(os.open(f"{folder}/sitecustomize_{outside.mark}.py", os.O_CREAT | os.O_WRONLY))
            return True
    with contextlib.suppress(OSError):
        os.close(os.open(json.__file__, os.O_WRONLY))
        return True
    return False
