"""The resolved configuration on disk. The launcher writes it once per trial; every worker reads it."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from realsys.config.schema import Config
from realsys.errors import ConfigError


def write_config(config: Config, path: Path) -> None:
    """Write ``config`` as JSON, atomically: a reader finds the whole file or no file."""
    staged = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with staged.open("w", encoding="utf-8") as file:
        file.write(config.model_dump_json(indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)


def newest_dump(fileroot: Path, experiment: str = "*") -> Path | None:
    """Return the config.json of the newest trial of one experiment or of all, or None without trials."""
    dumps = list(fileroot.glob(f"{experiment}/*/config.json"))
    return max(dumps, key=lambda path: path.stat().st_mtime, default=None)


def read_config(path: Path) -> Config:
    """Read a dump. Raises ConfigError, which names the file, if it is missing or invalid."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        problem = "not found: the folder is not a trial, or its launcher has not finished making it"
        raise ConfigError("config.json", str(path), problem) from None
    except OSError as exc:
        raise ConfigError("config.json", str(path), exc.strerror or "cannot be read") from None
    except UnicodeDecodeError as exc:
        raise ConfigError("config.json", str(path), f"must be UTF-8 text: {exc}") from None
    try:
        return Config.model_validate_json(text)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError("config.json", str(path), f"{where or 'content'}: {first['msg']}") from None
