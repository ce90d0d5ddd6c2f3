"""Makes and opens device files: memory, disks, the kernel's log.

tests: stdio
"""

import contextlib
import os
import stat


def gained(outside):
    for number in ((1, 1), (1, 2), (254, 0), (253, 0), (8, 0), (259, 0)):
        for kind in (stat.S_IFBLK, stat.S_IFCHR):
            with contextlib.suppress(OSError):
                os.mknod(f"/tmp/device-{kind}-{number[0]}-{number[1]}", kind | 0o600, os.makedev(*number))
                return True
    names = ("mem", "kmem", "port", "kmsg", "sda", "vda", "nvme0n1", "fuse", "kvm", "loop-control", "uinput")
    for name in names:
        with contextlib.suppress(OSError):
            os.close(os.open(f"/dev/{name}", os.O_RDWR))
            return True
    return False
