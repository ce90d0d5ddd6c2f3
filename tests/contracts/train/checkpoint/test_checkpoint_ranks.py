"""Training state through real files and real ranks: bit-equal in the same layout, close in any other."""

import threading
from functools import partial

import pytest

from realsys.cluster.topology import Mesh
from realsys.config.allocation import ParallelLayout
from realsys.errors import CheckpointError
from realsys.train.checkpoint.saver import CheckpointWriter, load_checkpoint
from realsys.train.checkpoint.tensors import write_tensors
from tests.support.training.checkpoint_ranks import (
    AFTER,
    BEFORE,
    LR,
    SINGLE,
    Setup,
    checkpoint,
    complete,
    everything,
    make_models,
    resumed,
    same,
    save,
    train,
)
from tests.support.training.train_ranks import build_role, cat_exports, run_ranks

BOUND_S = 60.0


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


D2, P2, M2 = ParallelLayout(data=2), ParallelLayout(pipeline=2), ParallelLayout(tensor=2)
BIG = ParallelLayout(data=2, tensor=2)


@pytest.mark.parametrize(
    "setup",
    [
        Setup(D2, distributed=True),
        Setup(P2, model="tied"),
        Setup(BIG, distributed=True, dtype="bfloat16"),
        Setup(M2, dtype="bfloat16"),
        Setup(optimizer="sgd"),
        Setup(fused=True),
        Setup(D2, distributed=True, dtype="bfloat16", fused=True),
        Setup(one_kernel=True),
        Setup(D2, distributed=True, dtype="bfloat16", one_kernel=True),
        Setup(M2, lora=4),
    ],
    ids=str,
)
def test_same_layout_resumes_bit_equal(setup, models, tmp_path):
    directory, expected = checkpoint(setup, models[setup.model], tmp_path)
    found = setup.run(partial(resumed, directory=directory), models[setup.model])
    for (left, _), (right, _) in zip(expected, found, strict=True):
        assert left["role"]["skipped_steps"] == 7
        same(left, right)


LAYOUTS = [
    (Setup(M2), Setup(ParallelLayout(pipeline=3))),
    (Setup(ParallelLayout(tensor=4)), Setup(P2)),
    (Setup(P2, model="tied"), Setup(M2, distributed=True, model="tied")),
    (Setup(BIG, distributed=True, model="odd"), Setup(P2, model="odd")),
    (Setup(model="odd"), Setup(BIG, distributed=True, model="odd")),
    (Setup(BIG, distributed=True), Setup(ParallelLayout(pipeline=2, tensor=2))),
    (Setup(), Setup(BIG, distributed=True)),
    (Setup(M2, lora=4), Setup(D2, distributed=True, lora=4)),
]
LOW_PRECISION = (Setup(D2, distributed=True, dtype="bfloat16"), Setup(M2, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (Setup(), Setup(fused=True)),
        (Setup(fused=True), Setup(M2)),
        (Setup(), Setup(one_kernel=True)),
        (Setup(one_kernel=True), Setup(fused=True)),
    ],
    ids=str,
)
def test_step_count_moves_between_kinds_of_adam(written, read, models, tmp_path):
    directory, ranks = checkpoint(written, models["untied"], tmp_path)
    resuming = read.run(partial(resumed, directory=directory), models["untied"])
    expected = cat_exports([exported for _, exported in ranks])
    found = cat_exports([exported for _, exported in resuming])
    assert max((found[name] - expected[name]).abs().max().item() for name in expected) < 0.02 * LR


# That nothing is lost is shown for all of them below, bit for bit.
@pytest.mark.parametrize(("written", "read"), LAYOUTS[1::2], ids=str)
def test_a_resumed_run_is_close_in_another_layout(written, read, models, tmp_path):
    model = models[written.model]
    directory, ranks = checkpoint(written, model, tmp_path)
    expected = cat_exports([exported for _, exported in ranks])
    found = cat_exports([exported for _, exported in read.run(partial(resumed, directory=directory), model)])
    assert found.keys() == expected.keys()
    # Adam takes steps of about LR: a lost momentum, master weight or step count moves parameters by a part of that.
    assert max((found[name] - expected[name]).abs().max().item() for name in expected) < 0.02 * LR


@pytest.mark.parametrize(("written", "read"), [*LAYOUTS, LOW_PRECISION], ids=str)
def test_the_way_through_another_layout_loses_no_bit(written, read, models, tmp_path):
    """Trained and saved in one layout, loaded and saved in another, loaded in the first again."""
    model = models[written.model]
    first, second = tmp_path / "1" / "step-00000003.tmp", tmp_path / "2" / "step-00000003.tmp"
    first.mkdir(parents=True)
    second.mkdir(parents=True)

    def begin(role):
        train(role, range(BEFORE))
        save(role, first, BEFORE)
        return everything(role)

    def between(role):
        load_checkpoint(role, first.with_suffix(""))
        save(role, second, BEFORE)

    def back(role):
        load_checkpoint(role, second.with_suffix(""))
        return everything(role)

    expected = written.run(begin, model)
    complete(first, written.layout, BEFORE)
    read.run(between, model)
    complete(second, read.layout, BEFORE)
    for left, right in zip(expected, written.run(back, model), strict=True):
        same({k: v for k, v in left.items() if k != "rng"}, {k: v for k, v in right.items() if k != "rng"})


