"""What every section of the configuration is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A section of the configuration: frozen, strict about names."""

    model_config = ConfigDict(extra="forbid", frozen=True)
