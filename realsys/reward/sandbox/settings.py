"""Settings of the sandbox: isolation of programs, limits of a run, languages."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from realsys.errors import MALFORMED, ConfigError, SandboxError
from realsys.reward.sandbox.inside import confine, kernel

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
_BOOT = "import sys; sys.path.insert(0, '/realsys'); from inside.zygote import main; main()"


@dataclass(frozen=True, slots=True)
class IsolationSettings:
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


def readable_paths(settings: IsolationSettings) -> list[str]:
    """Return the folders that a program may read."""
    prefix = os.path.realpath(sys.base_prefix)
    paths = [path for path in _SYSTEM if os.path.exists(path)]
    paths += [f"/etc/{name}" for name in _ETC if os.path.exists(f"/etc/{name}")]
    extra = [prefix, os.path.realpath(sysconfig.get_paths()["stdlib"]), *map(os.path.realpath, settings.readable)]
    return paths + [path for path in dict.fromkeys(extra) if not path.startswith("/usr/")]


def zygote_command(settings: IsolationSettings, control: int, setup: str) -> list[str]:
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
    # each folder behind its own parent
    folders = {
        str(parent) for path in [*paths, "/dev/shm/x", "/realsys/inside", "/tmp/x"] for parent in Path(path).parents
    }
    for folder in sorted(folders - {"/"}):
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


def environment() -> dict[str, str]:
    """Return the whole environment of a program."""
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}


def setup_of(settings: IsolationSettings) -> dict[str, Any]:
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
        "readable": _outermost([path for path in readable_paths(settings) if path not in links]),
    }


def is_hidden(path: str) -> bool:
    """Return True if a program has an empty folder of its own in the place of this path."""
    return path.startswith((f"{confine.TMP}/", f"{confine.SHM}/", "/proc/"))


def is_visible(path: str, settings: IsolationSettings) -> bool:
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


# ---- limits of one run of a program, and how a run ended


#: why a program failed; metrics of the code verifier have these names
REASONS = (
    CPU := "cpu",  # over cpu_s
    WALL := "wall",  # over wall_s
    MEMORY := "memory",  # over memory_mb
    OUTPUT := "output",  # over output_mb
    CRASHED := "crashed",  # it raised, or ended with another exit code than 0, or by a signal
    WRONG := "wrong",  # it ran, and a test found a wrong result
    NO_PROGRAM := "no_program",  # the completion has no program
)

_BUSY = 10.0  # times its time that a program may take on a busy machine


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Limits of one run of a program and all that it starts.

    cpu_s       CPU time, of all its processes together
    wall_s      time on the clock, less the time in which the machine had no processor for it
    memory_mb   memory in MiB: address space of each process, and memory of all its processes together
    processes   processes and threads at a time
    output_mb   stdout and stderr together
    file_mb     size of one file that it writes
    disk_mb     files in /tmp together; they are in memory
    open_files  descriptors of one process: the buffer of a socket has 208 KiB, which memory_mb does not count
    bound_address_space  False for programs that reserve much more memory than they use, such as a Java machine
    """

    cpu_s: float = 10.0
    wall_s: float = 20.0
    memory_mb: float = 1024.0
    processes: int = 16
    output_mb: float = 16.0
    file_mb: float = 32.0
    disk_mb: float = 64.0
    open_files: int = 32
    bound_address_space: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError for a limit that is not finite and greater than 0, and for a disk of less than 1 MiB."""
        for field in dataclasses.fields(self):
            if field.name != "bound_address_space" and not 0 < getattr(self, field.name) < math.inf:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}: it must be finite and greater than 0")
        if self.disk_mb < 1:
            raise ValueError(f"disk_mb is {self.disk_mb:g}: it must be at least 1")

    def as_message(self, calls: int = 0) -> dict[str, Any]:
        """Return them for the zygote. ``calls``: greatest number of calls that the process answers; 0: one run."""
        return {**dataclasses.asdict(self), "process_cpu_s": self.cpu_s * max(1, calls), "watch_clock": not calls}

    @property
    def clock_s(self) -> float:
        """Bound on a run by the clock. A program that reaches it has not been given its time."""
        return _BUSY * self.wall_s + 10.0


@dataclass(frozen=True, slots=True)
class RunEnded:
    """End of a program.

    code     exit code, or the negative number of the signal
    reached  the limit that it reached (one of REASONS), or ""
    waited_s part of wall_s in which the machine had no processor for it, if it was long
    """

    code: int
    reached: str = ""
    cpu_s: float = 0.0
    wall_s: float = 0.0
    waited_s: float = 0.0
    peak_mb: float = 0.0

    @property
    def own_s(self) -> float:
        """Return the time for which the program is to blame."""
        return max(0.0, self.wall_s - self.waited_s)

    @property
    def reason(self) -> str:
        """Return why the run failed; "" if it did not."""
        return self.reached or (CRASHED if self.code else "")


@dataclass(frozen=True, slots=True)
class Output:
    """A run with input and output. ``made``: the file that a command was to make."""

    ended: RunEnded
    stdout: bytes
    stderr: bytes
    made: bytes | None = None


@dataclass(frozen=True, slots=True)
class UnitTestsResult:
    """Result of unit tests. ``reason``: "" if they passed, else one of REASONS; ``why``: in words."""

    passed: bool
    reason: str = ""
    why: str = ""


# ---- languages other than Python: how a program is compiled and run
#
#     source ──compile, once──> program ──run, once per test──> output
#
# Both commands run in the sandbox, in an empty folder with the file ``source``. Their first words are looked up in
# PATH.


PATH = "/usr/local/bin:/usr/bin:/bin"  # the home of the user, where other programs may be, is not in the sandbox


class Language(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Commands for the programs of a language.

    source     name of the file with the program
    run        command that runs the program
    compile    command that makes the file ``makes``; empty: the language is not compiled
    makes      the only file that reaches ``run``, if ``compile`` is set
    reserves   the run-time system reserves far more addresses than it uses: only used memory is limited, not addresses
    """

    source: str
    run: list[str]
    compile: list[str] = []
    makes: str = ""
    reserves: bool = False

    def problem(self) -> str | None:
        """Return what the types cannot express, or None."""
        for name, file in (("source", self.source), ("makes", self.makes)):
            if file != os.path.basename(file):
                return f"{name} is {file!r}: it must be a file name without a folder"
        if not self.source or not self.run:
            return "source and run must not be empty"
        if bool(self.compile) != bool(self.makes):
            return "compile needs makes, the file that it makes, and makes needs compile"
        return None

    def missing(self) -> str | None:
        """Return the name of a command that this machine does not have, or None."""
        commands = [command[0] for command in (self.compile, self.run) if command]
        return next((name for name in commands if not name.startswith("./") and find_command(name) is None), None)


