"""One copy of a version per host: shared, changed in place, removed when no server uses it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from realsys.errors import WeightsError
from realsys.generation.weight_folder import FolderWriter
from realsys.weights import host_places
from realsys.weights.disk.stage import DiskReader
from realsys.weights.host_places import sweep
from realsys.weights.host_reader import HostReader
from tests.support.streams.weight_versions import DiskVersions

BOUND_S = 60.0


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def versions(tmp_path: Path) -> DiskVersions:
    return DiskVersions(tmp_path / "trial")


@pytest.fixture
def servers(versions: DiskVersions, shm: Path) -> Iterator[list[HostReader]]:
    """Four servers of one host."""
    made = [versions.server([shm]) for _ in range(4)]
    yield made
    for server in made:
        server.close()


def copies(shm: Path) -> list[str]:
    return sorted(path.name.rpartition(".")[0] for path in shm.glob("realsys-weights-*/v*"))


def test_first_server_reads_and_others_share(versions: DiskVersions, servers: list[HostReader], shm: Path) -> None:
    path = versions.publish()
    results = [server.stage(str(path), 0) for server in servers]
    for result in results:
        versions.check(0, result.tensors)
    assert [result.counts["bytes_read"] for result in results] == [versions.size, 0, 0, 0]
    assert copies(shm) == ["v00000000.0001"]


def test_copy_is_a_model_folder(versions: DiskVersions, servers: list[HostReader]) -> None:
    folder = servers[0].stage(str(versions.publish()), 0).folder
    assert folder is not None and {"config.json", "model.safetensors"} <= {path.name for path in folder.iterdir()}
    versions.check(0, load_file(folder / "model.safetensors"))


def test_engines_load_the_shared_folder(versions: DiskVersions, servers: list[HostReader], shm: Path) -> None:
    """SGLang reads the copy itself: nothing is written for it, and nothing removed when it has loaded."""
    path = str(versions.publish())
    loaded = [FolderWriter(server, versions.model).write(path, 0, shm / "unused") for server in servers]
    assert len({each.directory for each in loaded}) == 1 and not (shm / "unused").exists()
    loaded[0].release()
    versions.check(0, load_file(loaded[1].directory / "model.safetensors"))


def test_folder_that_does_not_fit_is_not_written(
    versions: DiskVersions, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transport without copies of its own: its server writes the folder."""
    monkeypatch.setattr(host_places, "free_bytes", lambda place: 1000)
    with pytest.raises(WeightsError, match="no room on this host"):
        FolderWriter(DiskReader(), versions.model).write(str(versions.publish()), 0, shm / "v0")
    assert list(shm.iterdir()) == []


def test_released_copy_becomes_the_next(versions: DiskVersions, servers: list[HostReader], shm: Path) -> None:
    """Memory of one model is enough, and the frozen tensors are not read again."""
    for version in range(3):
        path = versions.publish(lr=1e-2)
        for server in servers:
            result = server.stage(str(path), version)
            versions.check(version, result.tensors)
            result.release()
        assert copies(shm) == [f"v{version:08d}.0001"]
    result = servers[1].stage(str(versions.publish(lr=1e-2)), 3)
    assert result.counts["kept"] == 2 and result.counts["whole"] == 4


def test_older_version_is_staged_if_the_manager_wants_it(versions: DiskVersions, servers: list[HostReader]) -> None:
    """A pin: on a server that has a newer one, and on a host that has a copy of it. Newer ones follow."""
    paths = [str(versions.publish(lr=1e-2)) for _ in range(3)]
    for server in servers[:2]:
        server.stage(paths[1], 1).release()
    for server in servers[1:3]:
        with pytest.raises(WeightsError, match="older than version 1"):
            server.stage(paths[0], 0)
    server = servers[1]
    server.offer(paths[0], (), older=True)
    staged = server.stage(paths[0], 0)
    versions.check(0, staged.tensors)
    staged.release()
    for server in servers:
        staged = server.stage(paths[2], 2)
        versions.check(2, staged.tensors)
        staged.release()


def test_copy_in_use_is_not_changed(versions: DiskVersions, servers: list[HostReader], shm: Path) -> None:
    slow = servers[0].stage(str(versions.publish()), 0)
    for version in (1, 2):
        servers[1].stage(str(versions.publish(lr=1e-2)), version).release()
        versions.check(0, slow.tensors)
        assert copies(shm) == ["v00000000.0001", f"v{version:08d}.0001"]
    slow.release()
    servers[1].stage(str(versions.publish()), 3)
    assert copies(shm) == ["v00000003.0001"]


