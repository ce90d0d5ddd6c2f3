"""Searches its memory for the environment that a process before it had.

tests: stdio
unguarded: gains
"""

import contextlib
import re


def gained(outside):
    sought = re.compile(outside.environment.encode() + rb"=[0-9a-f]{16}")
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            span, rights = line.split()[:2]
            begin, end = (int(part, 16) for part in span.split("-"))
            if "r" not in rights or end - begin > 1 << 26:
                continue
            with contextlib.suppress(OSError, ValueError, OverflowError):
                memory.seek(begin)
                if sought.search(memory.read(end - begin)):
                    return True
    return False
