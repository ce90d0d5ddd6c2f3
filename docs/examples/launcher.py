"""A launcher: ssh starts an agent on the machines of a list.

HOSTS="a b c" realsys run ... cluster.launcher=launcher:Ssh cluster.nodes=2 cluster.spare_nodes=1
"""

import asyncio
import os
import shlex

from realsys.errors import ConfigError
from realsys.launch.launchers.contract import Launcher


class Ssh(Launcher):
    shells = ()

    @classmethod
    def check(cls, config):
        nodes, hosts = config.cluster.nodes, os.environ.get("HOSTS", "").split()
        if len(hosts) < nodes:
            raise ConfigError("cluster.nodes", nodes, f"the variable HOSTS names {len(hosts)}: list more hosts")

    async def start(self, agent, say):
        hosts = os.environ["HOSTS"].split()[: self.machines]
        commands = [("ssh", host, shlex.join([*agent, "--node", host])) for host in hosts]
        self.shells = [await asyncio.create_subprocess_exec(*command) for command in commands]

    def problem(self):
        if self.shells and all(shell.returncode for shell in self.shells):
            return f"ssh ended with code {self.shells[0].returncode} on every host"
        return ""

    async def stop(self):
        for shell in self.shells:
            if shell.returncode is None:
                shell.terminate()  # an agent without its launcher ends with its lease
            await shell.wait()
