"""What every configuration section shares. No torch here, nor anywhere in this package."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Strict

Int = Annotated[int, Strict()]
Float = Annotated[float, Strict()]
Bool = Annotated[bool, Strict()]
"""Numbers and flags are taken as written: "8" is not 8, true is not 1 (an integer is a valid Float)."""


class Section(BaseModel):
    """A frozen table of a recipe. Unknown keys are errors, numbers are finite.

    Every field has a bound, a unit and, where 0 or None has a meaning, that meaning in its description; `--help` and the
    error messages show these descriptions.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, validate_default=False
    )

    def with_values(self, **values: Any) -> Any:
        """A validated copy with some fields changed (pydantic's own `model_copy` does not validate)."""
        explicit = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**explicit, **values})
