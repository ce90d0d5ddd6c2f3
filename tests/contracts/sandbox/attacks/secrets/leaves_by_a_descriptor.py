"""Goes out of its folder by a descriptor of a folder, and by "..".

tests: stdio
"""

import contextlib
import os


def gained(outside):
    file = outside.files[0].lstrip("/")
    for number in range(256):
        for steps in ("", "../" * 12):
            with contextlib.suppress(OSError):
                os.close(os.open(steps + file, os.O_RDONLY, dir_fd=number))
                return True
    with contextlib.suppress(OSError):
        os.close(os.open("../" * 12 + file, os.O_RDONLY))
        return True
    for root in (f"/proc/{pid}/root" for pid in ("self", *outside.others())):
        with contextlib.suppress(OSError):
            os.close(os.open(f"{root}/{file}", os.O_RDONLY))
            return True
    return False
