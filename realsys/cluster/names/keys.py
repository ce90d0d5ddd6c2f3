"""All keys of the name store: ``realsys/{user}/{experiment}/{trial}/...``. No other module builds keys."""

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

    @property
    def folder(self) -> str:
        """Key of the trial's folder, in a name store that outlives trials. Value: JSON TrialFolder."""
        return f"{self.root}/folder"

    def heartbeat(self, worker: str) -> str:
        """Key of a worker's heartbeat, leased. Value: JSON {kind, index, host, pid, incarnation, state}."""
        return f"{self.root}/heartbeat/{worker}"

    @property
    def heartbeats(self) -> str:
        return f"{self.root}/heartbeat"

    @property
    def trainer(self) -> str:
        """Root of the keys of a start of the trainer, which hold its incarnation. All are leased."""
        return f"{self.root}/trainer"

    @property
    def request_reply(self) -> str:
        """Key of the tcp address of the MasterWorker's request-reply socket. Value: JSON TrainerAddress."""
        return f"{self.trainer}/request_reply"

    @property
    def torch_store(self) -> str:
        """Key of host:port of torch's TCPStore for the process groups. Value: JSON TrainerAddress."""
        return f"{self.trainer}/torch_store"

    def pull(self, dp: int) -> str:
        """Key of the tcp address of the push-pull socket of DP head ``dp``."""
        return f"{self.root}/pull/{dp}"

    def generation_server(self, index: int) -> str:
        """Key of a server, leased. Value: JSON ServerAddress."""
        return f"{self.root}/generation_server/{index}"

    @property
    def generation_servers(self) -> str:
        return f"{self.root}/generation_server"

    def reward_service(self, index: int) -> str:
        """Key of a reward service, leased. Value: JSON ServerAddress."""
        return f"{self.reward_services}/{index}"

    @property
    def reward_services(self) -> str:
        return f"{self.root}/reward_service"

    @property
    def gserver_manager(self) -> str:
        """Key of the HTTP address of the manager."""
        return f"{self.root}/gserver_manager"

    def model_version(self, role: str = "actor") -> str:
        """Key of the newest complete weights. Value: JSON PublishedVersion."""
        return f"{self.root}/model_version/{role}"

    @property
    def status(self) -> str:
        """Key of the run's phase, which the MasterWorker sets. Value: JSON."""
        return f"{self.root}/status"
