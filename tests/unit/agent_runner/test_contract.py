"""The two contracts of an agent: which one a class or function has, and the problem with anything else."""

import inspect

import pytest

from realsys.agent_runner.contract import CAPTURED, NATIVE, CapturedRun, argument_problem, described, kind_of


class Native:
    def __init__(self, parts, level=1):
        pass

    async def run(self, task, session):
        pass


class NativeWithMore(Native):
    async def run(self, task, session, *more, **options):
        pass


class Captured:
    def __init__(self, level=1):
        self.level = level

    async def run(self, data, base_url, api_key, http_client):
        return self.level, data, base_url, api_key, http_client


class Keywords:
    async def run(self, data, **kwargs):
        return kwargs


class Static:
    @staticmethod
    def run(data, base_url, api_key=""):
        pass


class Unclear:
    async def run(self, *arguments, **options):
        pass


class Wrong:
    async def run(self, prompt, completion, reward):
        pass


class Empty:
    pass


async def function(data, base_url, api_key, http_client, turns=2):
    return turns


def needs(data, base_url, turns):
    pass


def factory(parts, **arguments):
    pass


def other(x, y):
    pass


@pytest.mark.parametrize(
    ("loaded", "kind"),
    [
        (Native, NATIVE),
        (NativeWithMore, NATIVE),
        (factory, NATIVE),
        (Captured, CAPTURED),
        (Keywords, CAPTURED),
        (Static, CAPTURED),
        (function, CAPTURED),
        (needs, CAPTURED),
    ],
)
def test_signature_of_run_tells_the_contract(loaded, kind):
    assert kind_of(loaded) == (kind, "")


@pytest.mark.parametrize(
    ("loaded", "problem"),
    [
        (Wrong, "run takes (prompt, completion, reward)"),
        (other, "run takes (x, y)"),
        (Unclear, "does not tell its contract"),
        (Empty, "the class lacks run"),
        (Captured(), "not Captured"),
        (3, "not int"),
    ],
)
def test_anything_else_is_refused_in_one_line(loaded, problem):
    kind, told = kind_of(loaded)
    assert not kind and problem in told and "\n" not in told


@pytest.mark.parametrize(
    ("loaded", "arguments", "problem"),
    [
        (Native, {"level": 2}, ""),
        (Captured, {"level": 2}, ""),
        (function, {"turns": 1}, ""),
        (needs, {"turns": 1}, ""),
        (needs, {}, "'turns'"),
        (function, {"steps": 1}, "'steps'"),
        (Captured, {"steps": 1}, "'steps'"),
    ],
)
def test_arguments_must_fit_the_agent(loaded, arguments, problem):
    told = argument_problem(loaded, kind_of(loaded)[0], arguments)
    assert problem in told if problem else told == ""


def test_run_gets_the_arguments_that_it_takes():
    given = {}, "http://x/v1", "key", None
    assert _result(CapturedRun(Captured, {"level": 7}, 1.0).call(*given)) == (7, *given)
    assert _result(CapturedRun(function, {"turns": 5}, 1.0).call(*given)) == 5
    assert set(_result(CapturedRun(Keywords, {}, 1.0).call(*given))) == {"base_url", "api_key", "http_client"}
    assert CapturedRun(Static, {}, 1.0).call(*given) is None


def _result(coroutine):
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    return ended.value.value


def test_description_has_type_place_and_line():
    try:
        int("no number")
    except ValueError as error:
        told = described(error)
    line = inspect.currentframe().f_lineno - 3
    assert told["type"] == "ValueError" and told["place"] == f"{__file__}:{line}"
    assert told.in_words().endswith(f'({__file__}:{line}: int("no number"))')


def test_error_that_cannot_be_printed_is_described():
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError

    assert described(Odd())["message"] == "its message cannot be printed"