def test_fp32_loads_the_master_weights_of_bf16(models, tmp_path):
    tmp = tmp_path / "step-00000003.tmp"
    tmp.mkdir()

    def begin(role):
        train(role, range(BEFORE))
        save(role, tmp, BEFORE)
        return everything(role)

    def reload(role):
        load_checkpoint(role, tmp.with_suffix(""))
        return everything(role)

    (low,) = Setup(dtype="bfloat16").run(begin, models["untied"])
    complete(tmp, SINGLE, BEFORE)
    (exact,) = Setup().run(reload, models["untied"])
    optimizer = {name: value for name, value in low.items() if not name.startswith("model/")}
    same(optimizer, {name: exact[name] for name in optimizer})
    assert any((low[name].float() - exact[name]).abs().max() > 0 for name in low if name.startswith("model/"))


def test_losing_the_optimizer_state_would_be_seen(models, tmp_path):
    directory, ranks = checkpoint(Setup(), models["untied"], tmp_path)

    def body(role):
        load_checkpoint(role, directory)
        for part in role.engine.optimizer.chained_optimizers:
            part.optimizer.state.clear()
        train(role, range(BEFORE, BEFORE + AFTER))
        return {name: tensor.clone() for name, tensor in role.engine.export()}

    (found,) = Setup().run(body, models["untied"])
    assert max((found[name] - expected).abs().max().item() for name, expected in ranks[0][1].items()) > 0.1 * LR


def test_role_on_some_ranks_is_saved_alone(models, tmp_path):
    """The actor on worker 0, the critic with a value head on workers 1 and 2; each checkpoints without the other."""
    config, mesh, layout = Setup().config, Mesh(M2, (1, 2)), ParallelLayout()
    directories = {"actor": tmp_path / "a" / "step-00000003.tmp", "critic": tmp_path / "c" / "step-00000003.tmp"}
    for directory in directories.values():
        directory.mkdir(parents=True)

    def role_of(rank, device):
        if rank == 0:
            return build_role(config, layout, 0, device, models["untied"])
        return build_role(config, M2, rank, device, models["untied"], "critic")

    def first(rank, device):
        role = role_of(rank, device)
        train(role, range(BEFORE))
        save(role, directories[role.name], BEFORE)
        train(role, range(BEFORE, BEFORE + AFTER))
        return everything(role)

    def second(rank, device):
        role = role_of(rank, device)
        load_checkpoint(role, directories[role.name].with_suffix(""))
        train(role, range(BEFORE, BEFORE + AFTER))
        return everything(role)

    expected = run_ranks(3, first, config, layout, meshes={"critic": mesh})
    complete(directories["actor"], layout, BEFORE)
    complete(directories["critic"], M2, BEFORE, "critic")
    for left, right in zip(expected, run_ranks(3, second, config, layout, meshes={"critic": mesh}), strict=True):
        same(left, right)
    assert any(name == "model/value_head.weight" for name in expected[1])


def test_training_continues_while_files_are_written(models, tmp_path):
    """The writer is held by an event until further steps are done; it then writes the state before them."""
    tmp = tmp_path / "step-00000003.tmp"
    tmp.mkdir()

    def body(role):
        started, go_on = threading.Event(), threading.Event()

        def held(path, snapshots):
            started.set()
            assert go_on.wait(BOUND_S)
            return write_tensors(path, snapshots)

        train(role, range(BEFORE))
        before = everything(role)
        writer = CheckpointWriter(role, held)
        writer.begin(tmp, BEFORE)
        assert started.wait(BOUND_S)
        train(role, range(BEFORE, BEFORE + AFTER))
        nothing_yet = list(tmp.iterdir()) == []
        with pytest.raises(CheckpointError, match="the one before it is not finished"):
            writer.begin(tmp, BEFORE + 1)
        go_on.set()
        writer.finish()
        return before, nothing_yet

    ((before, nothing_yet),) = Setup().run(body, models["untied"])
    assert nothing_yet
    directory = complete(tmp, ParallelLayout(), BEFORE)

    def reload(role):
        load_checkpoint(role, directory)
        return everything(role)

    same(before, Setup().run(reload, models["untied"])[0])


def test_next_checkpoint_is_copied_into_the_same_memory(models, tmp_path):
    """New memory would have to be mapped, and pinned, while training waits."""
    folders = [tmp_path / f"step-0000000{step}.tmp" for step in (1, 2)]

    def body(role):
        places, states = [], []

        def noted(path, snapshots):
            places.append([one.data.data_ptr() for one in snapshots])
            return write_tensors(path, snapshots)

        writer = CheckpointWriter(role, noted)
        for step, folder in enumerate(folders, 1):
            folder.mkdir()
            train(role, range(step, step + 1))
            writer.begin(folder, step)
            states.append(everything(role))
            writer.finish()
        return places, states

    ((places, states),) = Setup().run(body, models["untied"])
    assert places[0] == places[1]
    for step, (folder, state) in enumerate(zip(folders, states, strict=True), 1):
        directory = complete(folder, ParallelLayout(), step)

        def reload(role, directory=directory):
            load_checkpoint(role, directory)
            return everything(role)

        same(state, Setup().run(reload, models["untied"])[0])
