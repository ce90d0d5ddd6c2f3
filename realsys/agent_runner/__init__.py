"""Runner of a user's agent in separate processes, in any interpreter from Python 3.9 on; standard library only.

The modules of this folder import each other by relative names, and nothing else of realsys: the interpreter of
``rollout.agent_python`` need not have it. ``BOOT`` imports them under a private name, so that they hide no module of
the user.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = str(Path(__file__).resolve().parent)

#: program for ``python -c``; arguments as for ``runner.main``
BOOT = f"""import importlib.util, sys
spec = importlib.util.spec_from_file_location("_realsys_agent_runner", {_FOLDER + "/__init__.py"!r})
sys.modules["_realsys_agent_runner"] = importlib.util.module_from_spec(spec)
from _realsys_agent_runner import runner
runner.main(sys.argv[1:])
"""
