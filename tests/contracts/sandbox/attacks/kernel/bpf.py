"""Loads a program into the kernel, and watches it by performance events.

tests: stdio
"""


def gained(outside):
    bpf, perf_event_open = 321, 298
    map_create = (1).to_bytes(4, "little") + (4).to_bytes(4, "little") * 3 + bytes(112)
    attributes = (1).to_bytes(4, "little") + (128).to_bytes(4, "little") + bytes(120)
    return (
        outside.syscall(bpf, 0, map_create, 128) >= 0 or outside.syscall(perf_event_open, attributes, 0, -1, -1, 0) >= 0
    )
