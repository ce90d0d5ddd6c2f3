"""Every key of the name store, built in one place: ``{root}/{user}/{experiment}/{trial}/...``."""

from __future__ import annotations

from dataclasses import dataclass

ROOT = "realsys"


@dataclass(frozen=True, slots=True)
class Names:
    """The keys of one trial."""

    user: str
    experiment: str
    trial: str

    @property
    def root(self) -> str:
        return f"{ROOT}/{self.user}/{self.experiment}/{self.trial}"

    def heartbeat(self, worker: str) -> str:
        """Leased; value: JSON {kind, index, host, pid, incarnation, state}."""
        return f"{self.root}/heartbeat/{worker}"

    @property
    def heartbeats(self) -> str:
        return f"{self.root}/heartbeat"

    def request_reply(self, start: str) -> str:
        """tcp address of the MasterWorker's request-reply socket; ``start`` of the training side."""
        return f"{self.root}/request_reply/{start}"

    def pull(self, dp: int) -> str:
        """tcp address of the push-pull socket of DP head ``dp``."""
        return f"{self.root}/pull/{dp}"

    @property
    def pulls(self) -> str:
        return f"{self.root}/pull"

    def generation_server(self, index: int) -> str:
        """JSON ServerAddress; leased."""
        return f"{self.root}/generation_server/{index}"

    @property
    def generation_servers(self) -> str:
        return f"{self.root}/generation_server"

    @property
    def gserver_manager(self) -> str:
        """http address of the manager."""
        return f"{self.root}/gserver_manager"

    def model_version(self, role: str = "actor") -> str:
        """JSON PublishedVersion of the newest complete weights."""
        return f"{self.root}/model_version/{role}"

    def torch_store(self, start: str) -> str:
        """host:port of torch's TCPStore for the ModelWorkers' process groups; ``start`` of the training side."""
        return f"{self.root}/torch_store/{start}"

    @property
    def status(self) -> str:
        """JSON; the run's phase, set by the MasterWorker."""
        return f"{self.root}/status"
