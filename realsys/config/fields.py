"""Types of fields with their bounds, and the base of all sections of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
OpenProbability = Annotated[float, Field(gt=0, le=1)]
Offload = Literal["none", "optimizer", "all"]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Section(BaseModel):
    """Base of all sections. Unknown keys, lossy conversions, NaN and infinity are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


_Section = TypeVar("_Section", bound=BaseModel)


def replaced(section: _Section, path: Sequence[str], value: Any) -> _Section:
    """Return a copy of a section in which the field at ``path`` has ``value``."""
    name, *rest = path
    return section.model_copy(update={name: replaced(getattr(section, name), rest, value) if rest else value})
