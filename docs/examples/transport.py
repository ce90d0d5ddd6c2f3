"""A weight transport: versions are copied to a second folder, and the servers read the copies.

realsys run ... weights.transport=transport:Mirror weights.transport_args.folder=/mnt/servers/weights
"""

import dataclasses
import shutil
from pathlib import Path

from realsys.weights.disk.transport import DiskPublisher, DiskTransport


class Mirror(DiskTransport):  # ranks write and servers read as with the transport "disk"
    def __init__(self, config, folder):
        super().__init__(config)
        self.folder = Path(folder).resolve(strict=True)  # an error here is one line of the launcher

    def publisher(self, parts):
        return MirrorPublisher(parts, self.config.weights.keep_versions, self.folder)


class MirrorPublisher(DiskPublisher):
    def __init__(self, parts, keep, folder):
        super().__init__(parts, keep)
        self.copies = DiskPublisher(dataclasses.replace(parts, root=folder), keep)

    def commit(self, version, step, plan, reports, *, replace=False):
        made = super().commit(version, step, plan, reports, replace=replace)
        copy = self.copies.root / Path(made.locator).name
        tmp = shutil.copytree(made.locator, f"{copy}.tmp", dirs_exist_ok=True)
        shutil.rmtree(copy, ignore_errors=True)  # with replace, a damaged copy is there
        Path(tmp).rename(copy)  # a server finds a whole copy or none
        return dataclasses.replace(made, locator=str(copy))

    def prune(self, in_use):
        return super().prune(in_use) + self.copies.prune(in_use)

    def discard_unfinished(self):
        return super().discard_unfinished() + self.copies.discard_unfinished()
