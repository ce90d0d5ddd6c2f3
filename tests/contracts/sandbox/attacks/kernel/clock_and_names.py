"""Changes the time and the names of the machine.

tests: stdio
"""

import contextlib
import socket
import time


def gained(outside):
    adjtimex, setdomainname, settimeofday = 159, 171, 164
    with contextlib.suppress(OSError):
        time.clock_settime(time.CLOCK_REALTIME, time.time())
        return True
    with contextlib.suppress(OSError):
        socket.sethostname(outside.mark)
        return True
    frequency = (2).to_bytes(4, "little") + bytes(204)
    return any(
        result >= 0
        for result in (
            outside.syscall(adjtimex, frequency),
            outside.syscall(setdomainname, outside.mark.encode(), 4),
            outside.syscall(settimeofday, bytes(16), 0),
        )
    )
