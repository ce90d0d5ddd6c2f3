"""serve.json and the file of keys: what is read, and what is refused in one line."""

from pathlib import Path

import msgspec
import pytest

from realsys.errors import ConfigError
from realsys.serve.settings import Owner, ServeSettings, new_key, read_owners, read_settings

KEY = "tml-0123456789abcdef"
WRONG = [
    ("", "must have an entry for each owner"),
    ("[a]", "must have an entry for each owner"),
    ("{}", "length >= 1"),
    ("a: b: c", "mapping values"),
    ("a: {models: 2}", "missing required field `key`"),
    (f"a: {{key: {KEY}, model: 2}}", "unknown field `model`"),
    (f"a: {{key: {KEY}, models: 0}}", "$[...].models"),
    (f"a/b: {{key: {KEY}}}", "matching regex"),
    ("a: {key: tml-short}", "length >= 20"),
    ("a: {key: 0123456789abcdef01234567}", "matching regex '^tml-"),
    (f"a: {{key: {KEY}}}\na: {{key: {KEY}x}}", "a is there twice"),
    (f"a: {{key: {KEY}}}\nb: {{key: {KEY}}}", "a and b have the same key"),
]


@pytest.mark.parametrize(("text", "problem"), WRONG)
def test_wrong_file_of_keys_is_one_line(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_owners(path)
    assert problem in str(error.value) and "\n" not in str(error.value) and error.value.field == "--keys"


def test_missing_file_of_keys_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_owners(tmp_path / "keys.yaml")


def test_owners_have_their_limits(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"a: {{key: {KEY}, models: 9}}\nb: {{key: {KEY}2}}\n")
    assert read_owners(path) == {"a": Owner(KEY, models=9), "b": Owner(f"{KEY}2")}


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    settings = ServeSettings(8123, "Qwen/Qwen3-8B", {"me": Owner(new_key())})
    (tmp_path / "serve.json").write_bytes(msgspec.json.encode(settings))
    assert read_settings(tmp_path / "serve.json") == settings


@pytest.mark.parametrize(
    "text", ["", "{", '{"port": 0, "model_name": "a", "owners": {}}', '{"port": 1, "model_name": "a", "own": {}}']
)
def test_damaged_settings_are_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "serve.json").write_text(text)
    with pytest.raises(ConfigError, match=r"serve\.json.* cannot be read"):
        read_settings(tmp_path / "serve.json")


def test_trial_without_settings_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="begun with realsys serve"):
        read_settings(tmp_path / "serve.json")
