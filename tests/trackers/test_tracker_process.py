"""All trackers together, in their process below a launcher."""

import asyncio
import json

import pytest

from realsys.config.compose import compose
from realsys.config.paths import TrialPaths
from realsys.observe.trackers import link
from realsys.observe.trackers.link import Trackers, check_trackers
from tests.support.polling import poll
from tests.support.run_logs import append, train
from tests.support.telemetry.wandb_files import history

pytestmark = [pytest.mark.needs(package=package) for package in ("wandb", "mlflow", "trackio")]

ALL = ["file", "tensorboard", "wandb", "mlflow", "trackio"]
BOUND_S = 120.0


def test_all_trackers_finish_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    settings = [f"fileroot={tmp_path}", "trial=t", f"telemetry.trackers={json.dumps(ALL)}"]
    settings += ["+telemetry.tracker_args.wandb.mode=offline"]
    monkeypatch.setattr(link, "FINISH_S", BOUND_S)
    config = compose(["experiment=arith", *settings])
    check_trackers(config)
    paths, said = TrialPaths.of(config), list[str]()
    paths.root.mkdir(parents=True)
    places = [paths.root / "trackers" / f"{name}.json" for name in ALL]

    def delivered():
        return [json.loads(place.read_text())["index"] if place.exists() else 0 for place in places]

    async def run():
        async with Trackers(config, paths, said.append) as trackers:
            append(paths.steps, train(1))
            await asyncio.to_thread(poll, lambda: delivered() == [1] * len(ALL), "the first step", BOUND_S)
            append(paths.steps, train(2))
            trackers.status = "done"

    asyncio.run(run())
    assert (said, delivered()) == ([], [2] * len(ALL))
    assert [row["train/step"] for row in history(paths.root)] == [1, 2]
