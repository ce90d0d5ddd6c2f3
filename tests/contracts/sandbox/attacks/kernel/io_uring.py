"""Makes an io_uring, whose operations a filter of system calls does not see.

tests: stdio
unguarded: gains
"""


def gained(outside):
    setup = 425
    return outside.syscall(setup, 4, bytes(120)) >= 0
