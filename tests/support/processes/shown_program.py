"""A program that tells how it was started, for the tests of fork servers."""

import json
import os
import random
import sys
from pathlib import Path


def main() -> int:
    if sys.argv[1:] == ["text"]:
        sys.exit("a last line")
    if sys.argv[1:] == ["raise"]:
        raise ValueError("out of range")
    shown = {
        "parent": os.getppid(),
        "leads": os.getsid(0) == os.getpid(),
        "words": Path("/proc/self/cmdline").read_text().split("\0")[:-1],
        "environment": Path("/proc/self/environ").read_text().split("\0")[:-1],
        "variable": os.environ.get("MINE"),
        "arguments": sys.argv[1:],
        "paths": sys.path,
        "main": sys.modules["__main__"].__spec__.name,  # type: ignore[union-attr]
        "stdin": sys.stdin.read(),
        "open": [os.readlink(f"/proc/self/fd/{number}") for number in range(3, 20) if _is_open(number)],
        "random": random.random(),
    }
    print(json.dumps(shown), flush=True)
    return 3


def _is_open(number: int) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


if __name__ == "__main__":
    sys.exit(main())
