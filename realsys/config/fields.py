"""Types of fields with their bounds, and the base of all sections of the configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

log = logging.getLogger(__name__)

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
OpenProbability = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a running mean, which would never change with a decay of 1
#: bounds that no run needs to exceed: a typo in an exponent is refused before the start
LearningRate = Annotated[float, Field(gt=0, le=1)]
SmallFloat = Annotated[float, Field(ge=0, le=10)]
Temperature = Annotated[float, Field(ge=1e-6, le=10)]
Offload = Literal["none", "optimizer", "all"]


#: fields of earlier builds -> their name now. An override with the old name is refused; a stored trial is read.
RENAMED: Mapping[str, str] = {"asynchronous.max_head_offpolicyness": "asynchronous.max_staleness"}
#: fields of earlier builds that are constants now, in the module of the part that uses them
CONSTANT: Mapping[str, object] = {
    "cluster.stop_progress_s": 20.0,
    "evaluation.hold_share": 0.25,
    "manager.blame_reporters": 2,
    "manager.blame_window_s": 30.0,
    "manager.blame_wrong_reports": 3,
    "rollout.reward.service_items": 4096,
    "telemetry.span_mib": 32,
}


def with_present_names(tree: object) -> object:
    """Return the values of a stored configuration without fields of earlier builds. Changes ``tree``.

    A value that was set, and that this build would not use, is named in a warning.
    """
    for field in (*RENAMED, *CONSTANT):
        *sections, name = field.split(".")
        place = tree
        for section in sections:
            place = place.get(section) if isinstance(place, dict) else None
        if isinstance(place, dict) and name in place:
            value = place.pop(name)
            if field in RENAMED:
                place.setdefault(RENAMED[field].rpartition(".")[2], value)
            elif value != CONSTANT[field]:
                log.warning("config.json: %s=%r has no effect: it is always %r now", field, value, CONSTANT[field])
    return tree


#: regular expression of a field -> what its text must be, for the error
PATTERNS: dict[str, str] = {}


def pattern(expression: str, rule: str) -> Any:
    """Return the bounds of a text that matches ``expression``; else the error says "must be" and ``rule``."""
    PATTERNS[expression] = rule
    return Field(pattern=expression)


Name = Annotated[
    str,
    pattern(
        r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        "1 to 64 letters, digits, '.', '_' or '-', and begin with a letter or digit",
    ),
]


class Section(BaseModel):
    """Base of all sections. Unknown keys, lossy conversions, NaN and infinity are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


_Section = TypeVar("_Section", bound=BaseModel)


def replaced(section: _Section, path: Sequence[str], value: Any) -> _Section:
    """Return a copy of a section in which the field at ``path`` has ``value``."""
    name, *rest = path
    return section.model_copy(update={name: replaced(getattr(section, name), rest, value) if rest else value})
