"""Checks that the prompts of a trial stay the same: ledger and checkpoints know a prompt by its number alone.

A trial stores a digest of its prompts at its first start. A later start, and a trial that resumes from it, must have
the same prompts in the same order. Otherwise the cursor would skip some prompts and repeat others.
"""

from __future__ import annotations

from pathlib import Path

from realsys.config.evaluation_sets import sources_of_sets
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.data.conversion.convert import needs_copy
from realsys.data.dataset_files import is_converted, write_atomically
from realsys.errors import ConfigError

_FILE = "train.digest"
#: settings that a copy of the data was made with
_MADE_WITH = ("train", "eval", "mixture", "layout", "layout_args", "source_args", "long_prompts")
_MADE_WITH_LIMIT = ("max_prompt_tokens", "chat_template")


def check_copy(config: Config, earlier: Config, paths: TrialPaths) -> None:
    """Check that a trial which continues reads the data that it was begun with. Raises ConfigError."""
    data, begun = config.data, earlier.data
    again = "choose another trial name"
    _check_sets(config, earlier, again)
    if not is_converted(paths):
        if needs_copy(data):
            problem = f"must be converted, and trial {config.trial!r} was begun with a file that is read in its place"
            raise ConfigError("data.train", data.train or "(mixture)", f"{problem}: {again}")
        return
    limits = _MADE_WITH_LIMIT if begun.long_prompts == "drop" else ()
    for name in (*_MADE_WITH, *limits):
        if (new := getattr(data, name)) != (old := getattr(begun, name)):
            problem = f"trial {config.trial!r} has its own copy of the data, made with {old!r}: keep that, or {again}"
            raise ConfigError(f"data.{name}", new, problem)


_OF_SETS = ("path", "layout", "layout_args", "source_args")


def _check_sets(config: Config, earlier: Config, again: str) -> None:
    """Check that the trial has copies of the data of its evaluation sets, made from the same sources."""
    before = sources_of_sets(earlier)
    for name, new in sources_of_sets(config).items():
        for field in _OF_SETS:
            old = getattr(before[name], field) if name in before else None
            if old != (value := getattr(new, field)):
                problem = f"trial {config.trial!r} was begun with {old!r}: keep that, or {again}"
                raise ConfigError(f"evaluation.sets.{name}.{field}", value, problem)


def check_prompts(config: Config, paths: TrialPaths, digest: str) -> None:
    """Check the prompts against those of this trial's earlier starts, and of the trial that it resumes.

    Raises ConfigError.
    """
    begun = _read(paths)
    source = f"trial {config.trial!r} was begun"
    if begun is None and config.resume:
        begun = _read(TrialPaths(Path(config.resume).parents[1]))
        source = f"resume={config.resume} was trained"
    if begun not in (None, digest):
        problem = f"{source} with other prompts, or in another order, so some would be skipped and others repeated"
        raise ConfigError("data.train", config.data.train or "(mixture)", f"{problem}: use the same data")


def write_digest(paths: TrialPaths, digest: str) -> None:
    """Store the digest at the first start."""
    paths.data.mkdir(exist_ok=True)
    if _read(paths) is None:
        write_atomically(paths.data / _FILE, [digest.encode()])


def _read(paths: TrialPaths) -> str | None:
    try:
        return (paths.data / _FILE).read_text("ascii")
    except (FileNotFoundError, NotADirectoryError):
        return None
