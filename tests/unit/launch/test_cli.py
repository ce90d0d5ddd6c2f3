"""Help of the `realsys` command."""

from __future__ import annotations

import pytest

from realsys.launch.cli import _parser


def test_help_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser, commands = _parser()
    lines = [line for each in (parser, *commands.values()) for line in each.format_help().splitlines()]
    assert [line for line in lines if len(line) > 80] == []
