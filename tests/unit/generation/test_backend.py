"""The door ``generation.backend``: bad names and classes, the rules that launcher and planner ask for."""

import subprocess
import sys
from pathlib import Path

import pytest

from realsys import configs
from realsys.config.backend_rules import backend_rules
from realsys.config.device_plan import seats_of
from realsys.config.doors import BACKEND
from realsys.config.machine import Machine
from realsys.config.rules import check
from realsys.errors import ConfigError
from realsys.launch.fit import fit
from tests.support.processes.config_trees import changed

ROOT = Path(__file__).resolve().parents[3]
CPU = Machine(cpus=8, memory_bytes=64 << 30)
MINE = """
from realsys.config.backend_rules import ServerSizes
from realsys.errors import ConfigError
from realsys.generation.backend import Backend

class Mine(Backend):
    def __init__(self, config, queue=100000, raises=False):
        super().__init__(config)
        if raises:
            raise OSError("no license")
        self.queue = queue

    def check(self, allocation):
        if allocation.inference.data > 2:
            raise ConfigError("allocation", self.config.allocation, "the license is for 2 servers")

    def capacity(self):
        return self.queue

    def start_timeout_s(self):
        return 7.0

    def sizes(self, allocation):
        return ServerSizes(tensor=2)

    def memory_bytes(self, node):
        return 100 << 30

    def sharing(self, share):
        return {"cluster.threads": int(100 * share)}

    def build(self, parts):
        raise NotImplementedError

class Unfinished(Backend):
    pass

class Other:
    def build(self, parts):
        return None

def function(config):
    return None
"""
ARGS = "generation.backend_args"
CPU_WITH_ROOM = Machine(cpus=8, memory_bytes=200 << 30)


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "own_backends.py").write_text(MINE)
    (tmp_path / "broken_backend.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_backends", raising=False)


BAD = [
    (["vlm"], "unknown generation backend: use one of embedded, sglang, vllm, or package.module:name"),
    ([":Mine"], "unknown generation backend"),
    (["nowhere:Mine"], "no module named 'nowhere'"),
    (["broken_backend:Mine"], "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
    (["own_backends:Yours"], "module own_backends has no attribute 'Yours'"),
    (["own_backends:function"], "it must be a class, not function"),
    (["own_backends:Other"], "it must derive from realsys.generation.backend.Backend"),
    (["own_backends:Unfinished"], "the class lacks build"),
    (["own_backends:Mine", f"{ARGS}={{quue: 1}}"], "do not fit own_backends:Mine"),
    (["own_backends:Mine", f"{ARGS}={{raises: true}}"], "cannot be built: OSError: no license"),
    (["embedded", f"{ARGS}={{queue: 1}}"], "do not fit embedded"),
]


@pytest.mark.parametrize(("settings", "problem"), BAD, ids=[" ".join(settings)[:40] for settings, _ in BAD])
def test_bad_backend_is_one_line(settings, problem):
    with pytest.raises(ConfigError) as caught:
        check(changed(f"generation.backend='{settings[0]}'", *settings[1:]), CPU)
    assert caught.value.field in ("generation.backend", ARGS)
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_rules_of_an_own_backend_are_obeyed():
    own = "generation.backend=own_backends:Mine"
    check(changed(own, "allocation=serve.d1+d1"), CPU_WITH_ROOM)
    with pytest.raises(ConfigError, match="the license is for 2 servers"):
        check(changed(own, "allocation=serve.d3+d1"), CPU_WITH_ROOM)
    with pytest.raises(ConfigError, match=r"more than the servers run and queue \(3\): lower it$"):
        check(changed(own, f"{ARGS}={{queue: 3}}"), CPU_WITH_ROOM)
    with pytest.raises(ConfigError, match=r"need about 10\d\.\d GiB, 64\.0 GiB are free"):
        check(changed(own), CPU)
    assert backend_rules(changed(own)).start_timeout_s() == 7.0


def test_backend_states_how_many_gpus_a_server_needs():
    gpus = Machine(cpus=8, memory_bytes=200 << 30, gpus=("0", "1", "2"), torch_has_cuda=True)
    config = changed("generation.backend=own_backends:Mine", "allocation=serve.d1+d1")
    seats = {(seat.kind, seat.index): seat.gpus for seat in seats_of(config, gpus, [gpus.node()])}
    assert (seats["generation_server", 0], seats["model_worker", 0]) == ((1, 2), (0,))


def test_backend_sets_its_share_of_a_shared_gpu():
    gpus = Machine(cpus=8, memory_bytes=200 << 30, gpus=("0", "1"), torch_has_cuda=True)
    config = changed("generation.backend=own_backends:Mine", "allocation=serve.d1+d2", "cluster.share_gpus=true")
    config, lines = fit(config, {"train"}, gpus)
    assert config.cluster.threads == 45
    assert lines == ["set cluster.threads=45: up to 2 processes share a GPU"]


def test_preset_exists_for_each_builtin_backend():
    presets = (Path(configs.__file__).parent / "generation").glob("*.yaml")
    assert sorted(preset.stem for preset in presets) == sorted(BACKEND.builtin)


CHECK_WITHOUT_TORCH = """
import sys
from realsys.config.backend_rules import backend_rules
from realsys.config.machine import Machine
from realsys.config.schema import Config
backend_rules(Config(generation={"backend": sys.argv[1]})).capacity()
assert "torch" not in sys.modules
"""


@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(BACKEND.builtin))
def test_rules_of_builtin_backends_need_no_torch(name):
    done = subprocess.run([sys.executable, "-c", CHECK_WITHOUT_TORCH, name], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
