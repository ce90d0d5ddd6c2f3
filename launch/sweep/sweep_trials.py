"""Trials of a sweep: lists of values in the overrides, their combinations, and the name of each. Pure.

lr=1e-4,1e-3 seed=1,2  ──>  lr=1e-4 seed=1 | lr=1e-4 seed=2 | lr=1e-3 seed=1 | lr=1e-3 seed=2
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from realsys.errors import ConfigError

_MOST_CHARACTERS = 64  # a longer name of a trial is refused (realsys.config.fields.Name)
_OPENING, _CLOSING, _QUOTES = "([{", ")]}", "'\""
#: settings that all trials of a sweep share
_SHARED = ("experiment", "trial", "fileroot", "recover")


@dataclass(frozen=True, slots=True)
class SweepTrial:
    """One trial of a sweep. ``settings``: field or group -> its value in this trial, as the user wrote it.

    ``overrides``: of `realsys run`, without the name of the trial.
    """

    name: str
    settings: Mapping[str, str]
    overrides: Sequence[str]

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.settings.items())


def sweep_trials(overrides: Sequence[str], prefix: str) -> list[SweepTrial]:
    """Return a trial for each combination of the listed values; the last list varies fastest.

    ``prefix``: begin of the names. Raises ConfigError if no override lists values, or if one cannot be swept.
    """
    lists = [(text.partition("=")[0].lstrip("+"), split_values(text.partition("=")[2]), text) for text in overrides]
    swept = {key: values for key, values, _ in lists if len(values) > 1}
    if not swept:
        problem = "no setting has a list of values: write field=A,B, or use realsys run for one trial"
        raise ConfigError("sweep", " ".join(overrides), problem)
    counts = Counter(key for key, _, _ in lists)
    for key, values in swept.items():
        _check_list(key, values, counts[key])
    settings = [dict(zip(swept, combination, strict=True)) for combination in itertools.product(*swept.values())]
    shared = [(key, text) for key, _, text in lists if key != "trial"]
    return [
        SweepTrial(name, each, [f"{key}={each[key]}" if key in each else text for key, text in shared])
        for name, each in zip(_names(prefix, settings), settings, strict=True)
    ]


def split_values(text: str) -> list[str]:
    r"""Split ``text`` at each comma outside of brackets and quotes. A character behind a ``\`` separates nothing.

    Brackets and quotes that do not close are left to the error of the setting: then ``text`` is one value.
    """
    values, depth, quote, skip = [""], 0, "", False
    for char in text:
        if not (char == "," and depth == 0 and not quote and not skip):
            values[-1] += char
        else:
            values.append("")
        if skip:
            skip = False
        elif char == "\\":
            skip = True
        elif quote:
            quote = "" if char == quote else quote
        elif char in _QUOTES:
            quote = char
        else:
            depth += (char in _OPENING) - (char in _CLOSING)
    return values if depth == 0 and not quote else [text]


def _check_list(key: str, values: Sequence[str], count: int) -> None:
    text = ",".join(values)
    if key in _SHARED:
        raise ConfigError(key, text, "is the same for all trials of a sweep: name one value")
    if "" in values:
        raise ConfigError(key, text, "has an empty value: remove the comma, or write ''")
    if len(set(values)) < len(values):
        raise ConfigError(key, text, "has a value twice: name each once")
    if count > 1:
        raise ConfigError(key, text, "is set more than once: write all its values in one list")


def _names(prefix: str, settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Name the trials by their values, ``prefix-lr_1e-4-seed_2``; by numbers if such names are too long or equal."""
    last = Counter(key.rpartition(".")[2] for key in settings[0])
    labels = {key: short if last[short := key.rpartition(".")[2]] == 1 else key for key in settings[0]}
    told = ([f"{labels[key]}_{_plain(value)}" for key, value in each.items()] for each in settings)
    names = ["-".join([prefix, *each]) for each in told]
    if len(set(names)) == len(names) and max(map(len, names)) <= _MOST_CHARACTERS:
        return names
    digits = len(str(len(settings)))
    return [f"{prefix}-{number:0{digits}}" for number in range(1, len(settings) + 1)]


def _plain(value: str) -> str:
    """Return a value in characters that a name may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", value).strip("_")
