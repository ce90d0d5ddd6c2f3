"""The launcher ``local``: the user, or a script, starts an agent on each machine."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from realsys.launch.launchers.contract import Launcher


class LocalLauncher(Launcher):
    """Shows the command of an agent."""

    async def start(self, agent: Sequence[str], say: Callable[[str], None]) -> None:
        spares = self.config.cluster.spare_nodes
        also = f", and {spares} more as spares" if spares else ""
        say(f"start on {self.config.cluster.nodes} machines{also}: {shlex.join(agent)} --node $(hostname)")
