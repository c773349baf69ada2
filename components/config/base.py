"""The base of every settings section: frozen, strict about keys, and clear about YAML's traps."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, NonNegativeFloat, ValidationInfo, field_validator

LEAST_TEMPERATURE = 0.01
"""vLLM raises a temperature between 0 and this value to this value, and so samples from a different distribution."""
HIGHEST_TEMPERATURE = 2.0
"""vLLM refuses a request above it."""


class Section(BaseModel):
    """A group of settings. Unknown keys are errors; every field carries a one-line description."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=False)

    @field_validator("*", mode="before")
    @classmethod
    def _booleans_are_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads a bare `off` as False, and pydantic reads True as the number 1. Neither is what the user meant."""
        if not isinstance(value, bool):
            return value
        kinds = leaf_types(cls.model_fields[info.field_name or ""].annotation)
        if not value and "off" in kinds:
            return "off"
        if bool not in kinds and (int in kinds or float in kinds):
            raise ValueError("a number")
        return value


def _is_sampled_as_it_says(value: float) -> float:
    if 0 < value < LEAST_TEMPERATURE:
        raise ValueError(f"0 (greedy) or at least {LEAST_TEMPERATURE}, which is vLLM's lowest")
    if value > HIGHEST_TEMPERATURE:
        raise ValueError(f"at most {HIGHEST_TEMPERATURE:g}, which is vLLM's highest")
    return value


Temperature = Annotated[NonNegativeFloat, AfterValidator(_is_sampled_as_it_says)]
"""A sampling temperature that may be 0: greedy."""


def leaf_types(annotation: Any) -> set[Any]:
    """The types and literal values that `annotation` allows, with unions and literals expanded."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    if get_origin(annotation) in (dict, list, tuple):
        return {get_origin(annotation)}
    arguments = get_args(annotation)
    if not arguments:
        return {annotation}
    return set().union(*(leaf_types(a) for a in arguments))
