"""Reads which arguments a function of a library takes from its source: an import of the library takes seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path


def argument_problem(library: str, file: str, arguments: Iterable[str], own: Sequence[str]) -> str:
    """Return which of ``arguments`` the function ``init`` of a library does not take, or the tracker sets itself.

    ``file``: source of ``init`` in the library's folder. ``own``: arguments that the tracker sets. "" if all are good,
    or if the source has no such function.
    """
    if taken := [name for name in arguments if name in own]:
        return f"has no argument {taken[0]!r}: it belongs to the trial, remove it"
    known = _arguments_of_init(library, file)
    if known and (unknown := [name for name in arguments if name not in known]):
        good = sorted(set(known) - {*own})
        return f"has no argument {unknown[0]!r}: {library}.init takes {', '.join(good)}"
    return ""


def _arguments_of_init(library: str, file: str) -> list[str]:
    """Return the names of all arguments; [] if they are not known."""
    spec = find_spec(library)
    for folder in (spec and spec.submodule_search_locations) or ():
        try:
            tree = ast.parse((Path(folder) / file).read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == "init" and node.args.kwarg is None:
                return [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
    return []
