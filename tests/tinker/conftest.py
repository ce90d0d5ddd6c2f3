"""One service of a small model, and the cookbook's loops, for all tests here."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from realsys.serve.settings import new_key, read_settings
from tests.conftest import shared_servers
from tests.support.jobs.jobs import LiveJob, realsys, running
from tests.support.processes.forked import COMMAND
from tests.support.tinker.loops import HUB, Ended, Runner

NAME = "Qwen/Qwen3-4B-Instruct-2507"  # as the cookbook knows tokenizer and renderer


@dataclass(frozen=True)
class Service:
    """A service that runs. ``url``: its address for clients."""

    live: LiveJob
    runner: Runner
    url: str
    folder: Path

    def loop(self, module: str, name: str, **settings: Any) -> Ended:
        """Run a loop of the cookbook against this service, in the folder ``name``."""
        folder = self.folder / name
        own = {"base_url": self.url, "model_name": NAME, "log_path": str(folder), "lora_rank": 8}
        return self.runner.run(module, folder, **own, **settings)


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("tinker")
    home, model, root = folder / "home", folder / "model", folder / "runs" / "serve" / "cookbook"
    offline = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in offline.items():
            patch.setenv(name, value)
        runner = Runner()
        realsys("--version")  # imports what its commands need, beside the loops
        runner.run(HUB, folder / "hub", home=home, model=model).completed()
        keys = folder / "keys.yaml"
        keys.write_text(f"me: {{key: {new_key()}, models: 64}}", "utf-8")  # a loop does not unload its model
        words = [f"model.path={model}", f"fileroot={folder / 'runs'}", "allocation=serve.d1+d2"]
        words += ["train.lora.rank=8", "train.lora.alpha=16.0", "cluster.max_restarts=32"]
        words += [
            "--trial",
            root.name,
            "--model-name",
            NAME,
            "--keys",
            str(keys),
            "--plain",
            "telemetry.curves_every_s=0",
        ]
        with running(root, [*COMMAND, "serve", *words]) as live:
            shared_servers.add(live.process.pid)
            live.until(lambda: "clients: base_url=" in live.job.stdout, "the service answers")
            settings = read_settings(live.job.paths.serve)
            patch.setenv("TINKER_API_KEY", settings.owners["me"].key)
            yield Service(live, runner, f"http://127.0.0.1:{settings.port}", folder)
