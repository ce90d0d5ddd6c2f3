"""Staging: a weight version is read into memory and verified while the engine generates. After an error
the engine continues with the weights that it has (``fenced-weights``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from realsys.cluster.failpoint import failpoint
from realsys.errors import WeightsError
from realsys.weights.byte_ranges import RangeClient
from realsys.weights.contract import StagedWeights
from realsys.weights.disk import manifest as manifests
from realsys.weights.disk.dtypes import as_tensor
from realsys.weights.disk.manifest import VersionManifest
from realsys.weights.disk.reader import HeldTensor, VersionReader, all_kept


@dataclass(slots=True)
class HeldWeights:
    """Tensors of the last staged version in a server's host memory, so that it reads only the changes of the next.

    everything  True: hold all tensors, at most once the size of the model, as deltas need it. False:
                hold those that a version takes over from an earlier one: the frozen tensors, which the
                next version most likely takes over, too
    newest      (trainer incarnation, version) of the last staged version. Older ones are refused
                (``monotonic``): a trainer that went back to a checkpoint publishes a lower version, but as a
                later incarnation
    checksums   of all tensors of the last staged version; empty if the last call failed
    """

    everything: bool = False
    tensors: dict[str, HeldTensor] = field(default_factory=dict)
    newest: tuple[str, int] = ("", -1)
    checksums: dict[str, str] = field(default_factory=dict)

    def keeps(self, manifest: VersionManifest, name: str) -> bool:
        """Return True if the tensor ``name`` is to be held for the next version."""
        return self.everything or bool(manifest.tensors[name].pieces[-1].folder)


def stage(
    directory: Path,
    expected_version: int,
    held: HeldWeights | None = None,
    *,
    loaded: bool = False,
    shards: RangeClient | None = None,
) -> StagedWeights:
    """Read and verify every tensor of a version; with ``held`` only the parts that are not held already.

    ``loaded``: the engine has the version of the last call. One with the same tensors is then returned without them,
    and nothing of it is read. ``shards``: as in VersionReader.

    The checksums are computed over the bytes that are returned, so a file that changes between check and
    use cannot slip in. Raises WeightsError, which names the file and the damage; nothing is returned in
    part. With ``held``, the tensors that an earlier call returned for it are overwritten: the caller must
    not use them any more.
    """
    failpoint("server.stage")
    manifest = manifests.load_manifest(directory, expected_version)
    age = (manifest.incarnation, manifest.version)
    if held is not None and age < held.newest:
        incarnation, version = held.newest
        raise WeightsError(f"{directory} is older than version {version} of trainer {incarnation}: not staged")
    checksums = {name: info.checksum for name, info in manifest.tensors.items()}
    unchanged = held is not None and checksums == held.checksums
    if held is not None and unchanged and loaded:
        held.newest = age
        return StagedWeights({}, counts=all_kept(manifest).counts(), unchanged=True)
    if held is not None:
        held.checksums = {}
    tensors: dict[str, torch.Tensor] = {}
    with VersionReader(directory, manifest, shards=shards) as reader:
        if held is not None:
            held.tensors = {name: held.tensors[name] for name in held.tensors.keys() & manifest.tensors.keys()}

        def read(own: VersionReader, name: str) -> None:
            # Removed before it is changed: after an error its bytes are of no version, and a later
            # delta must not be applied to them.
            tensor = own.read(name, held.tensors.pop(name, None) if held is not None else None)
            if held is not None and held.keeps(manifest, name):
                held.tensors[name] = tensor
            info = manifest.tensors[name]
            tensors[name] = as_tensor(tensor.data, info.dtype, info.shape)

        reader.read_all(read)
    if held is not None:
        held.newest, held.checksums = age, checksums
    return StagedWeights(tensors, reader.report.timings(), reader.report.counts(), unchanged)


class DiskReader:
    """Stages one version after the other in memory of this server alone, and reads only the changes of each."""

    def __init__(self, *, everything: bool = False) -> None:
        self._held = HeldWeights(everything)

    def stage(self, locator: str, version: int, *, loaded: bool = False) -> StagedWeights:
        """Read and verify the version in the folder ``locator``. Raises WeightsError."""
        return stage(Path(locator), version, self._held, loaded=loaded)

    def close(self) -> None:
        self._held = HeldWeights(self._held.everything)
