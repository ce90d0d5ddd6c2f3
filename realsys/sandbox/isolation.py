"""Parts of the isolation that this machine has, and the command that starts the zygote."""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realsys.errors import SandboxError
from realsys.sandbox.inside import confine, kernel

FULL, AVAILABLE, NONE = "full", "available", "none"
ISOLATIONS = (FULL, AVAILABLE, NONE)
INSTALL = "install bubblewrap (apt install bubblewrap)"
#: how bwrap, or the zygote as root, says that the kernel gives it no user namespace
NOT_ALLOWED = re.compile("not permitted|permission|namespace|uid map|No space left", re.IGNORECASE)
ALLOW = (
    "programs need user namespaces, which this machine or container does not allow: `sysctl user.max_user_namespaces` "
    "must not be 0, on Ubuntu `kernel.apparmor_restrict_unprivileged_userns` must be 0, and Docker needs "
    "`--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined`"
)

_CODE = Path(__file__).resolve().parent / "inside"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
#: files of /etc that libraries and other languages read; none has a secret
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "timezone", "alternatives", "mime.types")
#: not "zero": to map it is another way to shared memory without a file
_DEVICES = ("null", "full", "random", "urandom")
_BOOT = (
    "import sys; sys.path.insert(0, '/realsys'); from inside.preload import preload; preload(); "
    "from inside.zygote import main; main()"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Isolation of programs.

    isolation  full: bubblewrap, seccomp and Landlock must be there; available: bubblewrap must be there, the others are
               used if they are; none: limits only. A program can then read and change what this user can.
    readable   further files and folders that programs may read, such as a compiler outside of /usr
    """

    isolation: str = AVAILABLE
    readable: tuple[str, ...] = ()


def python() -> str:
    """Return the interpreter of programs: this one, without a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def readable_paths(settings: Settings) -> list[str]:
    """Return the folders that a program may read."""
    prefix = os.path.realpath(sys.base_prefix)
    paths = [path for path in _SYSTEM if os.path.exists(path)]
    paths += [f"/etc/{name}" for name in _ETC if os.path.exists(f"/etc/{name}")]
    extra = [prefix, os.path.realpath(sysconfig.get_paths()["stdlib"]), *map(os.path.realpath, settings.readable)]
    return paths + [path for path in dict.fromkeys(extra) if not path.startswith("/usr/")]


def zygote_command(settings: Settings, control: int, setup: str) -> list[str]:
    """Return the command that starts the zygote."""
    if settings.isolation == NONE:
        boot = _BOOT.replace("'/realsys'", repr(str(_CODE.parent)))
        return [python(), "-I", "-S", "-B", "-c", boot, str(control), setup]
    command = [_bwrap(), "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() == 0:
        # No user namespace: the zygote becomes an ordinary user, and then makes one for each program.
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user"]
    command += ["--die-with-parent", "--clearenv", "--hostname", "sandbox"]
    paths = readable_paths(settings)
    for folder in _parents([*paths, "/dev/shm/x", "/realsys/inside", "/tmp/x"]):
        command += ["--perms", "0755", "--dir", folder]  # without this, only the owner could enter them
    for path in paths:
        if os.path.islink(path) and path in _SYSTEM:
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind", path, path]
    command += ["--symlink", f"{confine.TMP}/.stdin", "/dev/stdin"]  # made for programs that name it
    for name in _DEVICES:
        command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    command += ["--ro-bind", str(_CODE), "/realsys/inside", "--proc", "/proc", "--remount-ro", "/", "--chdir", "/"]
    for name, value in environment().items():
        command += ["--setenv", name, value]
    return [*command, "--", python(), "-I", "-S", "-B", "-c", _BOOT, str(control), setup]


def _parents(paths: list[str]) -> list[str]:
    """Return the folders above the paths, each behind its own parent."""
    folders = {str(parent) for path in paths for parent in Path(path).parents}
    return sorted(folders - {"/"})


def environment() -> dict[str, str]:
    """Return the whole environment of a program."""
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}


def setup_of(settings: Settings) -> dict[str, Any]:
    """Return what the zygote must know. Raises SandboxError."""
    isolated = settings.isolation != NONE
    # The number depends on the process, so that the programs of two zygotes belong to different users.
    user = 20000 + os.getpid() % 40000 if isolated and os.geteuid() == 0 else 0
    if settings.isolation == FULL and (missing := missing_parts()):
        raise SandboxError(f"isolation is full, and this machine lacks {missing[0]}")
    if isolated and (hidden := next(filter(is_hidden, readable_paths(settings)), None)) is not None:
        raise SandboxError(f"{hidden} is in a folder that programs do not see, because they have their own: move it")
    links = {path for path in _SYSTEM if os.path.islink(path)}
    return {
        "namespaces": isolated,
        "user": user,
        "landlock": isolated,
        "readable": _outermost([path for path in readable_paths(settings) if path not in links]),
    }


def is_hidden(path: str) -> bool:
    """Return True if a program has an empty folder of its own in the place of this path."""
    return path.startswith((f"{confine.TMP}/", f"{confine.SHM}/", "/proc/"))


def is_visible(path: str, settings: Settings) -> bool:
    """Return True if a program can read what the path, with its links, leads to."""
    if settings.isolation == NONE:
        return True
    folders = tuple(f"{folder}/" for folder in readable_paths(settings))
    return all(f"{one}/".startswith(folders) and not is_hidden(one) for one in (path, os.path.realpath(path)))


def _outermost(paths: list[str]) -> list[str]:
    """Return the paths without those below another. Landlock has a rule for each, and one for the whole /etc."""
    folders = tuple(f"{path}/" for path in [*paths, "/etc"])
    return [path for path in paths if not path.startswith(folders)]


@functools.cache
def _bwrap() -> str:
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxError(f"programs cannot be isolated, because bwrap is not found: {INSTALL}")
    return path


def missing_parts() -> list[str]:
    """Return the parts of the isolation, other than bubblewrap, that this machine lacks."""
    missing = []
    if not confine.has_filter():
        missing.append(f"seccomp: there is no table of system calls for {os.uname().machine}")
    if not kernel.landlock_abi():
        missing.append("Landlock: use Linux 5.13 or later with landlock in its list of security modules (lsm=)")
    return missing
