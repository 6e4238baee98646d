"""The base of every configuration section: unknown keys are errors, docstrings under fields are the documentation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]
"""What the generators of torch and numpy take."""
Fraction = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """A group of keys. Values are immutable once validated; a changed config is a new config."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
