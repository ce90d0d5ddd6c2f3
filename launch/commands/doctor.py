"""Look at this machine: packages, GPUs, attention kernel, NCCL, shared memory, limits and programs that a run may need.

One line each. ``fails``: no run can start, and the line says what to do; ``note``: some runs are slower or smaller than
they could be; ``-``: not there, and only the setting that is named needs it. On a cluster it is run on a node, in the
environment of the processes: `srun realsys doctor`. Exit code 1 if something fails.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import resource
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from packaging.requirements import Requirement

from realsys.cluster.stream.sockets import private_folder
from realsys.config.machine import Machine
from realsys.errors import RealsysError, SandboxError
from realsys.observe.screen.text_figures import size_text
from realsys.reward.sandbox.sandbox import Sandbox
from realsys.reward.sandbox.settings import RunLimits, missing_parts
from realsys.weights.host_places import SHARED_MEMORY

OK, NOTE, MISSING, FAILS = "ok", "note", "-", "fails"

_MOST_TOLD = ("torch", "megatron-core", "transformers")
_OPEN_FILES = 20_000  # sockets of 64 servers and 512 workers at one manager, twice
_SHARED_BYTES = 8 << 30  # weights that a server is given, and NCCL's buffers
#: program -> what needs it
_PROGRAMS = {"etcd": "cluster.name_store.start=true", "sbatch": "realsys submit"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, how it is, and what to do if it is not ``ok``."""

    what: str
    text: str
    state: str = OK


def add_arguments(parser: ArgumentParser) -> None:
    """It has none: it looks at the machine that it runs on."""


def run(args: Namespace) -> int:
    """Print the findings. Returns 1 if one of them fails."""
    failed = False
    for check in CHECKS:
        for finding in check():
            print(f"{finding.state:<6}{finding.what:<16}{finding.text}", flush=True)
            failed |= finding.state == FAILS
    return int(failed)


def machine() -> Iterator[Finding]:
    here = Machine.here()
    text = f"Python {platform.python_version()}, Linux {platform.release()}, {here.cpus} CPU cores, "
    yield Finding("machine", f"{text}{size_text(here.memory_bytes)} of memory free, {len(here.gpus)} GPUs")


def packages() -> Iterator[Finding]:
    """Compare the installed versions with those that realsys asks for."""
    asked = [Requirement(line) for line in importlib.metadata.requires("realsys") or ()]
    base = [each for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})]
    found = {each.name: _version(each.name) for each in base}
    bad = [each for each in base if not _fits(each, found[each.name])]
    for each in bad:
        problem = f"{found[each.name] or 'not installed'}, and realsys needs {each.specifier or 'it'}"
        yield Finding(each.name, f"{problem}: pip install '{each}'", FAILS)
    told = ", ".join(f"{name} {found[name]}" for name in _MOST_TOLD if found.get(name))
    yield Finding("packages", f"{len(base) - len(bad)} of {len(base)} as realsys needs them; {told}")
    if importlib.util.find_spec("sglang") is None:
        use = "generation.backend=sglang needs it here, or in the interpreter generation.sglang.python"
        yield Finding("sglang", f"not installed: {use}", MISSING)
    else:
        yield Finding("sglang", _version("sglang"))


def _fits(asked: Requirement, version: str) -> bool:
    return bool(version) and asked.specifier.contains(version, prereleases=True)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def gpus() -> Iterator[Finding]:
    """Use the GPUs as a training rank would: device, allocator, attention kernel, NCCL."""
    here = Machine.here()
    if not here.gpus:
        return
    if not here.torch_has_cuda:
        yield Finding("torch", "is built for CPU only, and there are GPUs: install a CUDA build of torch", FAILS)
        return
    import torch

    from realsys.cluster.gpu_devices import attention_kernel, choose_device, peak_flops
    from realsys.train.megatron.layers import swiglu_kernel

    for index in range(len(here.gpus)):
        try:
            properties = torch.cuda.get_device_properties(choose_device(index))
        except RealsysError as error:
            yield Finding(f"GPU {index}", str(error), FAILS)
            continue
        peak = peak_flops(properties.name)
        rate = f"{peak / 1e12:.0f} TFLOP/s" if peak else "not in the table of rates: set train.peak_tflops for the MFU"
        yield Finding(f"GPU {index}", f"{properties.name}, {size_text(properties.total_memory)}, {rate}")
    try:
        attention_kernel()
    except (RealsysError, RuntimeError) as error:
        yield Finding("attention", str(error), FAILS)
    else:
        current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
        yield attention(current or "", torch.cuda.get_device_capability()[0])
    swiglu_kernel(torch.ones(2, 8, dtype=torch.bfloat16, device="cuda"))
    if swiglu_kernel.is_compiled:
        yield Finding("fused kernels", "torch compiles them")
    else:
        problem = "torch cannot compile them (see the warning), a training step takes a tenth longer"
        yield Finding("fused kernels", f"{problem}: install a C compiler and the headers of Python", NOTE)
    if torch.distributed.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        yield Finding("NCCL", version)
    elif len(here.gpus) > 1:
        yield Finding("NCCL", "this torch has none: ranks on GPUs cannot talk, install another build", FAILS)


