"""The transport ``group`` without an engine: who must send what, and what the launcher refuses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from realsys.cluster.network import advertised_host
from realsys.errors import ConfigError, WeightsError
from realsys.weights import inside, memory
from realsys.weights.contract import build_transport
from realsys.weights.group import GroupReader
from realsys.weights.inside import realsys_group
from realsys.weights.inside.realsys_group import Offer, digest, received
from tests.support.processes.config_trees import changed
from tests.support.streams.weight_trials import BOUND_S, Trial


@pytest.fixture(params=[()])
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Trial]:
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(memory, "places", lambda: [tmp_path / "memory"])
    made = Trial(tmp_path, build_transport(changed("weights.transport=group", *request.param)), token="secret")
    yield made
    for writer in made.writers:
        if writer._home is not None:
            writer._http.close()
    made.store.close()


@pytest.fixture
def reader(trial: Trial) -> Iterator[GroupReader]:
    made = trial.transport.reader(trial.parts)
    assert isinstance(made, GroupReader)
    yield made
    made.close()


def order(reader: GroupReader, trial: Trial, version: int, *, loaded: bool = False, everything: bool = False):
    senders = reader.senders(trial.publish(version).locator, version, loaded=loaded)
    assert senders is not None and senders.shapes.keys() == trial.base.keys()
    return asyncio.run(senders.order(1, everything=everything))


@pytest.mark.parametrize("piece", [1000, 64 << 20])
def test_all_tensors_arrive_as_they_are(trial, reader, monkeypatch, piece):
    monkeypatch.setattr(realsys_group, "_PIECE", piece)
    arrived = dict(received(order(reader, trial, 0), 1))
    assert arrived.keys() == trial.base.keys()
    assert all(torch.equal(arrived[name], tensor) for name, tensor in trial.tensors(0).items())


@pytest.mark.parametrize("trial", [("cluster.host=0.0.0.0",)], indirect=True)
def test_sender_names_an_address_that_others_reach(trial, reader):
    wanted = order(reader, trial, 0)
    assert {sender["place"]["host"] for sender in wanted["senders"]} == {advertised_host("0.0.0.0")}
    assert dict(received(wanted, 1)).keys() == trial.base.keys()


@pytest.mark.parametrize("everything", [False, True])
def test_engine_receives_what_it_has_not(trial, reader, everything):
    """The tensors that did not change are in files of the version before."""
    dict(received(order(reader, trial, 0), 1))
    arrived = dict(received(order(reader, trial, 1, loaded=True, everything=everything), 1))
    assert arrived.keys() == (trial.base.keys() if everything else {"model.norm.weight"})
    assert all(torch.equal(arrived[name], trial.tensors(1)[name]) for name in arrived)


def test_next_attempt_and_same_weights_are_staged(trial, reader):
    locator = trial.publish(0).locator
    assert reader.senders(locator, 0, loaded=False) is not None
    assert reader.senders(locator, 0, loaded=False) is None
    assert reader.stage(locator, 0).tensors.keys() == trial.base.keys()
    assert reader.senders(locator, 0, loaded=True) is None


def test_older_version_is_refused(trial, reader):
    older, newer = trial.publish(0).locator, trial.publish(1).locator
    assert reader.senders(newer, 1, loaded=False) is not None
    with pytest.raises(WeightsError, match="is older than version 1"):
        reader.senders(older, 0, loaded=False)


def test_engines_and_servers_have_one_word_for_it():
    assert inside.UNDONE == realsys_group.UNDONE and (inside.INSIDE / "realsys_group.py").is_file()


def test_token_is_needed(trial, reader):
    reader._token = "wrong"
    with pytest.raises(
        WeightsError, match=r"no rank sends v00000000.0001/model-0000.-of-00002.safetensors: status 401"
    ):
        order(reader, trial, 0)


def test_sender_without_a_receiver_ends(trial, reader, monkeypatch, caplog):
    monkeypatch.setattr(realsys_group, "_SILENCE", realsys_group.datetime.timedelta(seconds=0.2))
    order(reader, trial, 0)
    for thread in threading.enumerate():
        if thread.name.startswith("send-"):
            thread.join(BOUND_S)
            assert not thread.is_alive()
    assert "was not sent to server-0" in caplog.text


def test_receiver_that_ends_is_the_senders_error(monkeypatch):
    monkeypatch.setattr(realsys_group, "_PIECE", 1 << 20)
    offer = Offer("127.0.0.1", 2, "gloo", BOUND_S)
    described = [(name, "uint8", [1 << 20], "0" * 16) for name in "xyz"]

    def receive() -> None:
        with pytest.raises(ValueError, match="tensor x arrived with digest"):
            next(received({"senders": [{"place": offer.place, "tensors": described}]}, 1))

    receiver = threading.Thread(target=receive)
    receiver.start()
    with pytest.raises(RuntimeError):
        offer.send(torch.ones(3 << 20, dtype=torch.uint8), [(at << 20, 1 << 20) for at in range(3)], lambda: None)
    receiver.join(BOUND_S)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 300_001])
def test_digest_sees_each_byte_and_its_place(count):
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    words = torch.cat([data, data.new_zeros(-count % 8)]).view(torch.int64).tolist()
    assert (
        int(digest(data), 16)
        == (sum(word * (2 * i + 1) for i, word in enumerate(words)) + 8 * (-(-count // 8))) % 2**64
    )
    for at in {0, count // 2, count - 1} if count else ():
        other = data.clone()
        other[at] ^= 1
        assert digest(other) != digest(data)
    if count > 16:
        assert digest(torch.cat([data[8:16], data[:8], data[16:]])) != digest(data)


@pytest.mark.parametrize(
    ("change", "field", "word"),
    [
        ("weights.delta=auto", "weights.delta", "whole tensors"),
        ("cluster.share_gpus=true", "cluster.share_gpus", "in a group twice"),
        ("allocation=serve.d1|d1", "allocation", "use weights.transport=memory"),
    ],
)
def test_what_a_group_cannot_have_is_one_line(change, field, word):
    with pytest.raises(ConfigError, match=word) as raised:
        build_transport(changed("weights.transport=group", change)).check()
    assert str(raised.value).startswith(f"config: {field}=") and "\n" not in str(raised.value)
