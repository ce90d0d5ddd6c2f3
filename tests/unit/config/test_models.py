"""The model that a memory prediction counts is the one that is made or read."""

from __future__ import annotations

from pathlib import Path

import pytest

from realsys.config.schema import Config
from realsys.config.trial_sizes import model_of
from realsys.data.arith import make_tiny_model
from realsys.model_files.config_json import read_model


@pytest.mark.parametrize("chat", [False, True])
def test_tiny_model_is_counted_as_written(chat: bool, tmp_path: Path) -> None:
    config = Config.model_validate({"model": {"tiny": {"chat": chat}}})
    make_tiny_model(config.model.tiny, tmp_path, seed=0)
    written, counted = read_model(tmp_path), model_of(config)
    assert (counted.vocab, counted.parameters) == (written.vocab, written.parameters)
