"""Problems of a source ``verifiers:ENV`` before its interpreter has listed a task."""

import sys

import pytest

from realsys.config.schema_data import absolute_source, source_problem
from realsys.data.sources import source_files, source_rows
from realsys.data.sources.verifiers_tasks import surroundings
from realsys.errors import DataError

SOURCE = "verifiers:no_such_environment"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "source_args.env_python must be the path of an interpreter"),
        ({"env_python": "/no/python"}, "/no/python: not found or not a program"),
        ({"env_python": sys.executable, "sizes": 3}, "source_args sizes: use args, env_python, eval_args, size"),
        ({"env_python": sys.executable}, "cannot list its tasks: ModuleNotFoundError: No module named 'verifiers'"),
    ],
)
def test_wrong_source_names_the_problem(arguments, problem):
    with pytest.raises(DataError, match=problem):
        list(source_rows(SOURCE, "train", arguments))


def test_environment_is_no_file():
    assert absolute_source(SOURCE) == SOURCE and source_problem(SOURCE) == "" and source_files(SOURCE, "eval") == []


def test_programs_of_the_interpreter_come_first():
    assert surroundings("/venv/bin/python")["PATH"].startswith("/venv/bin:")
