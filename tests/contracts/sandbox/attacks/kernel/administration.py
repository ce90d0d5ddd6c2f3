"""Loads modules, restarts the machine, changes swap, quotas and accounting, opens files by handle.

tests: stdio
"""


def gained(outside):
    init_module, swapon, acct, quotactl, reboot = 175, 167, 163, 179, 169
    name_to_handle_at, open_by_handle_at, iopl, kexec_load, delete_module = 303, 304, 172, 246, 176
    import ctypes

    handle, mount = (ctypes.c_char * 136)(), ctypes.c_int()
    handle[0] = 128
    outside.syscall(name_to_handle_at, -100, b"/", handle, ctypes.byref(mount), 0)
    return any(
        result >= 0
        for result in (
            outside.syscall(init_module, b"", 0, b""),
            outside.syscall(delete_module, b"none", 0),
            outside.syscall(swapon, b"/tmp/swap", 0),
            outside.syscall(acct, 0),
            outside.syscall(quotactl, 0, 0, 0, 0),
            outside.syscall(reboot, 0xFEE1DEAD, 672274793, 0, 0),  # Ctrl-Alt-Del off
            outside.syscall(iopl, 3),
            outside.syscall(kexec_load, 0, 0, 0, 0),
            outside.syscall(open_by_handle_at, 3, handle, 0),
        )
    )
