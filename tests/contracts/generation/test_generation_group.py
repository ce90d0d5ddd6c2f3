"""The contract of ``weights.transport=group``: engines receive versions from the ranks' memory, whole or not at all.

TRL #6913 and AReaL #1439: a transfer whose other side had gone left the engine in a collective, or with a mixture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from realsys.generation.child.engine import ChildEngine
from realsys.generation.client import SamplingSpec
from realsys.generation.embedded.decoder import read_tensors
from realsys.generation.weight_folder import FolderWriter
from realsys.weights import memory
from realsys.weights.contract import build_transport
from realsys.weights.inside import realsys_group
from tests.support.processes.config_trees import changed
from tests.support.serving.generation_servers import (
    BOUND_S,
    PROMPT,
    Crowd,
    ServerUnderTest,
    Versions,
    check,
    drive,
    keeping,
)
from tests.support.streams.weight_trials import Trial

receives = pytest.mark.parametrize("backend", ["sglang", "sglang-derived", "vllm"], indirect=True, scope="module")
GREEDY = SamplingSpec(max_new_tokens=16, temperature=0.0)


class Ranks(Trial):
    """Two ranks whose versions have the weights of the suite's models."""

    def __init__(self, root: Path, versions: Versions) -> None:
        super().__init__(root, build_transport(changed("weights.transport=group")), token="secret")
        self._folder = versions.paths[-1].parent
        self.locators: dict[int, str] = {}

    def tensors(self, version: int):
        return read_tensors(self._folder / f"hf{2 - version % 2}")


@pytest.fixture
def ranks(server: ServerUnderTest, versions: Versions, tmp_path: Path, monkeypatch) -> Iterator[Ranks]:
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(memory, "places", lambda: [tmp_path / "memory"])
    made = Ranks(tmp_path, versions)
    made.locators = {version: made.publish(version).locator for version in (1, 2)}
    with receiving(server, made):
        yield made
    for writer in made.writers:
        writer._http.close()
    made.store.close()


@contextmanager
def receiving(server: ServerUnderTest, ranks: Ranks) -> Iterator[None]:
    """Give a running server the reader of the transport."""
    assert isinstance(server.engine, ChildEngine)
    updater = server.engine._updater
    reader = ranks.transport.reader(ranks.parts)
    before, updater._materialise = updater._materialise, FolderWriter(reader, ranks.model).write
    yield
    updater._materialise = before
    reader.close()


async def answer_of(client, server):
    [made] = await client.generate(server.url, PROMPT, GREEDY, rid="", seed=1)
    return made


@receives
@pytest.mark.parametrize("keep", [False, True])
def test_update_by_group_in_mid_answer(server, ranks, keep):
    """With kept keys the rest of an answer attends to keys of earlier weights: its log-probs are of both."""

    async def test(client):
        for version in (1, 2):
            locator = ranks.locators[version]
            crowd = await Crowd.decoding(client, server.url)
            result = await client.update_weights(server.url, locator, version, BOUND_S)
            assert result.success, result.message
            assert "verify_s" not in result.timings and {"pause_s", "load_s"} <= result.timings.keys()
            answers = await crowd.finish()
            assert any(version in a.versions for a in answers)
            for answer in answers:
                assert (np.diff(answer.versions) >= 0).all()
                if not keep:
                    check(server, answer)
            check(server, await answer_of(client, server))
        assert (await client.model_info(server.url)).weight_version == "2"

    with keeping(server, 0) if keep else contextlib.nullcontext():
        drive(test)


@receives
@pytest.mark.parametrize("pieces", [0, 1, 5])
def test_engine_keeps_its_weights_if_the_sender_ends(server, ranks, monkeypatch, pieces):
    """The next attempt reads the version, instead of receiving it."""
    sent = []
    send = realsys_group.TransferGroup.broadcast

    def broadcast(group, piece):
        sent.append(piece)
        if len(sent) > pieces:
            raise RuntimeError("the rank has ended")
        send(group, piece)

    async def test(client):
        assert (await client.update_weights(server.url, ranks.locators[1], 1, BOUND_S)).success
        before = await answer_of(client, server)
        locator = ranks.locators[2]
        monkeypatch.setattr(realsys_group, "_PIECE", 1 << 14)
        monkeypatch.setattr(realsys_group.TransferGroup, "broadcast", broadcast)
        result = await client.update_weights(server.url, locator, 2, BOUND_S)
        assert not result.success and "its earlier weights are back" in result.message
        after = await answer_of(client, server)
        assert after.tokens.tolist() == before.tokens.tolist() and set(after.versions.tolist()) == {1}
        assert np.allclose(after.logprobs, before.logprobs, atol=1e-6)
        assert (await client.update_weights(server.url, locator, 2, BOUND_S)).success
        check(server, await answer_of(client, server))

    drive(test)


@receives
def test_damaged_bytes_are_not_loaded(server, ranks, tmp_path):
    async def test(client):
        locator = ranks.locators[1]
        for file in (tmp_path / "memory").glob("*/rank-1/*/*/*.safetensors"):
            content = np.memmap(file, np.uint8, "r+")
            content[-100:] ^= 1
        result = await client.update_weights(server.url, locator, 1, BOUND_S)
        assert not result.success and "arrived with digest" in result.message
        after = await answer_of(client, server)
        assert set(after.versions.tolist()) == {server.start}
        check(server, after)

    drive(test)


@receives
def test_rank_without_the_file_is_named(server, ranks):
    async def test(client):
        locator = ranks.locators[1]
        for writer in ranks.writers:
            writer._http.close()
        result = await client.update_weights(server.url, locator, 1, BOUND_S)
        assert not result.success and "no rank sends" in result.message
        check(server, await answer_of(client, server))

    drive(test)