def attention(used: str, major: int) -> Finding:
    """Name the kernel that a training rank uses on a GPU of this major compute capability, and a faster one."""
    from realsys.cluster.gpu_devices import fast_attention

    if used:
        return Finding("attention", f"FlashAttention {used.removeprefix('FA')}")
    own, faster = "torch's own kernel, FlashAttention 2", [title for *_, title in fast_attention(major)]
    if not faster:
        return Finding("attention", f"{own}: the only one for this GPU")
    problem = "is not installed, or does not run (see the warning)"
    return Finding("attention", f"{own}: {' or '.join(faster)} is faster on this GPU, and {problem}", NOTE)


def memory() -> Iterator[Finding]:
    """Look at shared memory, and at the folder of the streams' sockets."""
    free, total = shutil.disk_usage(SHARED_MEMORY).free, shutil.disk_usage(SHARED_MEMORY).total
    yield shared_memory(free, total)
    try:
        yield Finding("sockets", f"{private_folder()}")
    except RealsysError as error:
        yield Finding("sockets", str(error), FAILS)


def shared_memory(free: int, total: int) -> Finding:
    """Say whether a server's copy of the weights and NCCL's buffers fit. Bytes."""
    text = f"{size_text(free)} of {size_text(total)} free in {SHARED_MEMORY}"
    if free >= _SHARED_BYTES:
        return Finding("shared memory", text)
    remedy = "start a container with --shm-size=16g or --ipc=host, or mount a larger tmpfs"
    return Finding("shared memory", f"{text}: servers keep weights there, and NCCL its buffers: {remedy}", NOTE)


def limits() -> Iterator[Finding]:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield open_files(files)
    if Machine.here().gpus and locked != resource.RLIM_INFINITY:
        problem = f"{size_text(locked)} may be locked, and InfiniBand needs no limit between nodes: "
        yield Finding("locked memory", f"{problem}ulimit -l unlimited, or memlock in limits.conf", NOTE)


def open_files(most: int) -> Finding:
    """Judge the hard limit of open files of a process."""
    if most == resource.RLIM_INFINITY or most >= _OPEN_FILES:
        return Finding("open files", "unlimited" if most == resource.RLIM_INFINITY else f"{most:,} a process")
    problem = f"{most:,} a process, enough for a small run: 64 servers and 512 workers need {_OPEN_FILES:,}"
    return Finding("open files", f"{problem}: raise the hard limit (ulimit -Hn, nofile in limits.conf)", NOTE)


def programs() -> Iterator[Finding]:
    """Look for the programs that some settings start, and run one program in the sandbox."""
    for name, use in _PROGRAMS.items():
        path = shutil.which(name)
        yield Finding(name, path or f"not found: {use} needs it", OK if path else MISSING)
    try:
        with Sandbox() as sandbox:
            sandbox.run("print(1)", b"", RunLimits())
    except SandboxError as error:
        yield Finding("sandbox", f"data.verifier=code cannot judge programs: {error}", NOTE)
    else:
        missing = missing_parts()
        text = "; ".join(missing) if missing else "user namespaces, seccomp and Landlock"
        yield Finding("sandbox", f"runs a program, without {text}" if missing else text, NOTE if missing else OK)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (machine, packages, gpus, memory, limits, programs)
