"""Commands of other languages: settings and what is missing on this machine."""

import pytest

from realsys.errors import ConfigError
from realsys.reward.sandbox.inside import confine
from realsys.reward.sandbox.settings import BUILTIN, NONE, IsolationSettings, Language, language_problem, languages_of

PASCAL = {"source": "main.pas", "compile": ["fpc", "main.pas"], "makes": "main", "run": ["./main"]}


def test_settings_add_and_replace_languages():
    languages = languages_of({"pascal": PASCAL, "bash": {"source": "a.sh", "run": ["sh", "a.sh"]}})
    assert languages["pascal"] == Language(**PASCAL)
    assert languages["bash"].run == ["sh", "a.sh"]
    assert languages["c"] == BUILTIN["c"]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"source": "../main.pas"}, "source is '../main.pas': it must be a file name without a folder"),
        ({"run": []}, "source and run must not be empty"),
        ({"makes": ""}, "compile needs makes"),
        ({"compile": "fpc main.pas"}, "Expected `array`"),
        ({"compiler": []}, "unknown field `compiler`"),
    ],
)
def test_bad_settings_are_named(changed, problem):
    with pytest.raises(ConfigError, match=r"languages\.pascal=.*: .*" + problem):
        languages_of({"pascal": PASCAL | changed})


def test_built_in_languages_have_no_problem():
    assert [name for name, language in BUILTIN.items() if language.problem()] == []


def test_missing_compiler_is_named():
    languages = languages_of({"pascal": PASCAL | {"compile": ["no-such-compiler", "main.pas"]}})
    assert "needs no-such-compiler, which is not found" in language_problem(languages, "pascal", IsolationSettings())


def test_command_that_programs_cannot_see_is_named(tmp_path, monkeypatch):
    """Programs have a /tmp of their own, and no home of the user."""
    tool = tmp_path / "pascal"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    languages = languages_of({"pascal": {"source": "main.pas", "run": [str(tool), "main.pas"]}})
    assert f"needs {tool}, which programs cannot see" in language_problem(languages, "pascal", IsolationSettings())
    assert language_problem(languages, "pascal", IsolationSettings(isolation=NONE)) is None
    monkeypatch.setattr(confine, "TMP", "/no/folder")
    assert language_problem(languages, "pascal", IsolationSettings(readable=(str(tmp_path),))) is None


def test_unknown_language_is_named():
    assert "set data.verifier_args.languages.cobol" in language_problem({}, "cobol", IsolationSettings())
