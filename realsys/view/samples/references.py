"""Reference answers of the prompts of a trial, from its data set as it is on disk now."""

from __future__ import annotations

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.data.prompts import PromptDataset
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import RealsysError


class References:
    """Data set of one configuration. It is opened for the first reference, which reads all of its lines once."""

    def __init__(self, config: Config, paths: TrialPaths, tokenizer: TextTokenizer) -> None:
        self._config = config
        self._paths = paths
        self._tokenizer = tokenizer
        self._prompts: PromptDataset | None = None
        self._problem = ""

    def find(self, split: str, index: int) -> tuple[str | None, str]:
        """Return the reference answer, or None and the reason. A data set that cannot be opened is tried once."""
        if self._prompts is None and not self._problem:
            try:
                self._prompts = PromptDataset(self._config, self._paths, self._tokenizer)
            except (RealsysError, OSError) as error:
                self._problem = str(error)
        if self._prompts is None:
            return None, self._problem
        try:
            return self._prompts.prompt(split, index).answer, ""
        except (RealsysError, OSError, LookupError) as error:
            return None, str(error)
