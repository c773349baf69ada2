"""One prompt, one answer: the whole group is a single request, and a reward function scores each completion."""

from __future__ import annotations

from ..config.environments import SingleTurnOptions
from ..types import Task, Trajectory
from .base import Environment, Policy
from .rewards import AnyReward, resolve_reward
from .scoring import WeightedSum, score_each


class SingleTurn(Environment):
    """Samples G answers to the task's prompt and scores them.

    `reward` is a function (task, text) -> number, sync or async, or the name of one. A sync function that may take long
    says so with an attribute `blocking = True` (or a function of the task) and is then run in a thread.
    """

    Options = SingleTurnOptions

    def __init__(
        self, options: SingleTurnOptions | None = None, *, reward: AnyReward | WeightedSum | str = "exact_match"
    ) -> None:
        super().__init__(options or SingleTurnOptions())
        self._reward = resolve_reward(reward) if isinstance(reward, str) else reward

    async def rollout(self, task: Task, policy: Policy) -> list[Trajectory]:
        """One request for `policy.group_size` completions; metrics: those of the reward's `Score`."""
        prompt_tokens = policy.encode(task.prompt)
        completions = await policy.generate(prompt_tokens, n=policy.group_size)
        scores = await score_each(self._reward, task, completions)
        return [
            Trajectory.from_completion(
                prompt_tokens,
                completion,
                reward=scored.reward,
                metrics=scored.metrics,
            )
            for completion, scored in zip(completions, scores, strict=True)
        ]
