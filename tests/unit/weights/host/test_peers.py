"""A version that is read from the copy of another host, over real HTTP; any failure ends at the storage."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from realsys.cluster.http.http_server import HttpServer
from realsys.weights.host.host_reader import HostReader
from realsys.weights.host.peers import PATH, copy_app
from tests.support.streams.weight_versions import DiskVersions

TOKEN = "secret"


class Hosts:
    """Hosts of a trial; each has a memory, a server, and the service of its copies."""

    def __init__(self, root: Path, stack: ExitStack, versions: DiskVersions) -> None:
        self._root, self._stack, self.versions = root, stack, versions

    def host(self, name: str) -> tuple[HostReader, HttpServer]:
        memory = self._root / name
        memory.mkdir()
        reader = self._stack.enter_context(closing(self.versions.server([memory])))
        reader.token = TOKEN
        http = HttpServer(copy_app(reader.copies, token=TOKEN))
        http.start()
        self._stack.callback(http.close)
        return reader, http


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield Hosts(tmp_path, stack, DiskVersions(tmp_path / "trial"))


def counts(hosts: Hosts, reader: HostReader, version: int, *sources: str) -> tuple[int, int]:
    """Stage a version; returns the bytes from storage and from other hosts."""
    path = str(hosts.versions.paths[version])
    reader.offer(path, sources)
    staged = reader.stage(path, version)
    hosts.versions.check(version, staged.tensors)
    staged.release()
    return staged.counts["bytes_read"], staged.counts["bytes_fetched"]


def test_second_host_reads_from_the_first(hosts: Hosts) -> None:
    (first, service), (second, own), (third, _) = (hosts.host(name) for name in "abc")
    size = hosts.versions.publish() and hosts.versions.size
    assert counts(hosts, first, 0) == (size, 0)
    assert counts(hosts, second, 0, service.url) == (0, size)
    assert counts(hosts, third, 0, own.url) == (0, size)


def test_changed_tensors_of_the_next_version_are_fetched(hosts: Hosts) -> None:
    """Frozen tensors are held; they are neither read nor fetched again."""
    (first, service), (second, _) = hosts.host("a"), hosts.host("b")
    for version in range(3):
        hosts.versions.publish(lr=1e-2)
        counts(hosts, first, version)
        read, fetched = counts(hosts, second, version, service.url)
    assert read == 0 and fetched == 4 * 6000 * 2


@pytest.mark.parametrize("defect", ["gone", "other", "damaged", "cut"])
def test_failed_source_ends_at_the_storage(hosts: Hosts, defect: str) -> None:
    (first, service), (second, _) = hosts.host("a"), hosts.host("b")
    hosts.versions.publish()
    size = hosts.versions.size
    staged = first.stage(str(hosts.versions.paths[0]), 0)
    assert staged.folder is not None
    file, url = staged.folder / "model.safetensors", service.url
    if defect == "gone":
        url = "http://127.0.0.1:9"
    elif defect == "other":
        hosts.versions.publish()
        staged.release()
        first.stage(str(hosts.versions.paths[1]), 1)
    elif defect == "damaged":
        content = bytearray(file.read_bytes())
        content[-2] ^= 1
        with file.open("rb+") as opened:
            opened.write(content)
    else:
        with file.open("rb+") as opened:
            opened.truncate(file.stat().st_size - 100)
    read, fetched = counts(hosts, second, 0, url)
    assert read + fetched == size
    assert fetched == 0 if defect in ("gone", "other") else 0 < read <= 12000


def test_copy_is_served_with_the_token_only(hosts: Hosts) -> None:
    (first, service) = hosts.host("a")
    hosts.versions.publish()
    counts(hosts, first, 0)
    place = urlsplit(service.url)

    def status(path: str, **headers: str) -> int:
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
        with closing(connection):
            connection.request("GET", path, headers=headers)
            return connection.getresponse().status

    right, whole = f"{PATH}?version=0&incarnation=0001", {"Range": "bytes=0-9", "Authorization": f"Bearer {TOKEN}"}
    assert status(right, **whole) == 206
    assert status(right, Range="bytes=0-9") == 401
    assert status(f"{PATH}?version=1&incarnation=0001", **whole) == 404
    assert status(f"{PATH}?version=x", **whole) == 400
    assert status(right, **{**whole, "Range": "bytes=0-999999999"}) == 416
    assert status("/../../etc/passwd", **whole) == 404


def test_copy_stays_while_it_is_sent(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender stages the next version beside it."""
    from realsys.weights.host import peers

    (first, service), (second, _) = hosts.host("a"), hosts.host("b")
    for _ in range(2):
        hosts.versions.publish(lr=1e-2)
    counts(hosts, first, 0)
    sending, resume, find = threading.Event(), threading.Event(), first.copies.find

    def slow(version: int, incarnation: str) -> peers.LeasedCopy | None:
        copy = find(version, incarnation)
        sending.set()
        assert resume.wait(60)
        return copy

    monkeypatch.setattr(first.copies, "find", slow)
    found = []
    thread = threading.Thread(target=lambda: found.append(counts(hosts, second, 0, service.url)))
    thread.start()
    assert sending.wait(60)
    counts(hosts, first, 1)
    resume.set()
    thread.join(60)
    assert found and found[0][1] > 0, "at least the tensor that was being sent"
