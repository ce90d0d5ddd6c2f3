"""The resolved configuration on disk: written once per trial by the launcher, read by every worker."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from realsys.config.schema import Config
from realsys.errors import ConfigError


def write_config(config: Config, path: Path) -> None:
    """Write ``config`` as JSON, atomically: a worker sees all of it or nothing."""
    staged = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with staged.open("w", encoding="utf-8") as file:
        file.write(config.model_dump_json(indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)


def newest_dump(fileroot: Path, experiment: str = "*") -> Path | None:
    """The configuration of the trial that was started last, of one experiment or of any."""
    dumps = list(fileroot.glob(f"{experiment}/*/config.json"))
    return max(dumps, key=lambda path: path.stat().st_mtime, default=None)


def read_config(path: Path) -> Config:
    """Read a dump back. Raises ConfigError naming the file if it is missing or not ours."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        problem = "is not there: not the folder of a trial, or of one that is still being made"
        raise ConfigError("config.json", str(path), problem) from None
    except OSError as exc:
        raise ConfigError("config.json", str(path), exc.strerror or "cannot be read") from None
    except UnicodeDecodeError as exc:
        raise ConfigError("config.json", str(path), f"is no text: {exc}") from None
    try:
        return Config.model_validate_json(text)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError("config.json", str(path), f"{where or 'content'}: {first['msg']}") from None
