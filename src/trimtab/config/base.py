"""The base of every configuration section: unknown keys are errors, docstrings under fields are the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

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

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """The same section with other values, by key, such as `rollout.kv_memory`. They are validated like all values."""
        mine, inner = dict(self), dict[str, dict[str, Any]]()
        for key, value in values.items():
            name, _, rest = key.partition(".")
            if rest:
                inner.setdefault(name, {})[rest] = value
            else:
                mine[name] = value
        for name, below in inner.items():
            mine[name] = mine[name].with_values(below)
        return type(self).model_validate(mine)
