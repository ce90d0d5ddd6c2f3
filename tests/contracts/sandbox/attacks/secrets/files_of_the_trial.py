"""Reads the files of a trial: token, config, data.

tests: stdio
unguarded: gains
"""

import contextlib


def gained(outside):
    for file in outside.files:
        with contextlib.suppress(OSError), open(file) as opened:
            opened.read()
            return True
    return False
