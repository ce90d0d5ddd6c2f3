"""The commands of the pages: their settings can be read, and a shell takes no word for a pattern of file names."""

import re
import shlex
from pathlib import Path

import pytest

from realsys.config.compose import compose
from realsys.lab.sweep import sweep_trials

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs" / "examples" / "tutorial"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: N is any number, and the experiments are files of the user, for which test_yaml_blocks.py is
_SETTING = re.compile(r"(?!experiment=(?:math7b|mine)$)[a-z][\w.]*=(?!N$).+", re.DOTALL)
#: a command in a block, with the lines that continue it
_WORDS = r"^ *(?:\S+ )*?\S*realsys (?:%s) (\S.*(?:(?<=\\)\n.*)*)"
_COMMAND, _SWEEP = (re.compile(_WORDS % names, re.MULTILINE) for names in ("run|submit", "sweep"))
#: a setting in the text that has brackets or quotes, so a mistake is easy
_IN_TEXT = re.compile(r"""`((?:["'][a-z][\w.]*=[^`]+)|(?:[a-z][\w.]*=[\[{][^`]*))`""")
#: files with commands and settings for a shell, in comments and messages, too
_TEXTS = [*PAGES, *(path for name in ("docs/examples", "realsys", "launch") for path in (ROOT / name).rglob("*.py"))]
#: any command in a block
_SHELL = re.compile(r"^ *((?:\S+ )*?(?:\S*/)?(?:realsys|make|pip|python\S*) \S.*(?:(?<=\\)\n.*)*)", re.MULTILINE)
_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|(?:^|\s)#.*""", re.DOTALL)
#: a word that zsh takes for a pattern, and refuses if no file fits. `[--steps N]` is none: it marks optional words
_PATTERN = re.compile(r"[^\s\[]\S*\[|\S*=\S*[?*~]")
#: a list for a field without a quote before it
_BARE_LIST = re.compile(r"""(?<!['"\w.])[a-z]\w*(?:\.\w+)+=\[\S*""")


def _blocks(text):
    fenced = re.findall(r"^```(?:bash)?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return "\n".join([*fenced, *re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)])


def _settings(words):
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


def test_pages_have_commands():
    assert {"README.md", "cluster.md"} <= {page for page, _ in COMMANDS}


@pytest.mark.parametrize(("page", "settings"), sorted(COMMANDS))
def test_settings_of_command_compose(page, settings):
    has_one = any(setting.startswith("experiment=") for setting in settings)
    compose([*settings, *([] if has_one else ["experiment=math"])], config_dir=TUTORIAL)


@pytest.mark.parametrize(("page", "settings"), SWEEPS)
def test_trials_of_sweep_compose(page, settings):
    for trial in sweep_trials(settings, "s"):
        compose(trial.overrides)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shell_finds_no_pattern_in_commands(page):
    commands = _SHELL.findall(_blocks(page.read_text("utf-8")))
    assert [command for command in commands if _PATTERN.search(_QUOTED.sub(" ", command))] == []


def test_lists_are_shown_with_quotes():
    bare = {str(path.relative_to(ROOT)): _BARE_LIST.findall(path.read_text("utf-8")) for path in _TEXTS}
    assert {name: found for name, found in bare.items() if found} == {}
