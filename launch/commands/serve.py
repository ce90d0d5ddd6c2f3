"""Serve a model to clients that speak the Tinker protocol: each trains adapters of its own, and samples from them.

It is `realsys run experiment=serve` until `realsys stop`; the same command with the same --trial continues. Keys, port
and name stay in the trial's folder.

    options, keys file ──> serve.json ──realsys.launch.run──> the trial's exit code
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from realsys.launch.commands.options import add_while_stdin, preload_workers, stop_after_stdin
from realsys.launch.commands.run import add_run_options, run_options

if TYPE_CHECKING:
    from realsys.launch.run import Planned
    from realsys.serve.settings import ServeSettings

_OWNER = "me"  # without a keys file


def add_arguments(parser: ArgumentParser) -> None:
    add_run_options(parser)
    parser.add_argument("--port", type=int, metavar="N", help="TCP port for clients; 0, the default: any free one")
    parser.add_argument("--model-name", metavar="NAME", help="what clients call the model (default: its folder's name)")
    parser.add_argument("--keys", type=Path, metavar="FILE.yaml", help="callers: NAME: {key: tml-...} (default: one)")
    parser.add_argument("--plain", action="store_true", help="lines instead of the live display")
    add_while_stdin(parser)


def run(args: Namespace) -> int:
    """Run the service and return the exit code. Raises RealsysError for bad input."""
    from realsys.launch.run import plan_run, run_planned

    preload_workers(args)
    stop_after_stdin(args)
    chosen = any(text.startswith("experiment=") for text in args.overrides)
    overrides = [*([] if chosen else ["experiment=serve"]), *args.overrides]
    planned = plan_run(overrides, run_options(args))
    planned = replace(planned, serve=_settings(args, planned))
    return run_planned(planned, dry_run=args.dry_run, plain=args.plain)


def _settings(args: Namespace, planned: Planned) -> ServeSettings:
    """Return the settings of the options; what they leave open is as at the last start. Raises ConfigError."""
    import msgspec

    from realsys.cluster.network import bind_tcp, port_of
    from realsys.errors import MALFORMED, ConfigError
    from realsys.serve.settings import Owner, ServeSettings, new_key, read_owners, read_settings

    before = read_settings(planned.paths.serve) if planned.paths.serve.exists() else None
    port, name = args.port or (before.port if before and args.port is None else 0), args.model_name
    if not port:
        with bind_tcp(planned.config.cluster.host) as bound:
            port = port_of(bound)
    name = name or (before.model_name if before else Path(planned.config.model.path).name or "tiny")
    if args.keys:
        owners = read_owners(args.keys)
    else:
        owners = before.owners if before else {_OWNER: Owner(new_key())}
    made = {"port": port, "model_name": name, "owners": msgspec.to_builtins(owners)}
    try:
        return msgspec.convert(made, ServeSettings)
    except MALFORMED as error:
        field = "--port" if "$.port" in str(error) else "--model-name"
        raise ConfigError(field, port if field == "--port" else name, str(error).partition(" - ")[0]) from None
