"""Whether engines are to have their cores for themselves: the first steps of a stage tell."""

from __future__ import annotations

from collections.abc import Mapping

from ..runtime.launch import Parts

STEPS_TO_PLACE_BY = 4
"""Single ones vary: groups without an advantage are not trained on."""


class EnginesAlone:
    """Where the first steps take the trainer half of an engine's time or less, its cores have room: what is neither
    engine nor a trainer's computing moves there. Where it is the slower side, uploads and fetches would wait for its
    passes instead.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._steps = 0
        self._train_s = self._generate_s = 0.0

    def step(self, metrics: Mapping[str, float]) -> None:
        """An optimizer step's `limit/train_s` and `limit/generate_s`, in seconds."""
        if self._steps == STEPS_TO_PLACE_BY:
            return
        self._steps += 1
        self._train_s += metrics["limit/train_s"]
        self._generate_s += metrics["limit/generate_s"]
        if self._steps < STEPS_TO_PLACE_BY or self._train_s > self._generate_s / 2:
            return
        ranks = range(len(self._parts.trainers))
        self._parts.places.leave_engines_alone([self._parts.processes[f"trainer-{rank}"] for rank in ranks])
