"""Free memory under cgroups of both versions, and the memory of GPUs, from files and text of this test."""

import pytest

from realsys.config.machine import Machine, free_gpu_share, free_host_bytes, gpu_bytes, smallest_gpu, visible_gpus
from realsys.errors import ConfigError

GIB = 1 << 30
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")
LISTED = "0, GPU-aa11, 81559, 81559\n1, GPU-bb22, 143771, 35942\n2, GPU-cc33, [N/A], [N/A]\n"


def machine(root, cgroup=""):
    """A root with 100 GiB available."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {100 * GIB // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def limit(folder, names, most, usage, cache=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{most}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


def test_node_without_cgroups_has_what_is_available(tmp_path):
    assert free_host_bytes(machine(tmp_path)) == 100 * GIB


def test_limit_of_version_2_counts_without_page_cache(tmp_path):
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
def test_limit_of_slurm_counts_without_cgroups(tmp_path, environment, gib):
    assert free_host_bytes(machine(tmp_path), environment) == gib * GIB


def test_limit_of_version_1_counts(tmp_path):
    root = machine(tmp_path, "9:cpu,cpuacct:/x\n8:memory:/slurm/uid_1/job_7\n")
    limit(root / "sys/fs/cgroup/memory/slurm/uid_1/job_7", V1, 1 << 62, GIB)
    limit(root / "sys/fs/cgroup/memory/slurm", V1, 8 * GIB, 6 * GIB)
    assert free_host_bytes(root) == 2 * GIB


def test_container_sees_only_its_own_mount(tmp_path):
    """The path is the host's, and the files of the container's cgroup are at the root of the mount."""
    root = machine(tmp_path, "0::/docker/0123\n")
    limit(root / "sys/fs/cgroup", V2, 16 * GIB, 4 * GIB)
    assert free_host_bytes(root) == 12 * GIB


def test_full_cgroup_leaves_nothing(tmp_path):
    root = machine(tmp_path, "0::/job\n")
    limit(root / "sys/fs/cgroup/job", V2, GIB, 2 * GIB)
    assert free_host_bytes(root) == 0


@pytest.mark.parametrize(
    ("gpus", "mib"), [(["0", "1"], 81559), (["1"], 143771), (["GPU-bb"], 143771), (["2"], 0), (["MIG-1"], 0), ([], 0)]
)
def test_smallest_gpu_counts(gpus, mib):
    assert smallest_gpu(LISTED, gpus) == mib << 20


def test_missing_nvidia_smi_means_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert gpu_bytes(["0"]) == 0 and free_gpu_share(["0"]) == 1.0


@pytest.mark.parametrize(
    ("gpus", "share"), [(["0"], 1.0), (["0", "1"], 0.25), (["GPU-bb"], 0.25), (["2"], 1.0), ([], 1.0)]
)
def test_fullest_gpu_tells_the_free_share(gpus, share, monkeypatch):
    monkeypatch.setattr("realsys.config.machine._list_gpus", lambda: LISTED)
    assert free_gpu_share(gpus) == pytest.approx(share, abs=1e-5)


# ---- Description of the machine: CPU cores, memory and visible GPUs


def test_machine_describes_this_one():
    here = Machine.here({"CUDA_VISIBLE_DEVICES": ""})
    assert here.cpus >= 1 and here.memory_bytes > 1 << 20
    assert here.gpus == () and here.node().gpus == 0


@pytest.mark.parametrize(
    ("chosen", "gpus"),
    [
        (None, "0 1 2"),
        ("2,0", "2 0"),
        ("-1", ""),
        ("NoDevFiles", ""),
        ("1,-1,2", "1"),
        ("0,7", "0"),
        ("", ""),
        ("GPU-6c5b,MIG-77", "GPU-6c5b MIG-77"),
    ],
)
def test_visible_gpus_are_those_that_cuda_shows(chosen, gpus):
    assert visible_gpus(chosen, present=3) == tuple(gpus.split())


def test_gpu_that_is_visible_twice_is_refused():
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES='0,0': names a GPU twice"):
        visible_gpus("0,0", present=1)
