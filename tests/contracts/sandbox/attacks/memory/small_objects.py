"""Makes small objects until there is no memory.

tests: stdio
"""

import contextlib

kept = []
while True:
    with contextlib.suppress(MemoryError):
        while True:
            kept.append([len(kept)])
