"""Has a child that ends with status 0, while the parent hangs or ends.

tests: stdio calls source
"""

import os

if os.fork() == 0:
    os._exit(0)
os.wait()
os._exit(0)