BUILTIN: dict[str, Language] = {
    "bash": Language(source="main.sh", run=["bash", "main.sh"]),
    "c": Language(
        source="main.c",
        compile=["gcc", "-O2", "-std=c17", "-o", "program", "main.c", "-lm"],
        makes="program",
        run=["./program"],
    ),
    "cpp": Language(
        source="main.cpp",
        compile=["g++", "-O2", "-std=c++20", "-o", "program", "main.cpp"],
        makes="program",
        run=["./program"],
    ),
    "go": Language(
        source="main.go",
        compile=["go", "build", "-o", "program", "main.go"],
        makes="program",
        run=["./program"],
        reserves=True,
    ),
    "javascript": Language(source="main.js", run=["node", "main.js"], reserves=True),
    "rust": Language(
        source="main.rs", compile=["rustc", "-O", "-o", "program", "main.rs"], makes="program", run=["./program"]
    ),
}


def languages_of(settings: Mapping[str, Any]) -> dict[str, Language]:
    """Return the built-in languages and those of ``languages`` of the verifier's arguments. Raises ConfigError."""
    languages = dict(BUILTIN)
    for name, values in settings.items():
        field = f"languages.{name}"
        try:
            language = msgspec.convert(values, Language)
        except MALFORMED as error:
            raise ConfigError(field, values, str(error)) from None
        if problem := language.problem():
            raise ConfigError(field, values, problem)
        languages[name] = language
    return languages


def language_problem(languages: Mapping[str, Language], name: str, settings: IsolationSettings) -> str | None:
    """Return why programs of a language cannot be run on this machine, or None."""
    if name not in languages:
        return f"language {name!r} is not known: set data.verifier_args.languages.{name}"
    if missing := languages[name].missing():
        return f"language {name!r} needs {missing}, which is not found in {PATH}: install it"
    for command in (languages[name].compile, languages[name].run):
        path = find_command(command[0]) if command and not command[0].startswith("./") else None
        if path is not None and not is_visible(path, settings):
            place = os.path.realpath(path)
            return f"language {name!r} needs {place}, which programs cannot see: add its folder to readable, or move it"
    return None


def find_command(name: str) -> str | None:
    """Return the path of a command in the sandbox, or None."""
    return shutil.which(name, path=PATH)
