"""Words of commands that start or continue a run, for the user's shell and for other machines."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from realsys.config.compose import quoted

if TYPE_CHECKING:
    from realsys.launch.run import RunOptions

_PLAIN = re.compile(r"/[\w./-]*")  # absolute paths that hydra reads as they are


def resume_command(root: Path, *, plain: bool = False, session: bool = False) -> str:
    """Return the command that continues the trial in ``root``, to be copied to a shell in the working directory.

    ``session``: its training loop was a script's (``realsys.Session``), which goes on from Python.
    """
    here = Path.cwd()
    folder = root.relative_to(here) if root.is_relative_to(here) else root
    if session:
        return f'run the script again, or realsys.Session.resume("{folder}") in Python'
    return command_line("resume", folder, *(["--plain"] if plain else []))


def command_line(*words: str | Path) -> str:
    """Return a command of this realsys, to be copied to a shell."""
    return shlex.join([*own_command(), *map(str, words)])


def path_setting(field: str, path: Path) -> str:
    """Return the word that sets ``field`` to an absolute path, to be copied to a shell."""
    text = str(path)
    return shlex.quote(f"{field}={text if _PLAIN.fullmatch(text) else quoted(text)}")


def words_again(overrides: Sequence[str], trial: str, options: RunOptions) -> list[str]:
    """Return the words after ``realsys`` in the command that begins or continues the trial."""
    words = ["run"]
    words += [text for text in overrides if text.partition("=")[0] not in ("trial", "recover")]
    words += ["--trial", trial]
    words += ["--config-dir", str(options.config_dir)] if options.config_dir else []
    words += ["--plain"] if options.plain else []
    return words


def own_words() -> list[str]:
    """Return the words that start this realsys in any folder and with any PATH."""
    return [sys.executable, "-P", "-m", "realsys.launch.cli"]


def own_command() -> list[str]:
    """Return the words that start this realsys in the user's shell: its name if it is on the PATH, else its path."""
    script = Path(sys.executable).with_name("realsys")
    if not script.is_file():
        return [sys.executable, "-m", "realsys.launch.cli"]
    on_path = shutil.which("realsys")
    return ["realsys"] if on_path and Path(on_path).resolve() == script.resolve() else [str(script)]
