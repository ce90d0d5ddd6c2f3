"""Tracker ``wandb``: Weights & Biases. ``tracker_args`` are arguments of ``wandb.init``: project, entity, mode, ...

W&B numbers the rows of a run in ascending order and cannot take one back. So a row's number is the point's index, and
charts use ``train/step``, ``eval/step`` or ``warmup/step`` as their axis. After a roll-back both branches are shown.
"""

from __future__ import annotations

import configparser
import importlib
import netrc
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from realsys.observe.step_fields import CURVES
from realsys.observe.trackers.contract import Point, Run, Tracker, argument_problem

RUN_ID = "run_id"  # entry of ``Run.state``


class WandbTracker(Tracker):
    """One run of W&B for the trial, over all of its starts."""

    package = "wandb"
    install = "realsys[wandb]"

    @classmethod
    def problem(cls, arguments: Mapping[str, Any]) -> str:
        return argument_problem("wandb", "sdk/wandb_init.py", arguments, ("id", "resume")) or key_problem(arguments)

    def __init__(self, run: Run, **arguments: Any) -> None:
        super().__init__(run)
        self._wandb: Any = importlib.import_module("wandb")
        run_id = run.state.setdefault(RUN_ID, f"{run.trial}-{uuid.uuid4().hex[:8]}")
        settings = {"console": "off", "silent": True, "disable_git": True, "x_disable_meta": True}
        self._run: Any = self._wandb.init(
            **{
                "project": run.experiment,
                "name": run.trial,
                "config": {**run.config, "realsys_version": run.version},
                "dir": str(run.folder),
                **arguments,
                "id": run_id,
                "resume": "allow",
                "settings": self._wandb.Settings(**{**settings, **arguments.get("settings", {})}),
            }
        )
        for kind in CURVES:
            self._run.define_metric(f"{kind}/step")
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")

    def log(self, point: Point) -> None:
        # A point that is delivered twice has an old number, which W&B ignores.
        self._run.log({f"{point.kind}/step": point.step, **point.metrics}, step=point.index)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "done" else 1)
        self._wandb.teardown()  # `finish` returns before the process of W&B has written its file


# ---- wandb key
#
# Says before the start whether W&B will find its API key. Reads what W&B reads, without the library and the network.
#
# mode     argument, settings of the arguments, WANDB_MODE, settings files        offline, disabled: no key is needed
# key      settings of the arguments, WANDB_API_KEY, WANDB_IDENTITY_TOKEN_FILE, netrc, settings files
# server   settings of the arguments, WANDB_BASE_URL, settings files              its entry in the netrc has the key


#: hosts of the public server: W&B takes the entry of either
_PUBLIC = ("api.wandb.ai", "api.forge.coreweave.com")
_WITHOUT_KEY = frozenset({"offline", "disabled", "dryrun"})


def key_problem(arguments: Mapping[str, Any]) -> str:
    """Return why ``wandb.init`` with ``arguments`` would ask for a key; "" if it would not."""
    given = arguments.get("settings") or {}
    # settings that ``wandb login`` and ``wandb offline`` have stored; those of this folder win
    user = Path(os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb")
    here = Path(os.environ.get("WANDB_DIR") or ".")
    own = here / (".wandb" if (here / ".wandb").exists() else "wandb")
    stored: dict[str, str] = {}
    for path in (user / "settings", own / "settings"):
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read_string(path.read_text("utf-8"))
        except (OSError, configparser.Error, UnicodeDecodeError):
            continue
        if parser.has_section("default"):
            stored |= parser["default"]
    mode = arguments.get("mode") or given.get("mode") or os.environ.get("WANDB_MODE") or stored.get("mode")
    if mode in _WITHOUT_KEY:
        return ""
    key = given.get("api_key") or stored.get("api_key")
    if key or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return ""
    server = given.get("base_url") or os.environ.get("WANDB_BASE_URL") or stored.get("base_url")
    host = urlsplit(str(server)).netloc if server else _PUBLIC[0]
    hosts = (host, *_PUBLIC) if host.endswith(("wandb.ai", "forge.coreweave.com")) else (host,)
    if any(map(_has_entry, hosts)):
        return ""
    remedy = "run `wandb login`, or set WANDB_API_KEY, or telemetry.tracker_args.wandb.mode=offline"
    return f"W&B has no API key for {host}: {remedy}"


def _has_entry(host: str) -> bool:
    """Return True if the netrc file has a password for ``host``."""
    try:
        entry = netrc.netrc(str(_netrc_path())).authenticators(host)
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return False
    return bool(entry and entry[2])


def _netrc_path() -> Path:
    if path := os.environ.get("NETRC"):
        return Path(path).expanduser()
    paths = [Path.home() / name for name in (".netrc", "_netrc")]
    return next((path for path in paths if path.exists()), paths[0])
