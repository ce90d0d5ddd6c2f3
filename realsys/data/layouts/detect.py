"""Finding the layout of a source by the keys of its first row, and loading the one that a setting names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from realsys.config.doors import LAYOUT
from realsys.config.schema_data import AUTO_LAYOUT
from realsys.data.layouts.base import Row, Values, has_keys
from realsys.errors import DataError

OWN = "realsys"
Layout = Callable[[Values], Row]

#: Keys of a row -> layout. The first line that fits is taken, so the more particular ones stand first.
_KEYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("livecodebench", ("question_content", "private_test_cases")),
    ("humaneval", ("prompt", "entry_point", "test")),
    ("mbpp", ("test_list",)),
    ("code_contests", ("description", "private_tests")),
    ("code_contests", ("description", "public_tests")),
    ("verl", ("prompt", "reward_model")),
    ("realsys", ("prompt", "answer")),
    ("slime", ("prompt", "label")),
    ("messages", ("messages",)),
    ("deepscaler", ("problem", "answer")),
    ("math", ("problem", "solution")),
    ("gsm8k", ("question", "answer")),
)


def detect(row: Values) -> str | None:
    """Return the name of the layout that has the keys of ``row``, None if no layout has them."""
    return next((name for name, keys in _KEYS if has_keys(row, keys)), None)


def layout_of(name: str, arguments: Mapping[str, Any], first: Values, where: str) -> Layout:
    """Return the layout ``name`` with its arguments; ``auto`` finds it by ``first``.

    Raises ConfigError, or DataError if no layout fits.
    """
    if name == AUTO_LAYOUT:
        found = detect(first)
        by_name, keys = next(((name, keys) for name, keys in _KEYS if first.keys() >= set(keys)), (found, ()))
        if by_name != found:
            nulls = ", ".join(key for key in keys if first[key] is None)
            problem = f"has the keys of layout {by_name}, but {nulls} is null"
            raise DataError(f"{where}: {problem}: correct it, or set data.layout for all rows")
        if found is None:
            given, known = ", ".join(map(str, first)) or "none", ", ".join(sorted(LAYOUT.builtin))
            raise DataError(f"{where}: no known layout has the keys {given}: set data.layout to one of {known}")
        name = found
    LAYOUT.check(name, arguments)
    return functools.partial(LAYOUT.load(name), **arguments)
