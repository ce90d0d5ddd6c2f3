"""The trackio library with its local database."""

import importlib
from typing import Any

import pytest

from tests.support.run_logs import evaluation, train, warmup

pytestmark = [pytest.mark.needs(package="trackio"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def database(tmp_path_factory):
    """Set the folder of all projects, which trackio reads when it is imported."""
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder))
        importlib.import_module("trackio")
    return folder


def logs(project):
    storage: Any = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    found: list[dict[str, Any]] = storage.get_logs(project, "first")
    return found


def test_points_are_in_the_database(followed):
    followed.play("trackio", [warmup(7), evaluation(0), train(1)], project="one")
    first, second, third = logs("one")
    assert (first["warmup/step"], second["eval/eval/accuracy"], third["train/reward_mean"]) == (7, 0.0, 10.0)
    assert [row["step"] for row in (first, second, third)] == [0, 1, 2]


def test_restart_continues_the_same_run(followed):
    followed.play("trackio", [train(1), train(2)], [train(3)], project="two")
    assert [(row["step"], row["train/step"]) for row in logs("two")] == [(0, 1), (1, 2), (2, 3)]
