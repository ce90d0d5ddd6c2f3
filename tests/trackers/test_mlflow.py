"""The MLflow library with a database in a file."""

import importlib
import shutil
from typing import Any

import pytest

from tests.support.run_logs import evaluation, recovered, train, warmup

pytestmark = [
    pytest.mark.needs(package="mlflow"),
    pytest.mark.filterwarnings("ignore"),  # MLflow's database warns
]


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """An empty database: MLflow takes seconds to make one."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    made: Any = importlib.import_module("mlflow.tracking")
    made.MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(autouse=True)
def database(empty, followed):
    shutil.copy(empty, followed.folder)


def client(followed):
    made: Any = importlib.import_module("mlflow.tracking")
    return made.MlflowClient(tracking_uri=f"sqlite:///{followed.folder / 'mlflow.db'}")


def only_run(followed):
    reader = client(followed)
    (run,) = reader.search_runs([reader.get_experiment_by_name("arith").experiment_id])
    return run


def curve(followed, name):
    values = client(followed).get_metric_history(only_run(followed).info.run_id, name)
    return [(value.step, value.value) for value in sorted(values, key=lambda value: value.timestamp)]


def test_run_has_parameters_curves_and_end(followed):
    followed.play("mlflow", [warmup(7), evaluation(0), train(1), train(2)], tags={"team": "a"})
    run = only_run(followed)
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params["train.lr"] == "0.0001" and len(run.data.params["model.path"]) == 6000
    assert run.data.tags["team"] == "a" and run.data.tags["realsys.version"] == "0.1.0"
    assert curve(followed, "train/reward_mean") == [(1, 10.0), (2, 20.0)]
    assert curve(followed, "eval/eval/accuracy") == [(0, 0.0)] and len(curve(followed, "warmup/loss")) == 1


def test_restart_continues_the_same_run(followed):
    followed.play("mlflow", [train(1)], [train(2)])
    assert curve(followed, "train/reward_mean") == [(1, 10.0), (2, 20.0)]


def test_crash_repeats_no_step(followed):
    followed.play("mlflow", [train(1)])
    followed.crash("mlflow", train(2), train(3))
    followed.play("mlflow", [train(4)])
    assert [step for step, _ in curve(followed, "train/reward_mean")] == [1, 2, 3, 4]


def test_crash_at_the_first_start_repeats_no_step(followed):
    followed.crash("mlflow", train(1), train(2))
    followed.play("mlflow", [train(3)])
    assert [step for step, _ in curve(followed, "train/reward_mean")] == [1, 2, 3]


@pytest.mark.parametrize("call", ["create_run", "log_batch"])
def test_failed_start_leaves_no_second_run(followed, monkeypatch, call):
    """MLflow answers too late: it has made the run. The next start has another configuration."""
    library: Any = importlib.import_module("mlflow.tracking").MlflowClient
    whole = getattr(library, call)

    def without_reply(*arguments, **named):
        whole(*arguments, **named)
        raise TimeoutError("no reply")

    with monkeypatch.context() as patch:
        patch.setattr(library, call, without_reply)
        with pytest.raises(TimeoutError, match="no reply"):
            followed.start("mlflow")
    followed.config["seed"] = 2
    followed.play("mlflow", [train(1)])
    assert curve(followed, "train/reward_mean") == [(1, 10.0)]
    assert only_run(followed).data.params["seed"] == ("2" if call == "create_run" else "1")


def test_any_name_of_a_metric_is_taken(followed):
    followed.play("mlflow", [train(1, metrics={"pass@1 (%)": 0.5, "tests//run/": 2.0})])
    assert curve(followed, "train/metrics/pass_1 ___") == [(1, 0.5)]
    assert curve(followed, "train/metrics/tests_/run_") == [(1, 2.0)]


def test_roll_back_adds_a_second_value(followed):
    again = train(2, reward_mean=-1.0, time=3000.0)
    followed.play("mlflow", [train(1), train(2), recovered(1), again])
    assert curve(followed, "train/reward_mean") == [(1, 10.0), (2, 20.0), (2, -1.0)]
