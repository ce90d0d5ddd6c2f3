"""Snapshot of weights in host memory: copied in a thread, and exchanged with the weights in place."""

from threading import Event

import pytest
import torch

from realsys.errors import WeightsError
from realsys.train.megatron import offload
from realsys.train.megatron.device import Device
from realsys.train.megatron.offload import OffloadCopies, WeightSnapshot

CPU = Device(torch.device("cpu"), "gloo")


def weights(value):
    shapes, types = [(3, 5), (7,), (0, 2)], [torch.bfloat16, torch.float32, torch.float32]
    return [
        torch.nn.Parameter(torch.full(shape, value, dtype=dtype)) for shape, dtype in zip(shapes, types, strict=True)
    ]


def move(parameters, value):
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(value)


def values(parameters):
    return {value for parameter in parameters for value in parameter.flatten().tolist()}


@pytest.mark.parametrize("spare", [8, 64 << 20])
def test_snapshot_and_weights_change_places(spare, monkeypatch):
    """Piece by piece, also if the block fails. The memory of the first snapshot serves the second."""
    monkeypatch.setattr(offload, "_SPARE", spare)
    parameters = weights(1.0)
    snapshot = WeightSnapshot(CPU, parameters, 60.0)
    snapshot.take(3)
    memory = {copy.data_ptr() for copy in snapshot.finish().values()}
    move(parameters, 2.0)
    with pytest.raises(KeyError), snapshot.swapped_in():
        assert values(parameters) == {1.0}
        raise KeyError
    assert values(parameters) == {2.0} and snapshot.version == 3
    snapshot.take(4)
    assert {copy.data_ptr() for copy in snapshot.finish().values()} == memory
    move(parameters, 5.0)
    with snapshot.swapped_in():
        assert values(parameters) == {2.0}


def test_copy_that_hangs_is_an_error(monkeypatch):
    resume, take = Event(), OffloadCopies.take
    monkeypatch.setattr(OffloadCopies, "take", lambda *arguments: resume.wait(60) and take(*arguments))
    snapshot = WeightSnapshot(CPU, weights(1.0), 0.01)
    snapshot.take(3)
    with pytest.raises(WeightsError, match="the copy of version 3 takes longer than 0.01 s"):
        snapshot.finish()
    resume.set()
