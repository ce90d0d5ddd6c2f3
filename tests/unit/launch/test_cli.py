"""The command `realsys` itself: its help, its speed, and words that it does not know."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from realsys.launch.cli import COMMANDS, main, make_parser


def test_help_fits_eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parsers = [each for name in COMMANDS if (each := make_parser(name)[1]) is not None]
    assert len(parsers) == len(COMMANDS)
    lines = [line for each in (make_parser()[0], *parsers) for line in each.format_help().splitlines()]
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["stat"], "unknown command stat (did you mean status?): see realsys --help"),
        (["run", "--dryrun", "experiment=arith"], "unknown argument: --dryrun (did you mean --dry-run?)"),
        (["status", "a", "b"], "unknown argument: b"),
        (["run", "--no-such-option"], "unknown argument: --no-such-option"),
        (["fly"], "unknown command fly"),
    ],
)
def test_unknown_word_is_named_with_the_likely_one(argv, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and said in shown and "usage: realsys" in shown


def test_every_command_is_on_its_page():
    page = (Path(__file__).parents[3] / "docs" / "run.md").read_text("utf-8")
    named = {name for line in page.splitlines() if line.startswith("| `") for name in re.findall("`([^`]+)`", line)}
    assert COMMANDS.keys() <= named


def test_every_command_has_its_own_help(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0 and capsys.readouterr().out.startswith(f"usage: realsys {name}")


@pytest.mark.processes
def test_reader_that_ends_first_is_no_error():
    """As in `realsys list | head`."""
    script = "import sys; from realsys.launch.cli import main; sys.exit(main(['config', 'experiment=arith']))"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait(60) == 0 and "Broken pipe" not in errors and "Traceback" not in errors


def test_list_before_the_first_trial_says_how_to_make_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["list"]) == 0 and "no trials yet in runs: realsys run experiment=arith" in capsys.readouterr().out
    assert main(["list", "elsewhere"]) == 2 and "is not a directory" in capsys.readouterr().err
