"""Makes system calls in the 32-bit and x32 forms, which a filter may not know.

tests: stdio
"""


def gained(outside):
    import ctypes
    import mmap

    x32 = 0x40000000
    if outside.syscall(x32 + 39) >= 0:  # getpid
        return True
    # int 0x80: i386's getpid (20). The program ends here if the filter kills.
    code = b"\x53\xb8\x14\x00\x00\x00\xcd\x80\x5b\xc3"
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    return function() > 0
