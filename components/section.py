"""The base of every settings section: frozen, strict about keys, and clear about YAML's traps."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
)


class Refused(ValueError):
    """What a section refuses in its settings. `key` is the whole dotted one."""

    def __init__(self, key: str, *, got: object, expected: str, fix: str) -> None:
        self.key, self.got, self.expected, self.fix = key, got, expected, fix
        super().__init__(f"{key}: got {got!r}, expected {expected}; {fix}")


class Section(BaseModel):
    """A group of settings. Unknown keys are errors; every field carries a one-line description."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=False)

    @field_validator("*", mode="before")
    @classmethod
    def _booleans_are_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads a bare `off` as False, and pydantic reads True as the number 1. Neither is what the user meant."""
        if not isinstance(value, bool) or info.field_name not in cls.model_fields:
            return value
        kinds = leaf_types(cls.model_fields[info.field_name].annotation)
        if not value and "off" in kinds:
            return "off"
        if bool not in kinds and (int in kinds or float in kinds):
            raise ValueError("a number")
        return value


class Partial(Section):
    """Settings of which one part is set here; another section has the rest. Only what is set is written."""

    @model_serializer(mode="wrap")
    def _what_is_set(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if name in self.model_fields_set}


def leaf_types(annotation: Any) -> set[Any]:
    """The types and literal values that `annotation` allows, with unions and literals expanded."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    if get_origin(annotation) is Annotated:
        return leaf_types(get_args(annotation)[0])
    if get_origin(annotation) in (dict, list, tuple):
        return {get_origin(annotation)}
    arguments = get_args(annotation)
    if not arguments:
        return {annotation}
    return set().union(*(leaf_types(a) for a in arguments))


def sections_in(annotation: Any) -> list[type[Section]]:
    """The section classes inside an annotation such as `ModelInit | None`: several, in order, where a name chooses."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    if get_origin(annotation) in (dict, list, tuple, Literal):
        return []
    return [section for inner in get_args(annotation) for section in sections_in(inner)]
