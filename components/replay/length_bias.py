"""Length bias: whether what is trained on is as long as what was generated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..group import Group


class LengthBiasMeter:
    """Response lengths of all generated groups, and of those that were trained on.

    A system that drops late samples trains on shorter ones than it generates, and the reward does not show it. Here the
    two differ only by the groups that wait in the buffer, and by what filters remove on purpose.
    """

    def __init__(self) -> None:
        self._generated: Counter[int] = Counter()
        self._trained: Counter[int] = Counter()

    def generated(self, group: Group) -> None:
        self._generated.update(group.lengths)

    def trained(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self._trained.update(group.lengths)

    def state_dict(self) -> dict[str, Any]:
        """All of it as JSON-able data."""
        return {"generated": list(self._generated.items()), "trained": list(self._trained.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generated, self._trained = Counter(dict(state["generated"])), Counter(dict(state["trained"]))

    def metrics(self) -> dict[str, float]:
        """Mean trained minus mean generated in tokens, and the largest difference of the two distributions' shares.

        The latter is the Kolmogorov-Smirnov distance. Empty before anything was trained.
        """
        num_generated, num_trained = self._generated.total(), self._trained.total()
        if not num_trained:
            return {}
        share, distance = 0.0, 0.0
        for length in sorted(self._generated):
            share += self._trained[length] / num_trained - self._generated[length] / num_generated
            distance = max(distance, abs(share))
        return {
            "replay/length_bias/mean_tokens": _mean(self._trained) - _mean(self._generated),
            "replay/length_bias/distance": distance,
        }


def _mean(lengths: Counter[int]) -> float:
    return sum(length * count for length, count in lengths.items()) / lengths.total()
