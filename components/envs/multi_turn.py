"""A dialogue with feedback: the policy answers, receives feedback, and answers again."""

from __future__ import annotations

from ..config.environments import MultiTurnOptions
from ..config.names import user_names
from ..importing import import_user_object
from ..types import Completion, Task
from .rewards import AnyReward, exact_match
from .scoring import WeightedSum, score
from .step import Observation, Step, StepEnvironment


class MultiTurn(StepEnvironment):
    """Ends when the reward of an answer reaches `solved`, with the last turn, or when no further one fits; pays the
    last answer's reward.

    Metrics: those of the last answer's `Score`, "env/first_try" (1.0 where the first answer was enough).
    """

    Options = MultiTurnOptions

    def __init__(self, options: MultiTurnOptions, reward: AnyReward | WeightedSum = exact_match) -> None:
        super().__init__(options)
        self.options: MultiTurnOptions = options
        self._reward = reward
        self._feedback = None
        if user_names(options.feedback):  # not any text with a colon in it
            expected = "a function (task, text) -> str"
            self._feedback = import_user_object(options.feedback, key="env.options.feedback", expected=expected)

    async def reset(self, task: Task) -> Observation:
        self._task, self._turn, self._pay = task, 0, 0.0
        return task.prompt

    async def step(self, completion: Completion) -> Step:
        scored = await score(self._reward, self._task, completion.text, completion)
        self._turn += 1
        solved = scored.reward >= self.options.solved
        metrics = dict(scored.metrics)
        if self._turn == 1:
            metrics["env/first_try"] = float(solved)
        late = scored.reward * self.options.decay ** (self._turn - 1)
        self._pay = min(scored.reward, late)  # being late never makes a bad answer cost less
        if solved or self._turn >= self.max_turns:
            return None, self._pay, True, metrics
        if self._feedback is not None:
            return self._feedback(self._task, completion.text), 0.0, False, metrics
        return self.options.feedback.replace("{reward}", f"{scored.reward:g}"), 0.0, False, metrics

    async def out_of_room(self) -> float:
        return self._pay
