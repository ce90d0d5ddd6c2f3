"""``python -m realsys.train.registered MODULE ...``: every interface and hook by name, with those that MODULEs add.

For a process that must not import torch. The last line of the output is ``Registered``, or ``NotImported`` for a module
that cannot be imported, as JSON.
"""

from __future__ import annotations

import sys

import msgspec

from realsys.config.check_calls import NotImported, Registered
from realsys.config.dataflow import import_plugins
from realsys.errors import ConfigError
from realsys.train.hooks import HOOKS
from realsys.train.interfaces import INTERFACES


def found(modules: list[str]) -> Registered | NotImported:
    try:
        import_plugins("plugins.train", modules)
    except ConfigError as error:
        return NotImported(str(error.value), error.problem)
    return Registered(INTERFACES.names, HOOKS.names)


def main() -> None:
    answer = msgspec.json.encode(found(sys.argv[1:])).decode()
    print(f"\n{answer}", flush=True)  # on a line of its own, whatever a module has printed


if __name__ == "__main__":
    main()
