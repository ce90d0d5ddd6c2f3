"""Scenarios of the control plane: text scripts with recorded output, run against the real ManagerState.

Commands: tests/support/ledger/scenario.py. The output of a command is indented below it, and ``REALSYS_REWRITE=1``
records it anew.
"""

import os
from pathlib import Path

import pytest

from tests.support.ledger.scenario import Scenario

SCRIPTS = sorted(Path(__file__).with_name("scenarios").glob("*.txt"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_scenario_has_its_recorded_output(script):
    scenario, played = Scenario(), []
    for line in script.read_text().splitlines():
        if not line.startswith("    "):
            played.append(line)
            if line and not line.startswith("#"):
                played += [f"    {output}" for output in scenario.run(line).splitlines()]
    text = "\n".join(played) + "\n"
    if os.environ.get("REALSYS_REWRITE") == "1":
        script.write_text(text)
    assert script.read_text() == text
