"""Data-Juicer's filters on experiences: the text is the answer, and what does not pass is not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ..group import Group
from ..tasks.data_juicer import DataJuicer, checked

KEY = "replay.operators: data_juicer"
FILTERS = ("Filter",)


class DataJuicerFilters:
    """`process`: Data-Juicer's filters, a list of {name: {option: value}}; an answer has to pass all of them.

    `action`: what becomes of the others. mask: they are not trained on, and their rewards stay in the group's baseline.
    drop: the whole group is left out. A group of which no answer passes is left out in any case. Mappers are refused:
    tokens that are trained on are those that the policy wrote.
    """

    def __init__(self, *, process: Sequence[Any], action: Literal["mask", "drop"] = "mask") -> None:
        self._action = action
        self._filters = DataJuicer(process, key=KEY, kinds=FILTERS)

    @classmethod
    def check(cls, *, process: Sequence[Any], action: str = "mask") -> None:
        """As far as can be told without the models that some filters load. Raises ValueError in one line."""
        if action not in ("mask", "drop"):
            raise ValueError(f"{KEY}.action: got {action!r}, expected mask or drop")
        checked(process, KEY, FILTERS)

    def __call__(self, group: Group) -> Group | str | None:
        passed = self._filters.kept(group.texts)
        if all(passed):
            return None
        if self._action == "drop" or not any(passed):
            return "an answer does not pass Data-Juicer's filters"
        return group.masked([not passes for passes in passed])
