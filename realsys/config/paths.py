"""Files and folders of a trial, and the resolved configuration among them (``config.json``)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
from pydantic import ValidationError

from realsys.config.fields import with_present_names
from realsys.config.schema import Config
from realsys.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TrialPaths:
    """Paths of one trial, under ``{fileroot}/{experiment}/{trial}``."""

    root: Path

    @classmethod
    def of(cls, config: Config) -> TrialPaths:
        return cls(Path(config.fileroot).resolve() / config.experiment / config.trial)

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def errors(self) -> Path:
        """One JSON file per failed process."""
        return self.root / "errors"

    @property
    def name_store(self) -> Path:
        return self.root / "name_store"

    @property
    def own_etcd(self) -> Path:
        """Data of the etcd that the run starts (``cluster.name_store.start``)."""
        return self.root / "etcd"

    @property
    def store_address(self) -> Path:
        """host:port of the run's own etcd on another machine, once that machine has joined."""
        return self.root / "name_store.address"

    @property
    def lock(self) -> Path:
        """File that launcher and workers lock while they live. It names the last launcher."""
        return self.root / "lock"

    @property
    def coordinator(self) -> Path:
        """Address of the launcher for the agents of other nodes; there only while it waits for them or uses them."""
        return self.root / "coordinator.json"

    @property
    def stop_request(self) -> Path:
        """Request of `realsys stop`; there only until the launcher takes it."""
        return self.root / "stop"

    @property
    def job(self) -> Path:
        """Number of the SLURM job of this trial. Its script and its output are in the same folder."""
        return self.root / "job" / "job.json"

    @property
    def keys(self) -> Path:
        """Folder of the keys of the streams; mode 0700."""
        return self.root / "keys"

    @property
    def etcd_certificate(self) -> Path:
        """Certificate of the own etcd and of its clients, with its key; mode 0600."""
        return self.keys / "etcd.pem"

    @property
    def token(self) -> Path:
        """Token of the trial for calls that change the manager's state; mode 0600."""
        return self.root / "token"

    @property
    def start(self) -> Path:
        """Start of the trial as the launcher decided it (realsys.train.master.recovery)."""
        return self.root / "start.json"

    @property
    def start_model(self) -> Path:
        """Untrained model that the launcher makes if ``model.path`` is empty."""
        return self.root / "start_model"

    def base_model(self, config: Config) -> Path:
        """HF directory of the model that the actor begins with."""
        return Path(config.model.path) if config.model.path else self.start_model

    @property
    def warmed_up(self) -> Path:
        """HF directory of the actor after the supervised warm-up. Roles without a ``path`` load it."""
        return self.root / "warmed_up"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def data_sources(self) -> Path:
        """Sources of the trial's own copy of its data. The file exists only if the data had to be converted."""
        return self.data / "sources.json"

    @property
    def demos(self) -> Path:
        """The trial's own rows to learn from: those of the arith task, or a copy of a table or folder."""
        return self.data / "demos.jsonl"

    @property
    def submitted(self) -> Path:
        """Rows that the training script has made (``data.order=script``)."""
        return self.data / "submitted.jsonl"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.jsonl"

    @property
    def steps(self) -> Path:
        """Step log: one JSON record per warm-up step, train step and evaluation, from the MasterWorker."""
        return self.root / "steps.jsonl"

    @property
    def final_model(self) -> Path:
        """The trained actor as HF directory; there once training has finished."""
        return self.root / "model"

    @property
    def checkpoints(self) -> Path:
        """Training state to continue from, one folder per step."""
        return self.root / "checkpoints"

    @property
    def records(self) -> Path:
        """Records of the samples of each train step, one folder per step."""
        return self.root / "record"

    @property
    def evaluations(self) -> Path:
        """Completions and results of evaluations, one folder per evaluation (realsys.observe.evaluation_records)."""
        return self.root / "evaluations"

    @property
    def dropped(self) -> Path:
        """Groups that were not trained, a bounded number of them per process."""
        return self.root / "dropped"

    @property
    def spans(self) -> Path:
        """Timeline of the processes, a bounded folder per process (realsys.observe.spans)."""
        return self.root / "spans"

    @property
    def events(self) -> Path:
        """Starts, restarts and notes of the launcher, one JSON record per line (realsys.observe.step_log)."""
        return self.root / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """Metrics of the file tracker, one JSON record per line."""
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files of TensorBoard."""
        return self.root / "tensorboard"

    @property
    def session(self) -> Path:
        """Address for the calls of a training script in another process (``realsys.session.SessionAddress``)."""
        return self.root / "session.json"

    @property
    def clients(self) -> Path:
        """Journals and states of the models of `realsys serve`'s clients, a folder for each."""
        return self.root / "clients"

    @property
    def serve(self) -> Path:
        """Port, name and keys of `realsys serve` (``realsys.serve.settings``); mode 0600."""
        return self.root / "serve.json"

    @property
    def stopping(self) -> Path:
        """File that shows how far the stop of the MasterWorker is; there only during a stop."""
        return self.root / "stopping"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def curves(self) -> Path:
        return self.root / "curves.png"

    def incarnation(self, kind: str, index: int) -> Path:
        """File with the newest incarnation number of this worker: numbers grow even if the clock is set back."""
        return self.root / "incarnations" / f"{kind}-{index}"

    def weights(self, role: str = "actor") -> Path:
        return self.root / "weights" / role


# ---- config.json: the launcher writes it once per trial, every worker reads it


def write_config(config: Config, path: Path) -> None:
    """Write ``config`` as JSON, atomically: a reader finds the whole file or no file."""
    staged = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with staged.open("w", encoding="utf-8") as file:
        file.write(config.model_dump_json(indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)


def read_config(path: Path) -> Config:
    """Read a dump. Raises ConfigError, which names the file, if it is missing or invalid."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        problem = "not found: the folder is not a trial, or its launcher has not finished making it"
        raise ConfigError("config.json", str(path), problem) from None
    except OSError as exc:
        raise ConfigError("config.json", str(path), exc.strerror or "cannot be read") from None
    except UnicodeDecodeError as exc:
        raise ConfigError("config.json", str(path), f"must be UTF-8 text: {exc}") from None
    try:
        return Config.model_validate_json(msgspec.json.encode(with_present_names(msgspec.json.decode(text))))
    except msgspec.DecodeError as exc:
        raise ConfigError("config.json", str(path), f"content: Invalid JSON: {exc}") from None
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError("config.json", str(path), f"{where or 'content'}: {first['msg']}") from None


def newest_dump(fileroot: Path, experiment: str = "*") -> Path | None:
    """Return the config.json of the newest trial of one experiment or of all, or None without trials."""
    dumps = list(fileroot.glob(f"{experiment}/*/config.json"))
    return max(dumps, key=lambda path: path.stat().st_mtime, default=None)
