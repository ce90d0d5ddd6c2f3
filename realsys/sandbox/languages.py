"""Languages of programs other than Python: how a program is compiled and run.

    source ──compile, once──> program ──run, once per test──> output

Both commands run in the sandbox, in an empty folder with the file ``source``. Their first words are looked up in PATH.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

import msgspec

from realsys.errors import MALFORMED, ConfigError
from realsys.sandbox.isolation import Settings, is_visible

PATH = "/usr/local/bin:/usr/bin:/bin"  # the home of the user, where other programs may be, is not in the sandbox


class Language(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Commands for the programs of a language.

    source     name of the file with the program
    run        command that runs the program
    compile    command that makes the file ``makes``; empty: the language is not compiled
    makes      the only file that reaches ``run``, if ``compile`` is set
    reserves   the run-time system reserves far more addresses than it uses: only used memory is limited, not addresses
    """

    source: str
    run: list[str]
    compile: list[str] = []
    makes: str = ""
    reserves: bool = False

    def problem(self) -> str | None:
        """Return what the types cannot express, or None."""
        for name, file in (("source", self.source), ("makes", self.makes)):
            if file != os.path.basename(file):
                return f"{name} is {file!r}: it must be a file name without a folder"
        if not self.source or not self.run:
            return "source and run must not be empty"
        if bool(self.compile) != bool(self.makes):
            return "compile needs makes, the file that it makes, and makes needs compile"
        return None

    def missing(self) -> str | None:
        """Return the name of a command that this machine does not have, or None."""
        commands = [command[0] for command in (self.compile, self.run) if command]
        return next((name for name in commands if not name.startswith("./") and find_command(name) is None), None)


BUILTIN: dict[str, Language] = {
    "bash": Language(source="main.sh", run=["bash", "main.sh"]),
    "c": Language(
        source="main.c",
        compile=["gcc", "-O2", "-std=c17", "-o", "program", "main.c", "-lm"],
        makes="program",
        run=["./program"],
    ),
    "cpp": Language(
        source="main.cpp",
        compile=["g++", "-O2", "-std=c++20", "-o", "program", "main.cpp"],
        makes="program",
        run=["./program"],
    ),
    "go": Language(
        source="main.go",
        compile=["go", "build", "-o", "program", "main.go"],
        makes="program",
        run=["./program"],
        reserves=True,
    ),
    "javascript": Language(source="main.js", run=["node", "main.js"], reserves=True),
    "rust": Language(
        source="main.rs", compile=["rustc", "-O", "-o", "program", "main.rs"], makes="program", run=["./program"]
    ),
}


def languages_of(settings: Mapping[str, Any]) -> dict[str, Language]:
    """Return the built-in languages and those of ``languages`` of the verifier's arguments. Raises ConfigError."""
    languages = dict(BUILTIN)
    for name, values in settings.items():
        field = f"languages.{name}"
        try:
            language = msgspec.convert(values, Language)
        except MALFORMED as error:
            raise ConfigError(field, values, str(error)) from None
        if problem := language.problem():
            raise ConfigError(field, values, problem)
        languages[name] = language
    return languages


def problem_of(languages: Mapping[str, Language], name: str, settings: Settings) -> str | None:
    """Return why programs of a language cannot be run on this machine, or None."""
    if name not in languages:
        return f"language {name!r} is not known: set data.verifier_args.languages.{name}"
    if missing := languages[name].missing():
        return f"language {name!r} needs {missing}, which is not found in {PATH}: install it"
    for command in (languages[name].compile, languages[name].run):
        path = find_command(command[0]) if command and not command[0].startswith("./") else None
        if path is not None and not is_visible(path, settings):
            place = os.path.realpath(path)
            return f"language {name!r} needs {place}, which programs cannot see: add its folder to readable, or move it"
    return None


def find_command(name: str) -> str | None:
    """Return the path of a command in the sandbox, or None."""
    return shutil.which(name, path=PATH)
