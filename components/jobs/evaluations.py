"""Held-out tasks that explorers answer for the train job, all under the version of the policy that it names.

    RLRun.evaluate --> ask(tasks) ---> open tasks --- take ----> [explorer] its engines, at that version
                          ^                ^------- give_back ------- | it is gone, or cannot
                          +--- answers ---------------- answer -------+

Nothing of it is a group: it takes no slot, the lag bound does not count it, and it is not trained on. The trainer
stands still meanwhile, so that the version stays the newest.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ..config.inputs import EvalSampling
from ..types import Evaluated, Task

MOST_BYTES = 4 << 20
"""Of the tasks that are handed out at once."""
MOST_METRICS, MOST_NAME, MOST_REASON = 100, 200, 300


class Evaluations:
    """One after the other. A holder is an explorer's session."""

    def __init__(self) -> None:
        self._number = 0
        self._policy_version = -1
        self._sampling = EvalSampling()
        self._tasks: Sequence[Task] = ()
        self._free: deque[int] = deque()
        self._held: dict[int, str] = {}
        self._answers: dict[int, list[Evaluated] | str] = {}
        self._changed = asyncio.Condition()

    @property
    def is_under_way(self) -> bool:
        return len(self._answers) < len(self._tasks)

    @property
    def num_answered(self) -> int:
        return len(self._answers)

    def num_held(self, holder: str) -> int:
        return sum(own == holder for own in self._held.values())

    async def ask(
        self, tasks: Sequence[Task], sampling: EvalSampling, *, policy_version: int
    ) -> list[list[Evaluated] | str]:
        """The answers to each task, or why it failed for good. The deadline is the caller's."""
        async with self._changed:
            self._number += 1
            self._tasks, self._sampling, self._policy_version = tasks, sampling, policy_version
            self._free, self._held, self._answers = deque(range(len(tasks))), {}, {}
            self._changed.notify_all()
            try:
                await self._changed.wait_for(lambda: not self.is_under_way)
                return [self._answers[index] for index in range(len(tasks))]
            finally:
                self._tasks, self._free, self._held, self._answers = (), deque(), {}, {}

    async def take(
        self, holder: str, *, num_holders: Callable[[], int], is_here: Callable[[], bool]
    ) -> dict[str, Any] | None:
        """An even share of what nobody holds, as JSON: waits until there is something. None: it is not here any more,
        which `give_back` has it look at.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._free or not is_here())
            if not is_here():
                return None
            share, num_bytes, tasks = math.ceil(len(self._free) / max(1, num_holders())), 0, {}
            while self._free and len(tasks) < share and num_bytes < MOST_BYTES:
                index = self._free.popleft()
                self._held[index] = holder
                tasks[index] = asdict(self._tasks[index])
                num_bytes += len(json.dumps(tasks[index]))
            return {
                "number": self._number,
                "policy_version": self._policy_version,
                "sampling": self._sampling.model_dump(include={"samples", "temperature", "top_p", "max_tokens"}),
                "tasks": tasks,
            }

    async def answer(self, holder: str, number: int, answers: dict[str, Any]) -> int:
        """By index: [reward, number of tokens, metrics] of each answer, or a reason. What it held and did not answer is
        free again. Returns how many were of use; raises ValueError, and takes none, for what is no answer.
        """
        checked = {index: self._checked(own) for index, own in answers.items()}
        if number != self._number:
            return 0
        own = {int(index): its for index, its in checked.items() if self._held.get(int(index)) == holder}
        self._answers |= own
        for index in own:
            del self._held[index]
        await self.give_back(holder)
        return len(own)

    async def give_back(self, holder: str) -> int:
        """What it holds is for others; returns how many tasks those are."""
        async with self._changed:
            back = [index for index, own in self._held.items() if own == holder]
            for index in back:
                del self._held[index]
            self._free.extend(back)
            self._changed.notify_all()
            return len(back)

    def _checked(self, given: Any) -> list[Evaluated] | str:
        if isinstance(given, str):
            return given[:MOST_REASON]
        try:
            answers = [Evaluated(reward=float(r), num_tokens=int(n), metrics=dict(m)) for r, n, m in given]
            ok = len(answers) == self._sampling.samples and all(map(_is_finite, answers))
        except (TypeError, ValueError, OverflowError):
            ok, answers = False, []
        if not ok:
            raise ValueError(f"evaluated: expected {self._sampling.samples} answers, each with finite numbers")
        return answers


def _is_finite(answer: Evaluated) -> bool:
    return (
        math.isfinite(answer.reward)
        and answer.num_tokens >= 0
        and len(answer.metrics) <= MOST_METRICS
        and all(
            isinstance(name, str) and len(name) <= MOST_NAME and type(value) in (int, float) and math.isfinite(value)
            for name, value in answer.metrics.items()
        )
    )
