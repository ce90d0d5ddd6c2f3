"""Staging: a weight version read into memory and verified, while the engine goes on generating."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load

from realsys.errors import WeightsError
from realsys.weights import manifest as manifests
from realsys.weights.manifest import Manifest


@dataclass(slots=True)
class StagedWeights:
    """Verified tensors in host memory, by HF name. ``timings`` are seconds."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]
    timings: dict[str, float] = field(default_factory=dict)


def stage(directory: Path, expected_version: int) -> StagedWeights:
    """Read, verify and parse every file of a version.

    The bytes that are checked are the bytes that are parsed: a file changed between check and load cannot slip in.
    Raises WeightsError naming the file and what is wrong; nothing half-read is returned.
    """
    manifest = manifests.load_manifest(directory)
    manifests.check_version(manifest, directory, expected_version)
    tensors: dict[str, torch.Tensor] = {}
    read = verified = parsed = 0.0
    for shard in manifest.files:
        path = directory / shard.file
        start = time.perf_counter()
        try:
            blob = path.read_bytes()
        except OSError as error:
            raise WeightsError(f"{path} is in the manifest but cannot be read: {error.strerror}") from error
        after_read = time.perf_counter()
        manifests.check_file(path, shard, xxhash.xxh3_64_hexdigest(blob))
        after_verify = time.perf_counter()
        try:
            found = load(blob)
        except SafetensorError as error:
            raise WeightsError(f"{path} is no safetensors file: {error}") from error
        if found.keys() != shard.tensors.keys():
            odd = sorted(found.keys() ^ shard.tensors.keys())
            raise WeightsError(f"{path} does not hold the tensors of the manifest: {', '.join(odd[:3])}")
        tensors.update(found)
        read += after_read - start
        verified += after_verify - after_read
        parsed += time.perf_counter() - after_verify
    return StagedWeights(manifest, tensors, {"read_s": read, "verify_s": verified, "parse_s": parsed})
