"""The transport ``memory``: links to the ranks' memory on their own host, requests to the ranks from other hosts."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from starlette.requests import ClientDisconnect

from realsys.errors import WeightsError
from realsys.weights import memory
from realsys.weights.byte_ranges import OpenFile, RangeClient, range_app
from realsys.weights.contract import build_transport
from realsys.weights.disk.manifest import load_manifest
from tests.support.processes.config_trees import changed
from tests.support.streams.weight_trials import BOUND_S, Trial


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(memory, "places", lambda: [tmp_path / "memory"])
    made = Trial(tmp_path, build_transport(changed("weights.transport=memory", "weights.delta=auto")), token="secret")
    yield made
    end_ranks(made)
    made.store.close()


def end_ranks(trial: Trial) -> None:
    for writer in trial.writers:
        if writer._home is not None:
            writer._http.close()


def shards(tmp_path: Path) -> list[Path]:
    """Files in the memory of the ranks."""
    return list((tmp_path / "memory").glob("*/rank-*/weights/*/*.safetensors"))


def seen_from_another_host(trial: Trial) -> None:
    """Let the links of all versions lead nowhere, as they do where the ranks' memory is not."""
    for link in trial.root.glob("*/*"):
        if link.is_symlink():
            target = link.readlink()
            link.unlink()
            link.symlink_to(f"/of-another-host{target}")


def test_version_folder_holds_no_weights(trial: Trial) -> None:
    published = trial.publish(0)
    shards = [path for path in Path(published.locator).iterdir() if path.name.startswith("model-")]
    assert len(shards) == 2 and all(path.is_symlink() for path in shards)
    with trial.engine() as engine:
        for version in (0, 1):
            result = engine.update(trial.publish(version + 1).locator, version + 1).result(BOUND_S)
            assert result.success and result.counts["bytes_fetched"] == 0


def test_other_host_fetches_from_the_ranks(trial: Trial) -> None:
    """The second version changes one tensor; its other pieces are in files of the first."""
    first, second = trial.publish(0), trial.publish(1)
    seen_from_another_host(trial)
    for published in (second, first):
        with closing(trial.transport.reader(trial.parts)) as reader:
            staged = reader.stage(published.locator, published.version)
            wanted = trial.tensors(published.version)
            assert staged.tensors.keys() == wanted.keys()
            assert all(torch.equal(staged.tensors[name], tensor) for name, tensor in wanted.items())
            assert staged.counts["bytes_fetched"] >= staged.counts["bytes"] > staged.counts["bytes_read"] == 0


def test_master_on_another_host_checks_and_exports(trial: Trial, tmp_path: Path) -> None:
    trial.publish(0)
    seen_from_another_host(trial)
    locator = trial.publish(1).locator  # checks the version before, to which it refers
    seen_from_another_host(trial)
    trial.weights.verify(locator, 1)
    trial.weights.export(locator, 1, tmp_path / "plain")
    assert not any(path.is_symlink() for path in (tmp_path / "plain").iterdir())


@pytest.mark.parametrize("end", ["died", "wrong token", "damaged"])
def test_server_keeps_its_version_if_the_ranks_fail(trial: Trial, tmp_path: Path, end: str) -> None:
    with trial.engine(token="wrong" if end == "wrong token" else "secret") as engine:
        assert engine.update(trial.publish(0).locator, 0).result(BOUND_S).success
        locator = trial.publish(1).locator
        if end == "died":
            end_ranks(trial)
        if end == "damaged":
            for file in shards(tmp_path):
                content = np.memmap(file, np.uint8, "r+")
                content[-100:] ^= 1
        seen_from_another_host(trial)
        result = engine.update(locator, 1).result(BOUND_S)
        problem = {"died": "in the memory of the rank at http", "wrong token": "status 401", "damaged": "corrupt"}[end]
        assert not result.success and problem in result.message and engine.version == 0
        if end == "damaged":
            failing = {"failures": 1, "version": None}
            asyncio.run(trial.publisher.repair({"version": 1, "servers": [failing]}))
            assert engine.update(locator, 1).result(BOUND_S).success


def test_memory_of_deleted_versions_is_freed(trial: Trial, tmp_path: Path) -> None:
    for version in range(5):
        trial.publish(version)
    kept = {path.name for path in trial.root.iterdir()}
    trial.publish(5)  # frees what was deleted before
    assert len(kept) < 5 and {file.parent.name for file in shards(tmp_path)} <= kept | {"v00000005.0001"}


@pytest.mark.parametrize("file", ["../secret", "/etc/hostname", "secret"])
def test_rank_gives_nothing_but_shards(trial: Trial, tmp_path: Path, file: str) -> None:
    trial.publish(0)
    (url, *_) = load_manifest(trial.root / "v00000000.0001").ranks.values()
    for folder in ("v00000000.0001", "..", "memory"):
        with pytest.raises(Exception, match="status 40[14]"):
            RangeClient("secret").fetch(
                url, {"role": "weights", "folder": folder, "file": file}, 0, np.empty(1, np.uint8), lambda: None
            )


def test_no_room_is_one_line(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realsys.weights.host_places.free_bytes", lambda place: 1000)
    with pytest.raises(WeightsError, match="no room on this host") as raised:
        trial.publish(0)
    assert "\n" not in str(raised.value) and os.listdir(trial.root / "v00000000.0001.tmp") == []


def test_file_is_closed_if_the_client_leaves_before_the_first_byte(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345678")
    closed: list[bool] = []

    def find(_: object) -> OpenFile:
        return OpenFile(os.open(tmp_path / "file", os.O_RDONLY), lambda: closed.append(True))

    async def gone() -> dict[str, object]:
        return {"type": "http.disconnect"}

    async def request() -> dict[str, object]:
        return {"type": "http.request", "body": b""}

    async def send(message: object) -> None:
        raise OSError("the connection is closed")

    scope = {"type": "http", "asgi": {"version": "3.0"}, "method": "GET", "path": "/f", "raw_path": b"/f"}
    scope |= {"query_string": b"", "headers": [(b"range", b"bytes=0-7")], "server": ("127.0.0.1", 80), "scheme": "http"}
    app = range_app("/f", find, token=None)
    replies = iter([request, gone])

    async def receive() -> dict[str, object]:
        return await next(replies, gone)()

    with contextlib.suppress(OSError, ExceptionGroup, ClientDisconnect):
        asyncio.run(app(scope, receive, send))
    assert closed == [True]
