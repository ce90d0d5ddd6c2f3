"""Checks the data before any process is started."""

from __future__ import annotations

from typing import NamedTuple

from realsys.config.evaluation_sets import sources_of_sets
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.trial_sizes import longest_sequence
from realsys.data.conversion.sources_file import dropped_lines
from realsys.data.dataset_files import dataset_files, is_converted
from realsys.data.demos import DemoDataset
from realsys.data.prompts import PromptDataset
from realsys.data.tokenizer import TextTokenizer

_SHOWN = 10
MARKED = "the chat template writes it again: give the text alone, or set data.chat_template=false"


class DataCheck(NamedTuple):
    """Result of reading the data of a trial.

    sizes     number of prompts per split, and of demonstrations
    warnings  one line each
    digest    of the prompts to train on, in order
    """

    sizes: dict[str, int]
    warnings: list[str]
    digest: str


def check_data(config: Config, paths: TrialPaths, tokenizer: TextTokenizer) -> DataCheck:
    """Read and tokenise every line that the trial will use.

    Raises DataError naming file and line. Takes about 50 microseconds for a short line.
    """
    prompts = PromptDataset(config, paths, tokenizer)
    checked = prompts.check()
    warnings = _warnings(checked.unknown, prompts.size("train"), config)
    if checked.marked:
        warnings.append(f"{checked.marked} is in the prompt, and {MARKED}")
    if prompts.leaked:
        where = "in data.eval or in a set of evaluations" if sources_of_sets(config) else "in data.eval"
        warnings.append(f"left out {prompts.leaked} rows of data.train: their prompts are {where}")
    if is_converted(paths):
        warnings += dropped_lines(paths)
    sizes = prompts.sizes()
    demos = dataset_files(config, paths).demos
    if config.warmup.steps and demos is not None:
        dataset = DemoDataset(demos, tokenizer, chat_template=config.data.chat_template)
        completion = config.generation.sampling.max_new_tokens
        dataset.check(longest_sequence(config) - completion, completion)
        sizes["demos"] = len(dataset)
    return DataCheck(sizes, warnings, checked.digest)


def _warnings(unknown: list[str], prompts: int, config: Config) -> list[str]:
    warnings = []
    if unknown:
        shown = " ".join(unknown[:_SHOWN]) + (" ..." if len(unknown) > _SHOWN else "")
        warnings.append(
            f"the tokenizer does not know {len(unknown)} characters of the prompts, and loses them: {shown}"
        )
    if prompts < (batch := config.train.batch_groups) and not config.evaluate_only:
        problem = f"there are fewer train prompts ({prompts}) than train.batch_groups ({batch})"
        warnings.append(f"{problem}: a batch has some of them more than once")
    return warnings
