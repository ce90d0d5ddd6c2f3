"""Makes a userfaultfd, with which a page fault of the kernel can be held.

tests: stdio
"""


def gained(outside):
    return outside.syscall(323, 0) >= 0 or outside.syscall(323, 1) >= 0
