"""Demonstrations for the supervised warm-up, tokenised on request and stored as samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.data.dataset_files import dataset_files
from realsys.data.demos import DemoDataset
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import ConfigError
from realsys.train.data_manager import DataManager
from realsys.types import SampleMeta


class Demonstrations(Protocol):
    def sequence(self, index: int) -> tuple[list[int], list[int]]: ...


class DemoSource:
    """Source of demonstrations.

    It opens the file at the first request, because only DP heads receive one.
    """

    def __init__(self, config: Config, paths: TrialPaths, data: DataManager, worker: int = 0) -> None:
        self._config = config
        self._paths = paths
        self._data = data
        self._worker = worker
        self._dataset: Demonstrations | None = None
        self._loaded = 0

    def load(self, indices: Sequence[int]) -> list[SampleMeta]:
        """Store these demonstrations and return their metadata.

        Each load of an index makes a new sample.
        """
        if self._dataset is None:
            self._dataset = open_demonstrations(self._config, self._paths)
        metas = []
        for index in indices:
            sample_id = f"demo/{self._worker}/{self._loaded}/{index}"
            self._loaded += 1
            metas.append(self._data.add_sequence(sample_id, *self._dataset.sequence(index)))
        return metas


def open_demonstrations(config: Config, paths: TrialPaths) -> Demonstrations:
    """Open the trial's demonstrations with the model's tokenizer.

    Raises ConfigError if no file is configured.
    """
    model = paths.base_model(config)
    file = dataset_files(config, paths).demos
    if file is None:
        raise ConfigError(
            "data.demos", config.data.demos, "is needed by the warm-up: name a file, or set warmup.steps=0"
        )
    return DemoDataset(file, TextTokenizer(model), chat_template=config.data.chat_template)
