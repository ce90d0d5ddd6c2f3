"""Print the configuration that a run with these overrides would have, or that of a trial.

It has all settings that are chosen for this machine. Nothing is checked beyond the settings, and nothing is started.
"""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from realsys.config.compose import compose, given_fields
from realsys.config.machine import Machine
from realsys.config.paths import read_config
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.launch.commands.options import add_config_dir, add_json, find_trial
from realsys.launch.fit import fit
from realsys.launch.prepare import resolve, stored_config
from realsys.launch.start import changes

_NOT_SETTINGS = ("experiment", "trial", "fileroot")  # the first line, and fields of the trial's folder


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="WORD", help="overrides as for run, or the folder of a trial and changes"
    )
    parser.add_argument(
        "--diff", action="store_true", help="print overrides: what differs from the defaults or the experiment"
    )
    add_json(parser, "print JSON instead of YAML")
    add_config_dir(parser, "your configuration files, as for run")


def run(args: Namespace) -> int:
    """Print the configuration of a run with these overrides, or of the trial that the first word names.

    With ``--diff`` as overrides, without most fields that have their defaults. Raises ConfigError.
    """
    words, config_dir = args.overrides, args.config_dir
    if words and "=" not in words[0]:
        paths = find_trial(Path(words[0]))
        config = stored_config(paths, words[1:]) if words[1:] else read_config(paths.config)
    else:
        composed = resolve(compose(words, config_dir=config_dir), now=datetime.now())
        config, chosen = fit(composed, given_fields(words, config_dir=config_dir), Machine.here())
        for line in chosen:
            print(f"# {line}", file=sys.stderr)
    if args.diff:
        for line in _as_overrides(config, config_dir):
            print(line)
        return 0
    print(_text(config.model_dump(mode="json"), as_json=args.json))
    return 0


def _as_overrides(config: Config, config_dir: Path | None) -> Iterator[str]:
    """Yield the overrides that give ``config``: what differs from the defaults, or from its experiment alone."""
    yield f"experiment={config.experiment}"
    bases = [Config()]
    with contextlib.suppress(ConfigError):  # the experiment of an older trial may be gone
        bases.append(compose([f"experiment={config.experiment}"], config_dir=config_dir))
    values = config.model_dump(mode="json")
    different = {change.field: change.new for base in bases for change in changes(base.model_dump(mode="json"), values)}
    for field, value in different.items():
        if field not in _NOT_SETTINGS:
            yield f"{field}={_written(value)}"


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _text(tree: dict[str, Any], *, as_json: bool) -> str:
    if as_json:
        return json.dumps(tree, indent=2, ensure_ascii=False)
    import yaml

    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)).rstrip()
