"""Staging: a weight version read into memory and verified, while the engine goes on generating."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from realsys.cluster.failpoint import failpoint
from realsys.errors import WeightsError
from realsys.weights.base import StagedWeights
from realsys.weights.disk import manifest as manifests
from realsys.weights.disk.dtypes import as_tensor
from realsys.weights.disk.manifest import Manifest
from realsys.weights.disk.reader import HeldTensor, VersionReader


@dataclass(slots=True)
class HeldWeights:
    """What a server keeps in host memory of the version it staged last, to read only what is new in the next.

    ``everything``: all tensors, at most once the size of the model, as deltas need it; otherwise those that a version
    takes over from an earlier one: the frozen ones, which it will most likely take over again.

    ``newest``: (incarnation of the training side, version) of what was staged last. What is older is refused: training
    that went back to a checkpoint publishes a lower version, but as a younger incarnation.
    """

    everything: bool = False
    tensors: dict[str, HeldTensor] = field(default_factory=dict)
    newest: tuple[str, int] = ("", -1)

    def wants(self, manifest: Manifest, name: str) -> bool:
        return self.everything or bool(manifest.tensors[name].pieces[-1].folder)


def stage(directory: Path, expected_version: int, held: HeldWeights | None = None) -> StagedWeights:
    """Read and verify every tensor of a version; with ``held`` only what is not held already.

    The bytes that are checked are the bytes that are loaded: a file changed between check and load cannot slip in.
    Raises WeightsError naming the file and what is wrong; nothing half-read is returned. With ``held``, tensors that an
    earlier call returned for it are overwritten: be done with them first.
    """
    failpoint("server.stage")
    manifest = manifests.load_manifest(directory)
    manifests.check_version(manifest, directory, expected_version)
    age = (manifest.incarnation, manifest.version)
    if held is not None and age < held.newest:
        incarnation, version = held.newest
        raise WeightsError(f"{directory} is older than version {version} of training side {incarnation}: not staged")
    tensors: dict[str, torch.Tensor] = {}
    with VersionReader(directory, manifest) as reader:
        if held is not None:
            held.tensors = {name: held.tensors[name] for name in held.tensors.keys() & manifest.tensors.keys()}
        for name in reader.order():
            # Taken out before it is changed: one that could not be brought up to date must not be held.
            found = reader.read(name, held.tensors.pop(name, None) if held is not None else None)
            if held is not None and held.wants(manifest, name):
                held.tensors[name] = found
            info = manifest.tensors[name]
            tensors[name] = as_tensor(found.data, info.dtype, info.shape)
    if held is not None:
        held.newest = age
    return StagedWeights(tensors, reader.report.timings(), reader.report.counts())


class DiskReader:
    """Stages one version after the other for one server, and reads only what is new in each."""

    def __init__(self, *, everything: bool = False) -> None:
        self._held = HeldWeights(everything)

    def stage(self, locator: str, version: int) -> StagedWeights:
        """Read and verify the version in the folder ``locator``. Raises WeightsError."""
        return stage(Path(locator), version, self._held)
