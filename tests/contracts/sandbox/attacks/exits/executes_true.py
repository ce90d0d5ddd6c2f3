"""Becomes a program that ends with status 0.

tests: stdio calls source
"""

import os

os.execv("/bin/true", ["true"])
