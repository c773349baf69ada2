"""What an exchangeable part of an objective is: an advantage, a loss, a correction, an estimator of a KL.

Each is one class: its fields are its options, its class variables say what it needs, its methods are the formula. The
settings choose it by `name`: a built-in one, or your own class as "pkg.mod:Name".

    class Halved(GroupAdvantage):
        factor: float = 0.5

        def of_group(self, rewards):
            return self.factor * (rewards - rewards.mean())

    algorithm.advantage.name=my_module:Halved algorithm.advantage.factor=0.25
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationError

from ..importing import import_user_object
from ..lazy import torch
from ..section import Section


class Piece(Section):
    """`kind` is the word for it in messages, and `key` the setting that chooses it."""

    kind: ClassVar[str] = "piece"
    key: ClassVar[str] = ""

    name: str = Field(default="", description="which one: see docs/algorithms.md, or your own class as pkg.mod:Name")

    @property
    def is_users(self) -> bool:
        return ":" in self.name

    def checked(self, result: Any, *, like: torch.Tensor) -> Any:
        """The result of a user's own piece, refused where it is no finite tensor of the shape of `like`."""
        if not self.is_users:
            return result
        who, expected = f"{self.kind} {self.name}", f"expected a finite tensor of shape {list(like.shape)}"
        if not isinstance(result, torch.Tensor):
            raise ValueError(f"{who} returned a {type(result).__name__}; {expected}")
        if result.shape != like.shape:
            raise ValueError(f"{who} returned shape {list(result.shape)}; {expected}")
        if not bool(torch.isfinite(result).all()):
            raise ValueError(f"{who} returned nan or inf at {int((~torch.isfinite(result)).sum())} places; {expected}")
        return result


class Own(Section):
    """A piece of the user's, named and not yet imported; all other keys are options that its class takes."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(description="your class as pkg.mod:Name")

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


P = TypeVar("P", bound=Piece)


def registry(*classes: type[P]) -> dict[str, type[P]]:
    """Name -> class, of the built-in pieces of one kind."""
    return {cls.model_fields["name"].default: cls for cls in classes}


def one_of(known: Mapping[str, type[P]], default: str) -> Any:
    """The type of a setting that holds a piece: one of `known` by its `name`, or a user's own."""

    def tag(value: Any) -> str:
        name = value.get("name", default) if isinstance(value, dict) else getattr(value, "name", "")
        return "own" if isinstance(value, Own) or (isinstance(name, str) and ":" in name) else str(name)

    union: Any = Annotated[Own, Tag("own")]
    for name, cls in reversed(list(known.items())):
        union = Annotated[cls, Tag(name)] | union
    return Annotated[union, Discriminator(tag)]


def made(chosen: P | Own, base: type[P]) -> P:
    """The piece itself: a user's own is imported. Raises ValueError in one line."""
    if not isinstance(chosen, Own):
        return chosen
    key, expected = f"{base.key}.name", f"a class derived from leeway.{base.__name__}"
    found = import_user_object(chosen.name, key=key, expected=expected)
    if not (isinstance(found, type) and issubclass(found, base)):
        what = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise ValueError(f"{key}: {chosen.name} is {what}; expected {expected}")
    try:
        return found.model_validate({"name": chosen.name, **chosen.options})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = ".".join(str(part) for part in first["loc"])
        options = ", ".join(n for n in found.model_fields if n != "name") or "no options"
        raise ValueError(f"{base.key}.{option}: {first['msg'].lower()}; {chosen.name} takes {options}") from None


def tried(piece: Piece, call: Callable[[], Any]) -> Any:
    """The result of `call` on a small example; whatever goes wrong in it is a ValueError that names the piece."""
    who = f"{piece.kind} {piece.name}"
    try:
        return call()
    except ValueError as error:
        raise error if str(error).startswith(who) else ValueError(f"{who} failed on a small example: {error}") from None
    except Exception as error:
        raise ValueError(f"{who} failed on a small example: {type(error).__name__}: {error}") from error


Preset = dict[str, dict[str, Any]]
"""Settings by section."""


def preset(advantage: str, loss: str | dict[str, Any], aggregation: str, **others: Any) -> Preset:
    """What an `algorithm.name` picks for settings of `algorithm` that are left out."""
    chosen = {"name": loss} if isinstance(loss, str) else loss
    return {"algorithm": {"advantage": {"name": advantage}, "loss": chosen, "aggregation": aggregation, **others}}
