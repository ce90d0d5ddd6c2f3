"""Mounts, unmounts, moves the root, by the old calls and the new ones.

tests: stdio
"""


def gained(outside):
    mount, umount, pivot_root, chroot = 165, 166, 155, 161
    open_tree, fsopen = 428, 430
    remount_bind_rw = 0x1020
    return any(
        result >= 0
        for result in (
            outside.syscall(mount, b"none", b"/tmp", b"tmpfs", 0, 0),
            outside.syscall(mount, b"none", b"/", 0, remount_bind_rw, 0),
            outside.syscall(mount, b"none", b"/usr", 0, remount_bind_rw, 0),
            outside.syscall(umount, b"/tmp", 2),
            outside.syscall(umount, b"/proc", 2),
            outside.syscall(pivot_root, b"/tmp", b"/tmp"),
            outside.syscall(chroot, b"/tmp"),
            outside.syscall(open_tree, -100, b"/", 1),
            outside.syscall(fsopen, b"tmpfs", 0),
        )
    )
