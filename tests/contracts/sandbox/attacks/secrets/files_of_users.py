"""Reads keys, tokens and passwords at their usual places.

tests: stdio
"""

import contextlib
import glob


def gained(outside):
    names = (
        ".ssh/*",
        ".aws/*",
        ".netrc",
        ".bash_history",
        ".bashrc",
        ".profile",
        ".git-credentials",
        ".gitconfig",
        ".docker/*",
        ".kube/*",
        ".config/*/*",
        ".cache/huggingface/token",
        ".pypirc",
    )
    for home in ("/root", *glob.glob("/home/*")):
        for file in [path for name in names for path in glob.glob(f"{home}/{name}")]:
            with contextlib.suppress(OSError), open(file, "rb") as opened:
                opened.read()
                return True
    for file in ("/etc/shadow", "/etc/gshadow", "/etc/sudoers", *glob.glob("/etc/ssh/ssh_host_*_key")):
        with contextlib.suppress(OSError), open(file, "rb") as opened:
            opened.read()
            return True
    return False
