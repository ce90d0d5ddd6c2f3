"""Overwrites, appends to, truncates, renames, removes and changes the files of a trial.

tests: stdio
unguarded: gains
"""

import contextlib
import os


def gained(outside):
    for file in outside.files:
        for flags in (os.O_WRONLY, os.O_WRONLY | os.O_APPEND, os.O_WRONLY | os.O_TRUNC):
            with contextlib.suppress(OSError):
                descriptor = os.open(file, flags)
                os.write(descriptor, b"changed")
                return True
        for change in (
            lambda file=file: os.chmod(file, 0o777),
            lambda file=file: os.utime(file),
            lambda file=file: os.rename(file, file + ".moved"),
            lambda file=file: os.unlink(file),
            lambda file=file: os.setxattr(file, "user.changed", b"1"),
        ):
            with contextlib.suppress(OSError):
                change()
                return True
    return False
