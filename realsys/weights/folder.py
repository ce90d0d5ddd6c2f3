"""Writer of verified tensors as a plain HF folder, for an engine that reads its weights from files.
Works with any transport."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from realsys.config.rules.free_memory import free_host_bytes
from realsys.generation.backend import Materialised
from realsys.weights.base import WeightReader
from realsys.weights.disk.manifest import auxiliary_files


@dataclass(frozen=True, slots=True)
class FolderWriter:
    """Stages versions with ``reader`` and writes them as folders.

    model_dir  HF folder of the model: its config and tokenizer files are copied
    overflow   folder to write to when there is no room at the target
    """

    reader: WeightReader
    model_dir: Path
    overflow: Path

    def write(self, locator: str, version: int, target: Path, *, loaded: bool = False) -> Materialised:
        """Write a version to ``target``, or to ``overflow`` when there is no room.

        ``loaded``: the engine has the version of the last call. If this one has the same weights, nothing is
        written. It writes the verified bytes from memory. Raises WeightsError if the version is damaged,
        OSError if it cannot be written.
        """
        from safetensors.torch import save_file

        from realsys.weights.disk.dtypes import dtype_name

        staged = self.reader.stage(locator, version, loaded=loaded)
        if loaded and staged.unchanged:
            return Materialised(None, staged.timings)
        begin = time.perf_counter()
        size = sum(tensor.nbytes for tensor in staged.tensors.values())
        # A memory-backed disk (/dev/shm) reports more room than there is: all processes share the memory.
        room = min(shutil.disk_usage(target.parent).free, free_host_bytes())
        folder = target if size * 1.1 < room else self.overflow
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            save_file(staged.tensors, folder / "model.safetensors")
            sizes = Counter[str]()
            for name, tensor in staged.tensors.items():
                sizes[dtype_name(name, tensor)] += tensor.nbytes
            for name, content in auxiliary_files(self.model_dir, sizes.most_common(1)[0][0]).items():
                (folder / name).write_bytes(content)
        except BaseException:  # half a version must not stay on a disk that is full
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return Materialised(folder, {**staged.timings, "write_s": time.perf_counter() - begin})
