"""On PYTHONPATH of a run: each process notes when a function of realsys was last called, by its module.

Written once a second to ``$ROUND_TRIP/{pid}.json``: the command line, and (module, record type or "", time) rows. Only
types whose ``__init__`` is Python code are seen: dataclasses, not the structs of msgspec.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

CHECKOUT = f"{Path(__file__).resolve().parents[2]}/"
FOLDERS = tuple(f"{CHECKOUT}{folder}/" for folder in ("realsys", "workers", "launch"))
called: dict[tuple[str, str], float] = {}
written = [0.0]


def note(frame: FrameType, event: str, _: Any) -> None:
    if event != "call":
        return
    path, record = frame.f_code.co_filename, ""
    if path == "<string>" and frame.f_code.co_name == "__init__":
        kind = type(frame.f_locals.get("self"))
        module, record = kind.__module__, kind.__qualname__
        if not module.startswith("realsys."):
            return
    elif path.startswith(FOLDERS):
        module = (
            path.removeprefix(CHECKOUT)
            .removeprefix("realsys/")
            .removesuffix(".py")
            .removesuffix("/__init__")
            .replace("/", ".")
        )
        module = f"realsys.{module}"
    else:
        return
    now = called[module, record] = time.time()
    if now >= written[0] + 1:
        written[0] = now
        rows = [[*key, at] for key, at in list(called.items())]
        path = Path(os.environ["ROUND_TRIP"], f"{os.getpid()}.json")
        staged = path.with_suffix(f".{threading.get_ident()}")
        staged.write_text(json.dumps({"argv": sys.argv, "rows": rows}))
        staged.replace(path)


def start() -> None:
    called.clear()
    threading.setprofile(note)
    sys.setprofile(note)


if os.environ.get("ROUND_TRIP"):
    start()
    os.register_at_fork(after_in_child=start)
