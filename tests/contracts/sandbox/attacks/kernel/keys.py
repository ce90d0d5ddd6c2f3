"""Stores a key in the kernel for the next program.

tests: stdio
"""


def gained(outside):
    add_key, request_key = 248, 249
    session, user = -3, -4
    return any(
        outside.syscall(add_key, b"user", outside.mark.encode(), b"left", 4, ring) >= 0 for ring in (session, user)
    ) or (outside.syscall(request_key, b"user", outside.mark.encode(), 0, 0) >= 0)
