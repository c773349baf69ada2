"""A walk over a frozen lake: a small game with a state, played move by move. Only reaching the goal pays."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ..config.environments import FrozenLakeOptions
from ..types import Completion, Task
from .step import Observation, Step, StepEnvironment

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
_RULES = "P is you, G the goal, O a hole, . is ice. Reach G without falling into a hole. Moves: left, down, right, up."


class FrozenLake(StepEnvironment):
    """The lake follows from the task's id, and always has a way to the goal.

    A turn's move is its last word that names a move; a turn without a move stays in place. Metrics: {"exact_match"}
    (1.0 at the goal), "env/illegal" (turns without a move).
    """

    Options = FrozenLakeOptions

    def __init__(self, options: FrozenLakeOptions) -> None:
        super().__init__(options)
        self.options: FrozenLakeOptions = options

    async def reset(self, task: Task) -> Observation:
        self._random = random.Random()  # slips differ between the conversations of a group
        self._holes = make_lake(task.task_id, size=self.options.size, holes_frac=self.options.holes_frac)
        self._at, self._num_illegal = (0, 0), 0
        return f"{task.prompt}\n{_RULES}\n{self._picture()}"

    def state(self, observation: Observation) -> str:
        return self._picture()

    async def step(self, completion: Completion) -> Step:
        words = [w.strip(".,!:;*'\"<>()[]") for w in completion.text.lower().split()]
        move = next((w for w in reversed(words) if w in MOVES), None)
        if move is None:
            self._num_illegal += 1
        else:
            self._go(*MOVES[move])
        goal = (self.options.size - 1, self.options.size - 1)
        won = self._at == goal
        info = {"exact_match": float(won), "env/illegal": self._num_illegal}
        return self._picture(), float(won), won or self._at in self._holes, info

    def _go(self, down: int, right: int) -> None:
        if self._random.random() < self.options.slip:
            down, right = self._random.choice([(right, down), (-right, -down)])
        last = self.options.size - 1
        self._at = (min(max(self._at[0] + down, 0), last), min(max(self._at[1] + right, 0), last))

    def _picture(self) -> str:
        size = self.options.size
        signs = {(size - 1, size - 1): "G", **dict.fromkeys(self._holes, "O"), self._at: "P"}
        return "\n".join("".join(signs.get((row, column), ".") for column in range(size)) for row in range(size))


def make_lake(name: str, *, size: int, holes_frac: float) -> frozenset[tuple[int, int]]:
    """The holes (row, column) of the lake of this name: drawn anew until there is a way to the goal."""
    draw = random.Random(name)
    fields = [(r, c) for r in range(size) for c in range(size)][1:-1]
    for num_holes in range(round(holes_frac * len(fields)), -1, -1):
        for _ in range(20):
            holes = frozenset(draw.sample(fields, num_holes))
            if _has_a_way(holes, size):
                return holes
    raise AssertionError("a lake without holes has a way")


def lakes() -> Iterator[dict[str, str]]:
    """Endless tasks for this game (task.name=python, task.path=leeway.envs.frozen_lake:lakes)."""
    number = 0
    while True:
        yield {"question": f"Lake {number}.", "answer": ""}
        number += 1


def _has_a_way(holes: frozenset[tuple[int, int]], size: int) -> bool:
    seen, ahead = {(0, 0)}, [(0, 0)]
    while ahead:
        row, column = ahead.pop()
        for down, right in MOVES.values():
            field = (row + down, column + right)
            if field not in seen and field not in holes and min(field) >= 0 and max(field) < size:
                seen.add(field)
                ahead.append(field)
    return (size - 1, size - 1) in seen
