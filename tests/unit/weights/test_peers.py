"""A version that is read from the copy of another host, over real HTTP; any failure ends at the storage."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from realsys.weights.host_reader import PATH
from tests.support.streams.weight_hosts import TOKEN, WeightHosts
from tests.support.streams.weight_versions import DiskVersions


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[WeightHosts]:
    with ExitStack() as stack:
        yield WeightHosts(tmp_path, stack, DiskVersions(tmp_path / "trial"))


def test_second_host_reads_from_the_first(hosts: WeightHosts) -> None:
    (first, service), (second, own), (third, _) = (hosts.host(name) for name in "abc")
    size = hosts.versions.publish() and hosts.versions.size
    assert hosts.stage(first, 0) == (size, 0)
    assert hosts.stage(second, 0, service.url) == (0, size)
    assert hosts.stage(third, 0, own.url) == (0, size)


def test_changed_tensors_of_the_next_version_are_fetched(hosts: WeightHosts) -> None:
    """Frozen tensors are held; they are neither read nor fetched again."""
    (first, service), (second, _) = hosts.host("a"), hosts.host("b")
    for version in range(3):
        hosts.versions.publish(lr=1e-2)
        hosts.stage(first, version)
        read, fetched = hosts.stage(second, version, service.url)
    assert read == 0 and fetched == 4 * 6000 * 2


@pytest.mark.parametrize("defect", ["gone", "other", "damaged", "cut"])
def test_failed_source_ends_at_the_storage(hosts: WeightHosts, defect: str) -> None:
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
    read, fetched = hosts.stage(second, 0, url)
    assert read + fetched == size
    assert fetched == 0 if defect in ("gone", "other") else 0 < read <= 12000


def test_copy_is_served_with_the_token_only(hosts: WeightHosts) -> None:
    (first, service) = hosts.host("a")
    hosts.versions.publish()
    hosts.stage(first, 0)
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
    assert status(f"{PATH}?version=x", **whole) == 404
    assert status(right, **{**whole, "Range": "bytes=0-999999999"}) == 416
    assert status("/../../etc/passwd", **whole) == 404


def test_copy_stays_while_it_is_sent(hosts: WeightHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender stages the next version beside it."""
    from realsys.weights import host_reader

    (first, service), (second, _) = hosts.host("a"), hosts.host("b")
    for _ in range(2):
        hosts.versions.publish(lr=1e-2)
    hosts.stage(first, 0)
    sending, resume, find = threading.Event(), threading.Event(), first.copies.find

    def slow(version: int, incarnation: str) -> host_reader.LeasedCopy | None:
        copy = find(version, incarnation)
        sending.set()
        assert resume.wait(60)
        return copy

    monkeypatch.setattr(first.copies, "find", slow)
    found = []
    thread = threading.Thread(target=lambda: found.append(hosts.stage(second, 0, service.url)))
    thread.start()
    assert sending.wait(60)
    hosts.stage(first, 1)
    resume.set()
    thread.join(60)
    assert found and found[0][1] > 0, "at least the tensor that was being sent"
