"""Variants of a configuration that the planner predicts: splits, batch sizes, bounds on staleness, lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from realsys.config.allocation import parse_allocation
from realsys.config.compose import with_overrides
from realsys.config.fields import replaced
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.planner.splits import devices_of, splits

_LIMIT = ("generation", "sampling", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class Variant:
    """A configuration to predict. ``scale``: lengths of the completions over those of the recorded run."""

    label: str
    config: Config
    scale: float = 1.0


def split_variants(config: Config, devices: int, cores: float) -> list[Variant]:
    """Return the splits of the devices, the configuration's own first.

    With shared ``cores`` there may be a process more. Raises ConfigError if the devices are too few for every split.
    """
    found = splits(config, devices)
    if cores:
        found += [split for split in splits(config, devices + 1) if split not in found]
    own = Variant(f"allocation={config.allocation}", config)
    others = [Variant(f"allocation={split}", replaced(config, ["allocation"], split)) for split in found]
    same = _plain(config.allocation)
    variants = [own, *(other for other in others if _plain(other.config.allocation) != same)]
    if not cores and min(devices_of(variant.config) for variant in variants) > devices:
        problem = f"is too few for servers and ranks of the sizes in {config.allocation}: give more"
        raise ConfigError("--devices", devices, problem)
    return variants


def _plain(allocation: str) -> str:
    return str(parse_allocation(allocation))


def what_ifs(config: Config) -> list[Variant]:
    """Return neighbours of a configuration: half and twice the batch, other bounds on staleness, other lengths."""
    batch, eta = config.train.batch_groups, config.asynchronous.max_head_offpolicyness
    found = [_changed(config, f"train.batch_groups={size}") for size in (batch // 2, 2 * batch) if size]
    found += [
        _changed(config, f"asynchronous.max_head_offpolicyness={bound}")
        for bound in sorted({0, 1, max(2, eta // 2), 2 * eta} - {eta})
    ]
    return found + [scaled(config, factor) for factor in (0.5, 2.0)]


def scaled(config: Config, factor: float) -> Variant:
    """Return the configuration with completions ``factor`` times as long, and the limit on their length as well."""
    limit = max(1, round(factor * config.generation.sampling.max_new_tokens))
    return Variant(f"lengths x {factor:g}", replaced(config, _LIMIT, limit), factor)


def given(config: Config, texts: Sequence[str]) -> list[Variant]:
    """Return a variant for each text of overrides with spaces between them. Raises ConfigError."""
    return [Variant(text, with_overrides(config, text.split())) for text in texts]


def _changed(config: Config, override: str) -> Variant:
    return Variant(override, with_overrides(config, [override]))
