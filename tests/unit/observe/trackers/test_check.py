"""Trackers that cannot be used are refused with one line and exit code 2, before anything starts."""

import importlib
import io
import json
import os
import struct
import sys
import urllib.request
from pathlib import Path

import pytest

from realsys.config.compose import compose
from realsys.config.doors import TRACKER
from realsys.launch.cli import main
from realsys.observe.step_fields import metrics_of
from realsys.observe.trackers import link
from realsys.observe.trackers.contract import Point, Run
from realsys.observe.trackers.tensorboard import EventFile, _masked, _varint
from tests.support.data.data_rows import FEW_ROWS
from tests.support.run_logs import evaluation, train

MODULE = """
from realsys.observe.trackers.contract import Tracker

class Good(Tracker):
    def __init__(self, run, unit="s"):
        super().__init__(run)

    def log(self, point):
        pass

class NeedsPackage(Good):
    package = "no_such_package_of_a_tracker"

class Keyless(Good):
    @classmethod
    def problem(cls, arguments):
        return "has no key"

class Careless(Good):
    @classmethod
    def problem(cls, arguments):
        return 1 / 0

class WithoutLog(Tracker):
    pass

class NoTracker:
    def log(self, point):
        pass
"""
#: settings -> part of the line
BAD = {
    "telemetry.trackers=[file,file]": "names 'file' twice",
    "telemetry.trackers=[tensorbord]": "use one of file, mlflow, tensorboard, trackio, wandb",
    "telemetry.trackers=[own_tracker:WithoutLog]": "lacks log",
    "telemetry.trackers=[own_tracker:NoTracker]": "must derive from",
    "telemetry.trackers=[own_tracker:NeedsPackage]": "pip install 'no_such_package_of_a_tracker'",
    "+telemetry.tracker_args.wandb.project=x": "names 'wandb', which is not in telemetry.trackers",
    "+telemetry.tracker_args.file.path=x": "telemetry.tracker_args={'path': 'x'}: do not fit file",
    "telemetry.trackers=[own_tracker:Keyless]": "telemetry.trackers='own_tracker:Keyless': has no key",
    "telemetry.trackers=[own_tracker:Careless]": "cannot be checked: ZeroDivisionError",
}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    (tmp_path / "own_tracker.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("own_tracker", None)


def refusal(folder, capsys, *overrides):
    code = main(["run", "experiment=arith", *FEW_ROWS, f"fileroot={folder / 'runs'}", *overrides])
    assert code == 2 and not (folder / "runs").exists()
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("setting", BAD)
def test_bad_tracker_is_one_line(setting, modules, capsys):
    line = refusal(modules, capsys, setting)
    assert "telemetry.tracker" in line and BAD[setting] in line


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_missing_package_names_its_installation(name, modules, capsys, monkeypatch):
    monkeypatch.setattr(link, "find_spec", lambda package: None)
    assert f"pip install 'realsys[{name}]'" in refusal(modules, capsys, f"telemetry.trackers=[file,{name}]")
    assert name not in sys.modules


@pytest.fixture
def libraries(modules, monkeypatch):
    """Stand-ins for W&B and trackio, whose sources are read; an import of them fails."""
    signatures = {
        "wandb/sdk/wandb_init.py": "project, mode, settings, id, resume",
        "trackio/__init__.py": "project, name",
    }
    for path, names in signatures.items():
        (modules / path).parent.mkdir(parents=True)
        (modules / path).write_text(f"def init({names}): ...\nraise ImportError('it was imported')\n")
    (modules / "wandb" / "__init__.py").write_text("raise ImportError('it was imported')")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(modules / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(modules))
    for library in ("wandb", "trackio"):
        monkeypatch.delitem(sys.modules, library, raising=False)
    return modules


def test_missing_key_of_wandb_is_one_line(libraries, capsys):
    line = refusal(libraries, capsys, "telemetry.trackers=[file,wandb]")
    assert "telemetry.trackers='wandb': W&B has no API key" in line
    assert all(remedy in line for remedy in ("wandb login", "WANDB_API_KEY", "wandb.mode=offline"))


@pytest.mark.parametrize(
    ("name", "argument", "problem"),
    [
        ("wandb", "projct", "no argument 'projct': wandb.init takes mode, project, settings"),
        ("wandb", "id", "belongs to the trial"),
        ("trackio", "spce_id", "no argument 'spce_id': trackio.init takes project"),
        ("trackio", "name", "belongs to the trial"),
    ],
)
def test_unknown_argument_is_one_line(libraries, capsys, name, argument, problem):
    overrides = [f"telemetry.trackers=[{name}]", f"+telemetry.tracker_args.{name}.{argument}=x"]
    assert problem in refusal(libraries, capsys, *overrides)


def test_own_tracker_with_arguments_is_accepted(modules):
    config = compose(["experiment=arith", 'telemetry.trackers=["own_tracker:Good"]'])
    arguments = {"own_tracker:Good": {"unit": "ms"}}
    telemetry = config.telemetry.model_copy(update={"tracker_args": arguments})
    link.check_trackers(config.model_copy(update={"telemetry": telemetry}))


# ---- Event files of TensorBoard, byte by byte. ``tests/trackers`` reads them with TensorBoard


def events(path):
    """Yield the events of a file, each with right checksums."""
    content = path.read_bytes()
    while content:
        (length,), event = struct.unpack("<Q", content[:8]), content[12:]
        event, rest = event[:length], event[length:]
        assert struct.unpack("<I", content[8:12])[0] == _masked(content[:8])
        assert struct.unpack("<I", rest[:4])[0] == _masked(event)
        content = rest[4:]
        yield event


def test_checksum_is_masked_crc_32c():
    crc = 0xE3069283  # check value of CRC-32C
    assert _masked(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_integers_are_varints():
    assert (_varint(0), _varint(127), _varint(300)) == (b"\x00", b"\x7f", b"\xac\x02")
    assert _varint(-1) == b"\xff" * 9 + b"\x01"


def test_file_has_version_scalars_and_restart(tmp_path):
    file = EventFile(tmp_path / "train")
    file.restart(5)
    file.scalars(300, 1.0, {"train/ä": 0.5, "train/too_large": 1e300})
    file.close()
    (path,) = (tmp_path / "train").iterdir()
    version, restart, scalars = events(path)
    assert version.endswith(b"\x1a\x0dbrain.Event:2")
    assert restart.endswith(b"\x10\x05\x3a\x02\x08\x01")
    value = b"\x0a\x08" + "train/ä".encode() + b"\x15" + struct.pack("<f", 0.5)
    assert scalars == b"\x09" + struct.pack("<d", 1.0) + b"\x10\xac\x02" + b"\x2a\x11\x0a\x0f" + value


def test_later_files_have_later_names(tmp_path):
    for _ in range(3):
        EventFile(tmp_path).close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3 and files == sorted(files, key=lambda path: path.stat().st_mtime_ns)


# ---- The tracker of docs/examples/tracker.py posts what it says


DOCS = Path(__file__).resolve().parents[4] / "docs"


def test_example_posts_each_evaluation(tmp_path, monkeypatch):
    posted: list[str] = []

    def taken(request, timeout):
        assert request.full_url == "https://chat/hook" and isinstance(request.data, bytes)
        posted.append(json.loads(request.data)["text"])
        return io.BytesIO()

    monkeypatch.syspath_prepend(str(DOCS / "examples"))
    monkeypatch.setattr(urllib.request, "urlopen", taken)
    importlib.invalidate_caches()
    tracker = TRACKER.make("tracker:Chat", Run("sums", "t", tmp_path), {"url": "https://chat/hook"})
    for record in (train(1), evaluation(50), evaluation(60, complete=False)):
        tracker.log(Point(record["kind"], record["step"], 0.0, 0, metrics_of(record)))
    tracker.close("done")
    assert posted == ["sums/t: step 50: eval/eval/accuracy 50.0%", "sums/t: the run ended: done"]
    sys.modules.pop("tracker")
