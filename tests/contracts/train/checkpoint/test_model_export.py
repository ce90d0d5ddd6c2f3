"""The actor of a checkpoint as a model folder: one process writes the weights that all ranks had."""

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from realsys.config.allocation import ParallelLayout
from realsys.config.fields import replaced
from realsys.config.paths import TrialPaths, write_config
from realsys.errors import CheckpointError
from realsys.launch.cli import main
from realsys.launch.evaluation_target import exported, find_target
from realsys.train.checkpoint.checkpoint_files import CHECKPOINT, STATE, decode_index, read_state
from realsys.train.checkpoint.model_export import export_checkpoint
from realsys.weights.disk.manifest import load_manifest
from tests.support.training.checkpoint_ranks import BEFORE, Setup, complete, make_models, save, train
from tests.support.training.train_ranks import cat_exports


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


def trained(setup, model, root):
    """A checkpoint after BEFORE steps, and the weights that the ranks publish then."""
    tmp = root / "step-00000003.tmp"
    tmp.mkdir(parents=True)

    def body(role):
        train(role, range(BEFORE))
        save(role, tmp, BEFORE)
        return {name: tensor.clone() for name, tensor in role.engine.export()}

    ranks = setup.run(body, model)
    return complete(tmp, setup.layout, BEFORE), cat_exports(ranks)


def stored(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    "setup",
    [
        Setup(ParallelLayout(data=2, tensor=2), distributed=True, dtype="bfloat16"),
        Setup(ParallelLayout(pipeline=2), model="tied"),
        Setup(ParallelLayout(tensor=2), model="odd"),
        Setup(ParallelLayout(tensor=2), lora=4, dtype="bfloat16"),
    ],
    ids=str,
)
def test_exported_weights_are_those_of_the_ranks(setup, models, tmp_path):
    directory, expected = trained(setup, models[setup.model], tmp_path)
    export_checkpoint(directory, tmp_path / "out", setup.config, models[setup.model])
    found = stored(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert load_manifest(tmp_path / "out").step == BEFORE


def trial_of(root, model):
    """A trial that has a checkpoint and no weights, and the weights of its step."""
    paths = TrialPaths(root / "runs" / "math" / "t")
    _, expected = trained(Setup(), model, paths.checkpoints)
    write_config(replaced(Setup().config, ["model", "path"], str(model)), paths.config)
    paths.lock.touch()
    return paths, expected


def test_evaluation_gets_a_model_of_the_checkpoint(models, tmp_path):
    """It is written once, and again if the step was trained again."""
    paths, expected = trial_of(tmp_path, models["untied"])
    target = find_target(str(paths.root), None)
    assert (target.step, target.form) == (BEFORE, "checkpoint")
    folder = exported(target)
    first = folder.stat().st_ino
    assert stored(folder).keys() == expected.keys()
    assert exported(target).stat().st_ino == first
    state = read_state(target.model)
    later = CHECKPOINT.encode(msgspec.structs.replace(state, time=state.time + 1))
    (target.model / STATE).write_bytes(later)
    assert exported(target).stat().st_ino != first


def test_step_with_a_checkpoint_only_is_exported(models, tmp_path, capsys):
    paths, expected = trial_of(tmp_path, models["untied"])
    command = ["export", str(paths.root), str(tmp_path / "out"), "--step"]
    assert main([*command, "2"]) == 2
    assert f"has the weights of these steps only: {BEFORE};" in capsys.readouterr().err
    assert main([*command, str(BEFORE)]) == 0
    assert "from step-00000003 of its checkpoints" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_bad_checkpoint_leaves_no_folder(models, tmp_path):
    directory, _ = trained(Setup(), models["untied"], tmp_path)
    with pytest.raises(CheckpointError, match="is of another model than config.json"):
        export_checkpoint(directory, tmp_path / "out", Setup().config, models["wider"])
    [file] = directory.glob("*.safetensors")
    [first, *_] = decode_index(file.with_suffix(".json").read_bytes(), file).pieces
    content = bytearray(file.read_bytes())
    content[first.position] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="is not what was written"):
        export_checkpoint(directory, tmp_path / "out", Setup().config, models["untied"])
    assert not list(tmp_path.glob("out*"))
