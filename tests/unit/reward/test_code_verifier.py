"""The verifier ``code``: references, settings, verdicts."""

import pytest

from realsys.config.schema import Config
from realsys.data.lines import KEY
from realsys.errors import ConfigError, SandboxError
from realsys.reward.sandbox.sandbox import Sandbox
from realsys.reward.verifiers import code as module
from realsys.reward.verifiers.code import check_answer, check_settings
from realsys.reward.verifiers.contract import Item


def item(**tests):
    return Item("", "", "", {KEY: tests})


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        ({}, "has no tests"),
        ({"source": "assert f( == 1"}, "is no Python"),
        ({"source": "import x\n\ndef check(f):\n    assert f() == 1"}, "line 1: nothing calls the program"),
        ({"source": "def test_a(f):\n    assert f() == 1"}, "line 1: test_a is async or takes arguments"),
        (
            {"source": "class TestF:\n    def test(self): assert f() == 1"},
            "must derive from unittest.TestCase",
        ),
        ({"source": "x = f()\nassert np.all(x)"}, "line 2: 'np' is not defined"),
        ({"source": "assert f() == 1", "stub": "def f( ="}, "is no Python"),
        ({"language": "c", "source": "x"}, "must be stdio"),
        ({"language": "cobol", "stdio": [{"stdin": "", "stdout": ""}]}, "'cobol' is not known"),
    ],
)
def test_useless_tests_are_refused(tests, problem):
    assert problem in check_answer(item(**tests))


def test_row_without_tests_is_refused():
    assert "not a code task" in check_answer(Item("", "", "1"))


CASE = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(), 1)\n"


@pytest.mark.parametrize(
    "source", ["assert f() == 1", "def test_a():\n    assert f() == 1", CASE, "def check(g): assert g()\ncheck(f)"]
)
def test_useful_tests_are_taken(source):
    assert check_answer(item(source=source)) is None


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"isolation": "jail"}, "isolation must be one of full, available, none"),
        ({"reward": "half"}, "reward must be all or share"),
        ({"cpu_s": 0}, "cpu_s is 0"),
        ({"cpu_s": "x"}, "cpu_s: Expected `float`, got `str`"),
        ({"memory_mb": "1g"}, "memory_mb: Expected `float`"),
        ({"processes": 1.5}, "processes: Expected `int`"),
        ({"readable": "/opt/x"}, "readable: Expected `array`"),
        ({"readable": 5}, "readable: Expected `array`"),
        ({"languages": ["lua"]}, "languages: Expected `object`"),
        ({"disk_mb": float("inf")}, "disk_mb is inf: it must be finite"),
        ({"disk_mb": 0.5}, "disk_mb is 0.5: it must be at least 1"),
        ({"output_mb": float("inf")}, "output_mb is inf: it must be finite"),
        ({"cpu": 1}, "unknown field `cpu`"),
        ({"memory_mb": 8192}, "at most 4096"),
        ({"wall_s": 5}, "none may be less than the one before"),
        ({"total_s": 58}, r"rollout.reward.elapsed_timeout_s \(60\) must be 5 s more"),
        ({"languages": {"x": {"source": "a"}}}, "languages.x: .* missing required field"),
    ],
)
def test_wrong_settings_are_refused(arguments, problem):
    import re

    assert re.search(problem, check_settings(arguments, Config()))


def test_machine_without_isolation_is_refused(monkeypatch):
    def refuse(self, *_):
        raise SandboxError("bwrap is not found: install it")

    monkeypatch.setattr(Sandbox, "run", refuse)
    assert "install it, or set isolation to none" in check_settings({}, Config())


def test_door_names_the_field_of_settings(monkeypatch):
    from realsys.config.doors import VERIFIER

    with pytest.raises(ConfigError, match="data.verifier_args="):
        VERIFIER.check_settings("code", {"reward": "half"}, Config())
    VERIFIER.check_settings("exact", {}, Config())


def test_verdict_has_share_and_reason():
    verdict = module._verdict(0.5, "cpu", "share")
    assert (verdict.reward, verdict.correct) == (0.5, False)
    assert verdict.metrics["tests_passed"] == 0.5
    assert [name for name, value in verdict.metrics.items() if value == 1.0] == ["program_cpu"]
    assert module._verdict(1.0, "", "all").reward is None
