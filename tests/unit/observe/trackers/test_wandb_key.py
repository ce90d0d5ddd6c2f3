"""The key of W&B: where it may be, and when none is needed. No library, no network."""

import os

import pytest

from realsys.observe.trackers.wandb import key_problem

OWN = "https://wandb.example:8080"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty home and working folder, in which W&B finds nothing."""
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_missing_key_names_the_remedies():
    problem = key_problem({"project": "sums", "mode": "online"})
    assert problem.startswith("W&B has no API key for api.wandb.ai: run `wandb login`")


@pytest.mark.parametrize("arguments", [{"mode": "offline"}, {"mode": "disabled"}, {"settings": {"mode": "offline"}}])
def test_mode_without_network_needs_no_key(arguments):
    assert key_problem(arguments) == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [("WANDB_MODE", "offline"), ("WANDB_API_KEY", "k" * 40), ("WANDB_IDENTITY_TOKEN_FILE", "/run/token")],
)
def test_environment_is_read(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert key_problem({}) == ""


def test_argument_precedes_the_environment(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert key_problem({"mode": "online"}) != ""


@pytest.mark.parametrize("host", ["api.wandb.ai", "api.forge.coreweave.com"])
def test_login_to_the_public_server_is_found(home, host):
    (home / ".netrc").write_text(f"machine {host}\n  login user\n  password {'k' * 40}\n")
    assert key_problem({}) == ""


def test_key_of_another_server_does_not_count(home, monkeypatch):
    (home / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    monkeypatch.setenv("WANDB_BASE_URL", OWN)
    assert "no API key for wandb.example:8080" in key_problem({})
    monkeypatch.setenv("NETRC", str(home / "other"))
    (home / "other").write_text("machine wandb.example:8080 login user password secret\n")
    assert key_problem({}) == ""


@pytest.mark.parametrize("content", ["machine", "\xff\x00", "machine api.wandb.ai login user\n"])
def test_netrc_without_a_key_is_no_key(home, content):
    (home / ".netrc").write_bytes(content.encode("latin-1"))
    assert key_problem({}) != ""


@pytest.mark.parametrize("setting", ["mode = offline", "api_key = 100%k"])
@pytest.mark.parametrize("folder", ["wandb", ".wandb", ".config/wandb"])
def test_settings_files_are_read(home, setting, folder):
    (home / folder).mkdir(parents=True)
    (home / folder / "settings").write_text(f"[default]\n{setting}\n")
    assert key_problem({}) == ""