@pytest.mark.parametrize("held", [True, False])
def test_deltas_are_applied_once_per_host(tmp_path: Path, shm: Path, held: bool) -> None:
    """To the copy before, or to a copy of it while a server still loads that one."""
    versions = DiskVersions(tmp_path / "trial", deltas=True)
    first, second = versions.server([shm]), versions.server([shm])
    before = first.stage(str(versions.publish()), 0)
    if not held:
        before.release()
    path = versions.publish()
    result = second.stage(str(path), 1)
    versions.check(1, result.tensors)
    assert result.counts["changed"] == 4 and result.counts["bytes_read"] < versions.size / 2
    assert first.stage(str(path), 1).counts["bytes_read"] == 0
    first.close()
    second.close()


def test_same_tensors_are_unchanged(versions: DiskVersions, servers: list[HostReader]) -> None:
    for version in range(2):
        path = versions.publish(lr=0.0)
        results = [server.stage(str(path), version) for server in servers[:2]]
        assert [result.unchanged for result in results] == [version == 1] * 2
    assert not servers[3].stage(str(path), 1).unchanged


def test_version_with_loaded_tensors_is_not_staged(
    versions: DiskVersions, servers: list[HostReader], shm: Path
) -> None:
    paths = [str(versions.publish(lr=0.0)) for _ in range(2)]
    servers[0].stage(paths[0], 0)
    before = copies(shm)
    staged = servers[0].stage(paths[1], 1, loaded=True)
    assert staged.unchanged and not staged.tensors and copies(shm) == before
    with pytest.raises(WeightsError, match="is older than version 1"):
        servers[0].stage(paths[0], 0, loaded=True)


def test_damaged_version_leaves_no_copy(versions: DiskVersions, servers: list[HostReader], shm: Path) -> None:
    path = versions.publish()
    file = path / "model-00001-of-00001.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    for server in servers[:2]:
        with pytest.raises(WeightsError, match="corrupt"):
            server.stage(str(path), 0)
    assert copies(shm) == []
    file.write_bytes(good)
    versions.check(0, servers[0].stage(str(path), 0).tensors)


def test_older_version_than_the_host_has_is_refused(versions: DiskVersions, servers: list[HostReader]) -> None:
    old, new = versions.publish(), versions.publish()
    servers[0].stage(str(new), 1)
    with pytest.raises(WeightsError, match="older than version 1 of trainer 0001, which this host has"):
        servers[1].stage(str(old), 0)


def test_later_trainer_with_lower_version_is_newer(tmp_path: Path, shm: Path) -> None:
    before, after = (DiskVersions(tmp_path / "trial" / name) for name in ("before", "after"))
    after.root = before.root
    for _ in range(3):
        old = before.publish("0001")
    server = before.server([shm])
    server.stage(str(old), 2).release()
    after.check(0, server.stage(str(after.publish("0002")), 0).tensors)
    with pytest.raises(WeightsError, match="older than version 0 of trainer 0002"):
        server.stage(str(old), 2)
    server.close()


def test_last_server_removes_everything(versions: DiskVersions, servers: list[HostReader], shm: Path) -> None:
    path = versions.publish()
    for server in servers:
        server.stage(str(path), 0)
    for server in servers[:3]:
        server.close()
    assert copies(shm) == ["v00000000.0001"]
    servers[3].close()
    assert list(shm.iterdir()) == []


