"""Raises its own limits.

tests: stdio
"""

import resource


def gained(outside):
    kinds = ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CORE")
    before = {kind: resource.getrlimit(getattr(resource, kind)) for kind in kinds}
    for kind, (_, hard) in before.items():
        for more in ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), (hard, 2 * hard)):
            try:
                resource.setrlimit(getattr(resource, kind), more)
            except (OSError, ValueError):
                continue
            if resource.getrlimit(getattr(resource, kind))[1] != hard:
                return True
    return False
