"""The objects of the simulation: groups, collectors, the random draws for each group, and what is recorded."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .engine_model import SimulatedEngine
from .model import Calibration

_BLOCK = 512
"""Groups whose lengths are drawn at a time."""


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    group_id: int
    min_policy_version: int
    collector: SimulatedCollector
    tokens: float = 0.0
    newest: int = 0
    open_chunks: int = 0
    environment_s: float = 0.0
    versions: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class SimulatedCollector:
    """One engine, with the state of its collector and its weight sync."""

    engine: SimulatedEngine
    in_flight: int = 0
    in_engine: int = 0  # of those, groups with sequences still being sampled
    loaded: int = 0
    verified: int = 0
    wanted: int = 0
    pulling: int | None = None  # the version that is being pulled
    draining: bool = False  # running sequences finish before the pause
    waiting: list[SimulatedGroup] = field(default_factory=list)  # for newer weights
    withheld: list[SimulatedGroup] = field(default_factory=list)
    generating_s: float = 0.0
    changed_at: float = 0.0


class PacedWork:
    """Work of `left_s` seconds at full pace; the pace may change while it runs."""

    __slots__ = ("_left_s", "_paced_at", "_rate", "began_at", "epoch")

    def __init__(self, left_s: float, now: float) -> None:
        self._left_s = left_s
        self._rate = 0.0
        self._paced_at = self.began_at = now
        self.epoch = 0

    def at_rate(self, rate: float, now: float) -> float | None:
        """When it will end at this rate; None if the rate does not change."""
        if rate == self._rate:
            return None
        self._left_s -= (now - self._paced_at) * self._rate
        self._rate, self._paced_at = rate, now
        self.epoch += 1
        return now + self._left_s / rate


@dataclass
class SimulatedRun:
    """What was recorded, from `started_at` on; in seconds."""

    steps: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    lag_tokens: dict[int, float] = field(default_factory=dict)
    started_at: float = 0.0
    ended_at: float = 0.0
    first_step: int = 0
    train_s: float = 0.0
    engine_busy_s: float = 0.0
    generating_s: float = 0.0
    num_events: int = 0
    num_groups: int = 0


class Draws:
    """The lengths of every group, and how long each step's training takes. Both depend on group and step number only.

    So two simulations with different settings see the same groups. A group is split into chunks of `sizes` sequences
    that count as equally long, from shortest to longest. The longest sequence is alone, and its length is exact.
    """

    def __init__(self, calibration: Calibration, group_size: int, num_chunks: int, seed: int) -> None:
        self._calibration = calibration
        self._group_size = group_size
        self._seed = seed
        self.sizes = _sizes(group_size, num_chunks)
        self._lengths: list[list[float]] = []
        self._environment_s: list[float] = []

    def of(self, group_id: int) -> tuple[list[float], float]:
        """(mean length of each chunk in tokens, seconds in the environment)."""
        while group_id >= len(self._lengths):
            self._draw_block(len(self._lengths) // _BLOCK)
        return self._lengths[group_id], self._environment_s[group_id]

    def train_factors(self, num_steps: int) -> list[float]:
        rng = np.random.default_rng((self._seed, 1))
        return rng.choice(np.asarray(self._calibration.train_factors), size=num_steps + 1).tolist()

    def _draw_block(self, block: int) -> None:
        rng = np.random.default_rng((self._seed, 2, block))
        drawn = np.sort(self._calibration.lengths.draw_groups(rng, _BLOCK, self._group_size), axis=1)
        starts = np.cumsum([0, *self.sizes[:-1]])
        self._lengths.extend((np.add.reduceat(drawn, starts, axis=1) / np.asarray(self.sizes)).tolist())
        outside = self._calibration.environment_s
        if outside is None:
            self._environment_s.extend([0.0] * _BLOCK)
        else:
            rng = np.random.default_rng((self._seed, 3, block))
            self._environment_s.extend(outside.draw_groups(rng, _BLOCK, 1)[:, 0].tolist())


def _sizes(group_size: int, num_chunks: int) -> list[int]:
    """Sizes of a group's chunks from its shortest to its longest sequences; the longest one is alone."""
    others = min(num_chunks, group_size) - 1
    if others <= 0:
        return [group_size]
    rest = group_size - 1
    return [rest // others + (i < rest % others) for i in range(others)] + [1]
