"""`resume=DIR`: refusals before anything starts, and the data that continues through real managers' journals."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from realsys.cluster.files import FileInfo
from realsys.config.compose import compose
from realsys.config.paths import TrialPaths
from realsys.config.schema_data import DataConfig
from realsys.data.submitted import SubmittedWriter
from realsys.errors import ConfigError, StreamError
from realsys.launch.commands.audit import audit_trial
from realsys.launch.prepare import prepare, resolve
from realsys.launch.start import read_trial
from realsys.manager.client import ManagerClient
from realsys.manager.ledger.events import Resumed
from realsys.manager.ledger.journal import Journal
from realsys.manager.ledger.prompt_order import permutation
from realsys.manager.messages import DataPosition
from realsys.train.checkpoint.checkpoint_files import CHECKPOINT, CheckpointState, RoleState
from realsys.train.master.checkpoints import commit
from tests.support.ledger.manager_trial import TOKEN, config, drive

DATA = {"train_size": 20, "eval_size": 5, "demo_size": 0}
SMALL = ["experiment=arith", *(f"data.arith.{k}={v}" for k, v in DATA.items()), "evaluation.problems=5"]
STEP, BATCH, TOTAL = 3, 4, 8
CONFIG = [*SMALL, "warmup.steps=0", f"train.batch_groups={BATCH}", f"train.total_steps={TOTAL}"]
KL = ["train.ppo.kl.coef=0.1", "train.ppo.skip_zero_advantage=false"]
POSITION = DataPosition(14, [9, 2], 20, 1)


@pytest.fixture
def compose_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(*overrides):
        return resolve(compose([*CONFIG, *overrides]), now=datetime(2025, 1, 1))

    return make


@pytest.fixture
def trial(compose_in):
    """The folder of a trial that has checkpoints of steps 2 and 3, of the model that `arith` makes."""
    with prepare(compose_in("trial=first"), lambda _: None) as ready:
        paths = ready.paths
    raw = json.loads((paths.start_model / "config.json").read_text())
    sizes = {
        "hidden": raw["hidden_size"],
        "layers": raw["num_hidden_layers"],
        "heads": raw["num_attention_heads"],
        "kv_heads": raw["num_key_value_heads"],
        "head_dim": raw["head_dim"],
        "ffn": raw["intermediate_size"],
        "outputs": raw["vocab_size"],
        "lora_rank": 0,
    }
    for step in (STEP - 1, STEP):
        state = CheckpointState(
            step, step, 1, BATCH, POSITION, {"actor": RoleState(sizes, "adam", "d1p1m1")}, {"coef": 0.0}, "", 0.0
        )
        tmp = paths.checkpoints / f"step-{step:08d}.tmp"
        tmp.mkdir(parents=True)
        commit(tmp, state, [])
    return paths.root


def test_a_trial_folder_means_its_newest_complete_checkpoint(trial, compose_in):
    (trial / "checkpoints" / "step-00000009.tmp").mkdir()
    newest = trial / "checkpoints" / "step-00000003"
    assert compose_in(f"resume={trial}").resume == str(newest)
    assert compose_in(f"resume={newest}").resume == str(newest)
    assert compose_in(f"resume={newest.parent}").resume == str(newest)
    assert compose_in(f"resume={newest.with_name('step-00000002')}").resume.endswith("step-00000002")


def test_new_trial_inherits_the_ledger(trial, compose_in):
    said: list[str] = []
    with prepare(compose_in(f"resume={trial}", "trial=second"), said.append) as ready:
        paths = ready.paths
    assert audit_trial(paths).inherited == STEP * BATCH
    with Journal(paths.ledger) as journal:
        (event,) = journal.replay()
    assert isinstance(event, Resumed)
    assert (event.step, event.groups, event.cursor, event.pending) == (3, 12, 14, [9, 2])
    assert said[-1] == f"continuing at step 3 from {trial / 'checkpoints' / 'step-00000003'}"


@pytest.fixture
def script_trial(trial, compose_in):
    """The trial is one of a script, which has made two rows; prompt 21 is the second one, and not trained."""
    paths = TrialPaths(trial)
    with SubmittedWriter(paths.submitted, DataConfig(), 20) as rows:
        rows.append([({"prompt": f"a{k}=", "answer": str(k)}, "") for k in range(2)])
    made = compose_in(f"resume={trial}")
    state = read_trial(made, TrialPaths.of(made)).state
    assert state is not None
    position = DataPosition(14, [9, 21], 20, 1, order="script")
    (Path(made.resume) / "state.json").write_bytes(CHECKPOINT.encode(msgspec.structs.replace(state, position=position)))
    return trial


@pytest.mark.parametrize(
    ("order", "cursor", "pending"), [("script", 14, [9, 21]), ("shuffled", 0, [])], ids=["script", "shuffled"]
)
def test_new_trial_inherits_rows_of_a_script(script_trial, compose_in, order, cursor, pending):
    """In another order the prompts begin anew, and no row is needed."""
    with prepare(compose_in(f"resume={script_trial}", "trial=second", f"data.order={order}"), lambda _: None) as ready:
        paths = ready.paths
    with Journal(paths.ledger) as journal:
        (event,) = journal.replay()
    assert isinstance(event, Resumed) and (event.groups, event.cursor, event.pending) == (12, cursor, pending)
    rows = TrialPaths(script_trial).submitted.read_bytes()
    assert (paths.submitted.read_bytes() if paths.submitted.exists() else b"") == (rows if order == "script" else b"")


def test_rows_of_a_script_that_are_gone_are_named(script_trial, compose_in):
    TrialPaths(script_trial).submitted.unlink()
    made = compose_in(f"resume={script_trial}", "trial=second", "data.order=script")
    gone = pytest.raises(ConfigError, match=r"resume=.*submitted.jsonl, which cannot be copied: No such file")
    with gone, prepare(made, lambda _: None):
        raise AssertionError("the trial is made")
    assert not TrialPaths.of(made).root.exists()


def test_inherited_groups_count_at_the_new_size(trial, compose_in):
    """The capacity is B * (v + eta + 1), and B * v of it is used up, whatever B is: eta + 1 batches are free."""
    with prepare(compose_in(f"resume={trial}", "trial=second", "train.batch_groups=6"), lambda _: None) as ready:
        paths = ready.paths
    assert audit_trial(paths).inherited == 3 * 6


@pytest.mark.parametrize(
    ("overrides", "field", "problem"),
    [
        (["train.total_steps=3"], "resume", "is at step 3, and train.total_steps (3) is reached"),
        (["seed=2"], "seed", "must be 1, as in resume="),
        (["train.optimizer.name=sgd"], "resume", "role 'actor' has the state of adam, not of sgd"),
        (["train.ppo.critic.enabled=true"], "resume", "has no role 'critic', which this run trains; it has: actor"),
        (
            ["warmup.steps=2", "warmup.batch=4", "data.arith.demo_size=9", *KL],
            "resume",
            "has no role 'ref', which starts as the warmed-up actor (warmup.steps): name its directory in roles.ref",
        ),
        (["train.batch_groups=5", "train.total_epochs=9"], "train.batch_groups", "with another batch size epochs"),
        (["data.arith.train_size=30"], "resume", "was trained on 20 prompts, and the train split has 30"),
        (["model.tiny.hidden_size=64"], "resume", "is of another model: role 'actor' has hidden 128 there, 64 here"),
        (["train.lora.rank=4"], "resume", "is of another model: role 'actor' has lora_rank 0 there, 4 here"),
    ],
)
def test_unfit_checkpoint_is_refused_in_one_line(trial, compose_in, overrides, field, problem):
    """Nothing is left of the new trial."""
    made = compose_in(f"resume={trial}", "trial=second", *overrides)
    with pytest.raises(ConfigError) as caught:
        prepare(made, lambda _: None)
    assert caught.value.field == field and problem in str(caught.value) and "\n" not in str(caught.value)
    assert not TrialPaths.of(made).root.exists()


def test_truncated_file_is_refused_before_the_start(trial, compose_in):
    made = compose_in(f"resume={trial}")
    state = read_trial(made, TrialPaths.of(made)).state
    assert state is not None
    files = {"actor-00001-of-00001.safetensors": FileInfo(10, "")}
    target = Path(made.resume)
    (target / "actor-00001-of-00001.safetensors").write_bytes(b"short")
    (target / "state.json").write_bytes(CHECKPOINT.encode(msgspec.structs.replace(state, files=files)))
    with pytest.raises(ConfigError, match=r"safetensors has 5 bytes, its writer says 10: truncated"):
        read_trial(made, TrialPaths.of(made))


def test_resume_issues_every_prompt_once(tmp_path):
    """B = 2, eta = 1, 64 prompts: six groups granted, two of them trained; then a new trial."""
    order = permutation(config().seed, 0, 64).tolist()
    found: list[DataPosition] = []

    async def first(t):
        await t.ready()
        tickets = (await t.allocate(4))["tickets"]
        trained: list[Any] = [ticket["ticket_id"] for ticket in tickets[:2]]
        await t.post("/claim", version=1, tickets=trained)
        await t.post("/trained", step=1, version=1, trained=trained)
        t.publish(1)
        await t.until("server 0 serves 1", t.serves(0, 1))
        assert len((await t.allocate(10))["tickets"]) == 2
        client = ManagerClient(lambda: t.url, TOKEN)
        found.append(await client.data_position())
        await client.close()

    drive(tmp_path / "first", first)
    (position,) = found
    assert position == DataPosition(6, order[2:6], 64, config().seed)
    second = tmp_path / "second"
    with Journal(second / "ledger.jsonl") as journal:
        journal.append([Resumed("/c", 1, 2, position.cursor, position.pending, 0.0)])

    async def resumed(t):
        await t.ready(version=1)
        view = (await t.get("/status"))["admission"]
        assert (view["counted"], view["capacity"]) == (2, 6)
        tickets = (await t.allocate(10))["tickets"]
        assert [ticket["prompt_index"] for ticket in tickets] == order[2:6], "as many as the bound allows, no more"
        await t.halt()
        await t.start()  # a manager that was restarted knows the same
        assert (await t.allocate(10))["tickets"] == []
        done: list[Any] = [ticket["ticket_id"] for ticket in tickets[:2]]
        await t.post("/claim", version=2, tickets=done)
        await t.post("/trained", step=2, version=2, trained=done)
        t.publish(2)
        await t.until("server 0 serves 2", t.serves(0, 2))
        assert [ticket["prompt_index"] for ticket in (await t.allocate(10))["tickets"]] == order[6:8]

    drive(second, resumed)


def test_the_position_needs_the_token(tmp_path):
    async def scenario(t):
        client = ManagerClient(lambda: t.url, "another token")
        with pytest.raises(StreamError, match="status 401: /data_position: needs the trial's token"):
            await client.data_position()
        await client.close()

    drive(tmp_path, scenario)
