"""The settings in the commands of the pages can be read: ``realsys run``, ``submit``, ``sweep``; lists and quotes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from realsys.config.compose import compose
from realsys.launch.sweep.sweep_trials import sweep_trials

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: N is any number, and the experiments are files of the user, for which test_yaml_blocks.py is
_SETTING = re.compile(r"(?!experiment=(?:math7b|mine)$)[a-z][\w.]*=(?!N$).+", re.DOTALL)
#: a command in a block, with the lines that continue it
_WORDS = r"^ *(?:\S+ )*?\S*realsys (?:%s) (\S.*(?:(?<=\\)\n.*)*)"
_COMMAND, _SWEEP = (re.compile(_WORDS % names, re.MULTILINE) for names in ("run|submit", "sweep"))
#: a setting in the text that has brackets or quotes, so a mistake is easy
_IN_TEXT = re.compile(r"""`((?:["'][a-z][\w.]*=[^`]+)|(?:[a-z][\w.]*=[\[{][^`]*))`""")


def _blocks(text: str) -> str:
    fenced = re.findall(r"^```(?:bash)?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return "\n".join([*fenced, *re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)])


def _settings(words: str) -> list[str]:
    return [word for word in shlex.split(words, comments=True) if _SETTING.fullmatch(word)]


COMMANDS = {
    (page.name, settings)
    for page in PAGES
    for words in _COMMAND.findall(_blocks(page.read_text("utf-8"))) + _IN_TEXT.findall(page.read_text("utf-8"))
    if (settings := tuple(_settings(words)))
}


SWEEPS = sorted(
    (page.name, tuple(_settings(words))) for page in PAGES for words in _SWEEP.findall(_blocks(page.read_text("utf-8")))
)


def test_pages_have_commands() -> None:
    assert {"README.md", "cluster.md", "slurm.md", "ray.md", "launching.md"} <= {page for page, _ in COMMANDS}


@pytest.mark.parametrize(("page", "settings"), sorted(COMMANDS))
def test_settings_of_command_compose(page: str, settings: tuple[str, ...]) -> None:
    has_one = any(setting.startswith("experiment=") for setting in settings)
    compose([*settings, *([] if has_one else ["experiment=math"])])


@pytest.mark.parametrize(("page", "settings"), SWEEPS)
def test_trials_of_sweep_compose(page: str, settings: tuple[str, ...]) -> None:
    for trial in sweep_trials(settings, "s"):
        compose(trial.overrides)
