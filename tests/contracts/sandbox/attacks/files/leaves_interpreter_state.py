"""Changes the interpreter in memory for the next program: modules, builtins, environment, folder, limits.

tests: stdio calls source
runs: 2
"""

import builtins
import os
import sys


def gained(outside):
    places = (sys.modules.get("json"), builtins, sys)
    found = any(hasattr(place, "left_behind") for place in places) or "LEFT_BEHIND" in os.environ
    import json

    json.left_behind = builtins.left_behind = sys.left_behind = True
    os.environ["LEFT_BEHIND"] = "1"
    os.umask(0o777)
    sys.path.insert(0, "/left_behind")
    return found or sys.path.count("/left_behind") > 1
