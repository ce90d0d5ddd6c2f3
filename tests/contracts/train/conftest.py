"""Models of the roles of PPO, and their folders. The fixtures import torch themselves: not every contract needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    """Models of the roles of PPO, by role."""
    import torch

    from tests.support.training.ppo_batch import make_models

    torch.set_num_threads(1)
    return make_models()


@pytest.fixture(scope="module")
def folders(models: dict[str, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """HF directories of ``models``."""
    from tests.support.training.ppo_batch import save_models

    return save_models(models, tmp_path_factory.mktemp("models"))
