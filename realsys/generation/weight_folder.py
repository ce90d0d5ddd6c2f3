"""Verified tensors as a plain HF folder, for an engine that reads its weights from files. Works with any transport."""

from __future__ import annotations

import functools
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from realsys.generation.backend import Materialised
from realsys.weights.contract import WeightReader
from realsys.weights.disk.manifest import auxiliary_files
from realsys.weights.group import GroupReader
from realsys.weights.host_places import choose


@dataclass(frozen=True, slots=True)
class FolderWriter:
    """Stages versions with ``reader``, and gives them as folders.

    model_dir  HF folder of the model: its config and tokenizer files are copied
    shared     folder to write every version to, for a server whose machines do not share the reader's memory
    """

    reader: WeightReader
    model_dir: Path
    shared: Path | None = None

    def write(
        self, locator: str, version: int, target: Path, *, loaded: bool = False, group: bool = False
    ) -> Materialised:
        """Return the folder of the reader; if it has none, write the verified bytes to ``target``.

        ``loaded``: the engine has the version of the last call. If this one has the same weights, nothing is
        written. ``group``: the engine can receive them from the reader's senders. Raises WeightsError if the version
        is damaged or does not fit, OSError if it cannot be written.
        """
        if group and isinstance(self.reader, GroupReader):
            senders = self.reader.senders(locator, version, loaded=loaded)
            if senders is not None:
                return Materialised(None, {}, senders=senders)
        staged = self.reader.stage(locator, version, loaded=loaded)
        if loaded and staged.unchanged:
            return Materialised(None, staged.timings, staged.release)
        begin = time.perf_counter()
        folder, release = staged.folder, staged.release
        if folder is None or self.shared is not None:
            folder = self.shared or target
            choose([folder.parent], sum(tensor.nbytes for tensor in staged.tensors.values()), version)
            from safetensors.torch import save_file

            from realsys.weights.disk.dtypes import dtype_name

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
            release()
            release = functools.partial(shutil.rmtree, folder, ignore_errors=True)
        return Materialised(folder, {**staged.timings, "write_s": time.perf_counter() - begin}, release)
