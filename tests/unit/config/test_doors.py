"""Every door refuses what cannot be used with one line and exit code 2, before anything starts."""

import ast
import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from realsys.config import doors
from realsys.launch.cli import main
from tests.support.data.data_rows import FEW_ROWS

MODULES = {
    "door_raises": "raise RuntimeError('first line\\nsecond line')\n",
    "door_exits": "import sys\nsys.exit(7)\n",
    "door_broken": "def broken(:\n",
    "door_imports": "import no_such_library_of_a_door\n",
    "door_late": "def __getattr__(name):\n    raise OSError(f'no file for\\n{name}')\n",
    "door_user": """
import sys
from realsys.config.dataflow import Dataflow, FunctionCall
from realsys.generation.backend import Backend
from realsys.weights.disk.transport import DiskTransport

NUMBER = 7

def flow(**fields):
    return Dataflow([FunctionCall("a", "actor", **({"handler": "sft", "inputs": frozenset({"tokens"})} | fields))])

def bad_handler(config):
    return flow(handler="door_raises:thing")

def bad_hook(config):
    return flow(pre_hooks=("door_raises:thing",))

class Empty:
    pass

class ExitingTransport(DiskTransport):
    def __init__(self, config):
        sys.exit(3)

class ExitingBackend(Backend):
    def __init__(self, config):
        sys.exit(3)

    def build(self, *args):
        raise NotImplementedError

class ExitingAgent:
    def __init__(self, parts):
        pass

    @staticmethod
    def longest_row(config):
        sys.exit(3)

    async def run(self, task, session):
        raise NotImplementedError

def exiting_algorithm(config):
    sys.exit(3)

def exiting_loss(inputs):
    sys.exit(3)
""",
}
FIELDS = (
    "rollout.agent",
    "rollout.environment",
    "data.verifier",
    "train.ppo.loss",
    "train.ppo.algorithm",
    "train.ppo.filter.accept",
    "weights.transport",
    "generation.backend",
)
WITHOUT_ARGUMENTS = ("data.verifier", "train.ppo.algorithm", "train.ppo.filter.accept")
#: value -> part of the message
BAD = {
    "no_such_name": "use one of",
    "no_such_module:thing": "no module named 'no_such_module'",
    "door_raises:thing": "RuntimeError: first line second line",
    "door_exits:thing": "SystemExit: 7",
    "door_broken:thing": "SyntaxError",
    "door_imports:thing": "no_such_library_of_a_door",
    "door_late:thing": "no file for thing",
    "door_user:missing": "no attribute 'missing'",
    "door_user:NUMBER": "not int",
}
EXITING = {
    "rollout.agent": "ExitingAgent",
    "weights.transport": "ExitingTransport",
    "generation.backend": "ExitingBackend",
    "train.ppo.algorithm": "exiting_algorithm",
    "train.ppo.loss": "exiting_loss",
}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    folder = tmp_path / "modules"
    folder.mkdir()
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


def refusal(folder, capsys, *overrides):
    """The line on stderr of a run that is refused."""
    code = main(["run", "experiment=arith", *FEW_ROWS, f"fileroot={folder / 'runs'}", *overrides])
    output = capsys.readouterr()
    assert code == 2, output
    assert not (folder / "runs").exists()
    (line,) = output.err.splitlines()
    return line


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("field", FIELDS)
def test_bad_name_is_one_line(field, value, modules, capsys):
    line = refusal(modules, capsys, f"{field}={value}")
    assert field in line and value in line and BAD[value] in line


@pytest.mark.parametrize("field", [field for field in FIELDS if field not in WITHOUT_ARGUMENTS])
def test_unknown_argument_is_one_line(field, modules, capsys):
    line = refusal(modules, capsys, f"+{field}_args.no_such_argument=1")
    assert f"{field}_args" in line


@pytest.mark.parametrize("name", ["handler", "pre_hooks"])
def test_bad_handler_or_hook_is_one_line(name, modules, capsys):
    line = refusal(modules, capsys, f"train.ppo.algorithm=door_user:bad_{name.removeprefix('pre_').rstrip('s')}")
    assert f"dataflow.a.{name}" in line and "RuntimeError: first line second line" in line


@pytest.mark.parametrize("field", ["rollout.agent", "rollout.environment", "weights.transport", "generation.backend"])
def test_class_without_the_methods_is_one_line(field, modules, capsys):
    line = refusal(modules, capsys, f"{field}=door_user:Empty")
    assert "lacks" in line or "must derive from" in line


@pytest.mark.parametrize("field", EXITING)
def test_code_that_exits_is_one_line(field, modules, capsys):
    line = refusal(modules, capsys, f"{field}=door_user:{EXITING[field]}")
    assert field in line and "SystemExit: 3" in line


def _kind(door):
    return door.kind


@pytest.mark.parametrize("door", [each for each in vars(doors).values() if isinstance(each, doors.Door)], ids=_kind)
def test_builtin_names_stand_for_code_that_exists(door):
    for name, target in door.builtin.items():
        module, _, attribute = target.partition(":")
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None, f"{door.field}={name}: {module} is not there"
        tree = ast.parse(Path(spec.origin).read_text("utf-8"))
        assert attribute in {getattr(node, "name", None) for node in tree.body}, f"{door.field}={name}: {target}"
