"""Number of held-out problems, before the trial exists."""

from __future__ import annotations

from itertools import islice

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.data.conversion.convert import checked_rows, needs_copy, sources_of
from realsys.data.dataset_files import is_converted
from realsys.data.prompts import held_out_size, side_of


def count_held_out(config: Config, paths: TrialPaths, most: int) -> int:
    """Count the held-out problems; data that must be converted is read until there are ``most``.

    Long prompts that a conversion leaves out are counted. Raises DataError.
    """
    if is_converted(paths) or not needs_copy(config.data):
        return held_out_size(config, paths)
    rows = (row for source in sources_of(config.data, "eval") for _, row in checked_rows(source, "eval"))
    if not config.data.eval:
        train = (row for source in sources_of(config.data, "train") for _, row in checked_rows(source, "train"))
        rows = (row for row in train if side_of(row.prompt, config.data.eval_fraction) == "eval")
    return sum(1 for _ in islice(rows, most))
