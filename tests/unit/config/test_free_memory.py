"""Free memory under cgroups of both versions, and the memory of GPUs, from files and text of this test."""

from __future__ import annotations

from pathlib import Path

import pytest

from realsys.config.machine import free_gpu_share, free_host_bytes, gpu_bytes, smallest_gpu

GIB = 1 << 30
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")
LISTED = "0, GPU-aa11, 81559, 81559\n1, GPU-bb22, 143771, 35942\n2, GPU-cc33, [N/A], [N/A]\n"


def machine(root: Path, cgroup: str = "") -> Path:
    """A root with 100 GiB available."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {100 * GIB // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def limit(folder: Path, names: tuple[str, str, str], most: object, usage: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{most}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


def test_node_without_cgroups_has_what_is_available(tmp_path: Path) -> None:
    assert free_host_bytes(machine(tmp_path)) == 100 * GIB


def test_limit_of_version_2_counts_without_page_cache(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/slurm/job_7/step_0\n")
    limit(root / "sys/fs/cgroup/slurm/job_7/step_0", V2, "max", 30 * GIB)
    limit(root / "sys/fs/cgroup/slurm/job_7", V2, 40 * GIB, 30 * GIB, cache=5 * GIB)
    assert free_host_bytes(root) == 15 * GIB


@pytest.mark.parametrize(
    ("environment", "gib"),
    [
        ({"SLURM_MEM_PER_NODE": "20480"}, 20),
        ({"SLURM_MEM_PER_NODE": "0"}, 100),
        ({"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "8"}, 16),
        ({"SLURM_MEM_PER_CPU": "2048"}, 100),
    ],
)
def test_limit_of_slurm_counts_without_cgroups(tmp_path: Path, environment: dict[str, str], gib: int) -> None:
    assert free_host_bytes(machine(tmp_path), environment) == gib * GIB


def test_limit_of_version_1_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, "9:cpu,cpuacct:/x\n8:memory:/slurm/uid_1/job_7\n")
    limit(root / "sys/fs/cgroup/memory/slurm/uid_1/job_7", V1, 1 << 62, GIB)
    limit(root / "sys/fs/cgroup/memory/slurm", V1, 8 * GIB, 6 * GIB)
    assert free_host_bytes(root) == 2 * GIB


def test_container_sees_only_its_own_mount(tmp_path: Path) -> None:
    """The path is the host's, and the files of the container's cgroup are at the root of the mount."""
    root = machine(tmp_path, "0::/docker/0123\n")
    limit(root / "sys/fs/cgroup", V2, 16 * GIB, 4 * GIB)
    assert free_host_bytes(root) == 12 * GIB


def test_full_cgroup_leaves_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/job\n")
    limit(root / "sys/fs/cgroup/job", V2, GIB, 2 * GIB)
    assert free_host_bytes(root) == 0


@pytest.mark.parametrize(
    ("gpus", "mib"),
    [(["0", "1"], 81559), (["1"], 143771), (["GPU-bb"], 143771), (["2"], 0), (["MIG-1"], 0), ([], 0)],
)
def test_smallest_gpu_counts(gpus: list[str], mib: int) -> None:
    assert smallest_gpu(LISTED, gpus) == mib << 20


def test_missing_nvidia_smi_means_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert gpu_bytes(["0"]) == 0 and free_gpu_share(["0"]) == 1.0


@pytest.mark.parametrize(
    ("gpus", "share"), [(["0"], 1.0), (["0", "1"], 0.25), (["GPU-bb"], 0.25), (["2"], 1.0), ([], 1.0)]
)
def test_fullest_gpu_tells_the_free_share(gpus: list[str], share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realsys.config.machine._list_gpus", lambda: LISTED)
    assert free_gpu_share(gpus) == pytest.approx(share, abs=1e-5)