KILLED = """
import sys, time
from pathlib import Path
from realsys.weights.disk.reader import VersionReader
from realsys.weights.host_copies import SharedCopies
from realsys.weights.host_reader import HostReader

trial, model, place, path, half = sys.argv[1:]
reader = HostReader(SharedCopies(Path(trial), Path(model), [Path(place)]))
if half == "half":
    read = VersionReader.read
    def hang(self, name, *rest):
        if name == "layer.3":
            print("ready", flush=True)
            sys.stdin.read()
        return read(self, name, *rest)
    VersionReader.read = hang
reader.stage(path, 0)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def killed(versions: DiskVersions, shm: Path, request: pytest.FixtureRequest) -> Path:
    """A version that a server had staged, or was staging, when it was killed."""
    path = versions.publish()
    arguments = [str(each) for each in (versions.root, versions.model, shm, path, request.param)]
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, *arguments], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGKILL)
        process.wait(BOUND_S)
    return path


@pytest.mark.processes
@pytest.mark.parametrize("killed", ["half", "whole"], indirect=True)
def test_next_server_cleans_up_after_a_kill(killed: Path, versions: DiskVersions, shm: Path) -> None:
    assert copies(shm) == ["v00000000.0001"]
    server = versions.server([shm])
    versions.check(0, server.stage(str(killed), 0).tensors)
    assert copies(shm) == ["v00000000.0001"]
    server.close()
    assert list(shm.iterdir()) == []


@pytest.mark.processes
@pytest.mark.parametrize("killed", ["half"], indirect=True)
def test_survivor_stages_after_a_kill(killed: Path, versions: DiskVersions, shm: Path) -> None:
    """The other server of the host lives on: the folder stays, the half copy does not."""
    survivor = versions.server([shm])
    versions.check(0, survivor.stage(str(killed), 0).tensors)
    survivor.close()


@pytest.mark.processes
@pytest.mark.parametrize("killed", ["whole"], indirect=True)
def test_other_trials_sweep_dead_ones_only(
    killed: Path, versions: DiskVersions, servers: list[HostReader], shm: Path, tmp_path: Path
) -> None:
    other = DiskVersions(tmp_path / "other")
    server = other.server([shm])
    other.check(0, server.stage(str(other.publish()), 0).tensors)
    assert len(list(shm.iterdir())) == 1, "the dead trial's folder is gone"
    servers[0].stage(str(killed), 0)
    sweep([shm])
    assert len(list(shm.iterdir())) == 2, "both trials live"
    server.close()


def test_hanging_server_does_not_stop_others(
    versions: DiskVersions, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from realsys.weights.host_copies import _Draft

    path, hangs, resume, fill = versions.publish(), threading.Event(), threading.Event(), _Draft.fill

    def hang(self: _Draft, reader: object) -> None:
        if not hangs.is_set():
            hangs.set()
            assert resume.wait(BOUND_S)
        fill(self, reader)  # type: ignore[arg-type]

    monkeypatch.setattr(_Draft, "fill", hang)
    first, second = versions.server([shm]), versions.server([shm], silent_s=0.05)
    found = []
    thread = threading.Thread(target=lambda: found.append(first.stage(str(path), 0)))
    thread.start()
    assert hangs.wait(BOUND_S)
    versions.check(0, second.stage(str(path), 0).tensors)
    resume.set()
    thread.join(BOUND_S)
    versions.check(0, found[0].tensors)
    first.close()
    second.close()


# ---- room


def test_copy_that_does_not_fit_goes_to_the_next_place(
    versions: DiskVersions, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    path = versions.publish()
    monkeypatch.setattr(host_places, "free_bytes", lambda place: 1000 if place == shm else 1 << 30)
    servers = [versions.server([shm, disk]) for _ in range(3)]
    assert [server.stage(str(path), 0).counts["bytes_read"] for server in servers] == [versions.size, 0, 0]
    assert (len(copies(shm)), len(copies(disk))) == (0, 1)
    assert caplog.text.count("has no room for") == 1
    for server in servers:
        server.close()
    assert [*shm.iterdir(), *disk.iterdir()] == []


def test_host_without_room_is_one_line(
    versions: DiskVersions, servers: list[HostReader], shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_places, "free_bytes", lambda place: 1000)
    path = versions.publish()
    with pytest.raises(WeightsError, match="no room on this host for the copy of version 0") as raised:
        servers[0].stage(str(path), 0)
    assert "\n" not in str(raised.value) and "has 0.00 GB" in str(raised.value)
    assert copies(shm) == []


def test_disk_in_memory_is_bounded_by_the_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_places, "free_host_bytes", lambda: 12345)
    assert host_places.free_bytes(Path("/dev/shm")) == 12345
    assert host_places.free_bytes(Path("/proc")) != 12345


def test_trials_have_different_names(tmp_path: Path) -> None:
    first = tmp_path / "a" / "trial"
    first.mkdir(parents=True)
    name = host_places.folder_name(first)
    assert name == host_places.folder_name(tmp_path / "a" / ".." / "a" / "trial")
    first.rename(tmp_path / "aside")
    first.mkdir()
    assert len({name, host_places.folder_name(first), host_places.folder_name(tmp_path)}) == 3


def test_update_of_four_servers_takes_one_model(tmp_path: Path, shm: Path) -> None:
    """Blocks of the shared folder, and what numpy reports to tracemalloc: 1.2 models at most."""
    versions = DiskVersions(tmp_path / "trial", elements=1 << 19)
    servers = [versions.server([shm]) for _ in range(4)]
    paths = [versions.publish(lr=1e-2) for _ in range(2)]
    tracemalloc.start()
    try:
        for version, path in enumerate(paths):
            results = [server.stage(str(path), version) for server in servers]
            shared = sum(file.stat().st_blocks * 512 for file in shm.rglob("model.safetensors"))
            assert shared + tracemalloc.get_traced_memory()[1] < 1.2 * versions.size
            for result in results:
                versions.check(version, result.tensors)
                result.release()
            del results, result
            tracemalloc.reset_peak()
    finally:
        tracemalloc.stop()
    for server in servers:
        server.close()
